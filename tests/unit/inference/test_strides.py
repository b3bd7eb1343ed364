"""Strides of elementwise results, against the kernels themselves."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

import torpor

aten = torch.ops.aten

OPS = {
    "add": lambda x, y: x + y,
    "mul": lambda x, y: x * y,
    "maximum": torch.maximum,
    "less": lambda x, y: x < y,
    "where": lambda x, y: torch.where(x > 0, y, x),
    "addcmul": lambda x, y: torch.addcmul(x, y, x),
    "threshold_backward": lambda x, y: aten.threshold_backward(x, y, 0),
    "number": lambda x, y: x + 1,
    "number_first": lambda x, y: 2 - x,
    "power": lambda x, y: x**3,
    "power_of_number": lambda x, y: 2.0**x,
    "power_of_one": lambda x, y: 1**x,
    "foreach_power_of_number": lambda x, y: torch._foreach_pow(2.0, [x])[0],
    "exp": lambda x, y: x.exp(),
    "clamp": lambda x, y: x.clamp(0, 1),
    "lerp": lambda x, y: x.lerp(y, 0.5),
    "zeros_like": lambda x, y: torch.zeros_like(x),
    "hardtanh": lambda x, y: torch.nn.functional.hardtanh(x),
    "nan_to_num": lambda x, y: x.nan_to_num(),
    "clone": lambda x, y: x.clone(),
    "logical_and": torch.logical_and,
    "gelu": lambda x, y: torch.nn.functional.gelu(x),
    "div_mode": lambda x, y: torch.div(x, y, rounding_mode="floor"),
}


def _window(choose: random.Random, shape: list[int]) -> Tensor:
    """A view of ones: permuted, with holes, expanded or plain, perhaps broadcast to `shape`."""
    shape = [1 if choose.random() < 0.15 else size for size in shape]
    order = choose.sample(range(len(shape)), len(shape))
    holes = choose.choice([1, 1, 2])
    base = torch.ones([shape[dim] * holes for dim in order])[
        (slice(None, None, holes),) * len(shape)
    ]
    view = base.permute([order.index(dim) for dim in range(len(shape))])
    if choose.random() < 0.3:
        narrow = tuple(slice(0, 1) if choose.random() < 0.5 else slice(None) for _ in shape)
        view = view[narrow].expand([min(size, 1) and size for size in shape])
    return view


def _cases(seed: int) -> list[tuple[Tensor, Tensor]]:
    choose = random.Random(seed)
    cases = []
    for _ in range(60):
        shape = [choose.choice([1, 1, 2, 3, 4]) for _ in range(choose.randint(1, 4))]
        cases.append((_window(choose, shape), _window(choose, shape)))
    return cases


def _lazy(tensor: Tensor) -> Tensor:
    """A lazy tensor with the very strides of `tensor`."""
    memory = torpor.lazy(tensor.as_strided((tensor.untyped_storage().nbytes() // 4,), (1,)))
    return memory.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


@pytest.mark.parametrize("name", OPS)
def test_an_elementwise_result_has_the_strides_of_the_kernels(name: str) -> None:
    for x, y in _cases(len(name)):
        expected, got = OPS[name](x, y), OPS[name](_lazy(x), _lazy(y))
        layouts = [(tuple(t.shape), t.stride()) for t in (x, y)]
        assert (got.shape, got.stride()) == (expected.shape, expected.stride()), layouts


OWN = {  # kernels that choose the layout of their results by themselves, whatever they are given
    "log_softmax": lambda x, y: x.log_softmax(0),
    "log_softmax_backward": lambda x, y: aten._log_softmax_backward_data(x, y, 0, x.dtype),
    "softmax_backward": lambda x, y: aten._softmax_backward_data(x, y, 0, x.dtype),
    "mse_loss_backward": lambda x, y: aten.mse_loss_backward(x, y, y, 1),
    "smooth_l1_loss_backward": lambda x, y: aten.smooth_l1_loss_backward(x, y, y, 1, 1.0),
    "huber_loss_backward": lambda x, y: aten.huber_loss_backward(x, y, y, 1, 1.0),
    "layer_norm": lambda x, y: _layer_norm(x)[0],
    "layer_norm_backward": lambda x, y: aten.native_layer_norm_backward(
        x, y, [x.shape[-1]], *_layer_norm(y)[1:], None, None, [True, False, False]
    )[0],
    "batch_norm": lambda x, y: torch.batch_norm(x, None, None, None, None, True, 0.1, 1e-5, False),
    "batch_norm_backward": lambda x, y: aten.native_batch_norm_backward(
        x, y, None, None, None, *_batch_norm(y)[1:], True, 1e-5, [True, False, False]
    )[0],
}


def _layer_norm(x: Tensor) -> tuple[Tensor, ...]:
    return torch.native_layer_norm(x, [x.shape[-1]], None, None, 1e-5)


def _batch_norm(x: Tensor) -> tuple[Tensor, ...]:
    return torch.native_batch_norm(x, None, None, None, None, True, 0.1, 1e-5)


@pytest.mark.parametrize("name", OWN)
@pytest.mark.parametrize("sizes", [(5, 5, 5), (2, 3, 4), (2, 3, 4, 5), (40, 30, 20)])
def test_a_result_has_the_strides_that_its_kernel_chooses(
    name: str, sizes: tuple[int, ...]
) -> None:
    plain = torch.ones(sizes)
    moved = torch.ones(sizes).transpose(1, 2).contiguous().transpose(1, 2)
    reversed_ = torch.ones(sizes[::-1]).permute(*reversed(range(len(sizes))))
    for x, y in [(moved, plain), (plain, moved), (moved, moved), (reversed_, moved)]:
        expected, got = OWN[name](x, y), OWN[name](_lazy(x), _lazy(y))
        assert got.stride() == expected.stride(), (x.stride(), y.stride())
