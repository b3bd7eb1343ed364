"""Backend-owned data and devices, fallbacks, decompositions, `torch.compile`.

For every backend; most relevant for those whose data are not torch tensors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional as F

import torpor
from torpor.backend import BackendData
from torpor.backends.equality import same_bits
from torpor.ir.types import TensorType
from torpor.testing.kit import Kit

X = torch.tensor([[1.0, -2.0, 0.5], [-0.25, 4.0, 3.0]])
Y = torch.tensor([[0.5, 0.5, -3.0], [2.0, -1.0, 8.0]])


# -- buffers -----------------------------------------------------------------------------------


def test_a_handle_is_filled_when_it_holds_a_buffer(kit: Kit) -> None:
    data = kit.data(X)
    empty = kit.backend.placeholder(data.device, data.type)
    assert data.filled() is True
    assert empty.filled() is False
    empty.assign(data)
    assert empty.filled() is True


def test_a_copy_of_data_is_data_of_its_own(kit: Kit) -> None:
    for tensor in (X, X.t(), X[:0], torch.tensor(2.5)):
        data = kit.data(tensor.clone())
        copy = kit.backend.copy_data(data)
        assert isinstance(copy, BackendData)
        assert copy is not data
        assert (copy.type, copy.device) == (data.type, data.device)
        assert same_bits(kit.read(copy).cpu(), tensor)
        assert kit.read(copy).stride() == kit.read(data).stride()


def test_a_copy_keeps_its_numbers_when_the_data_are_donated(kit: Kit) -> None:
    x = kit.put(X)
    torpor.sync(wait=True)
    copy = kit.backend.copy_data(x._lazy_storage.data)
    for _ in range(3):
        x.add_(1)
        torpor.sync(wait=True)
    assert same_bits(kit.read(copy).cpu(), X)
    kit.check(x, kit.eager(X + 3))


def test_a_buffer_that_others_hold_is_not_written_over(kit: Kit) -> None:
    x = kit.put(X)
    x.add_(1)
    torpor.sync(wait=True)
    held = kit.read(x._lazy_storage.data)  # the buffer itself, if it is a tensor
    before = held.clone()
    for _ in range(3):
        x.add_(1)
        torpor.sync(wait=True)
    assert same_bits(held.cpu(), before.cpu())
    kit.check(x, kit.eager(X + 4))


def test_whether_a_buffer_is_shared_is_a_yes_or_no(kit: Kit) -> None:
    assert isinstance(kit.backend.is_shared(kit.data(X)), bool)


# -- graphs ------------------------------------------------------------------------------------


def _in_the_middle(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Common ops around uncommon ones, which few backends lower."""
    z = x * 2 + y
    z = torch.special.zeta(z.abs() + 2, y.abs() + 1)
    values, places = (z - x).cummax(1)
    z = values * y + torch.logcumsumexp(x, 0)
    return z.t() + 1, places + 1, torch.nextafter(z, x).sum()


def test_ops_that_fall_back_in_the_middle_of_a_graph_are_right(kit: Kit) -> None:
    kit.agree(_in_the_middle, X, Y)


DECOMPOSED: dict[str, Callable[..., Any]] = {
    "gelu": lambda x: F.gelu(x),
    "silu": lambda x: F.silu(x),
    "layer_norm": lambda x: F.layer_norm(x, (3,)),
    "log_softmax": lambda x: F.log_softmax(x, 1),
    "smooth_l1": lambda x: F.smooth_l1_loss(x, x.detach() * 0.5 + 0.1),
    "addcmul": lambda x: torch.addcmul(x, x.detach(), x, value=0.5),
    "attention": lambda x: F.scaled_dot_product_attention(*(x.expand(1, 2, 2, 3) for _ in "qkv")),
    "in_place": lambda x: x.mul(2).add_(1).clamp_(min=0.0).div_(3),
    "lists": lambda x: torch.stack(torch.ops.aten._foreach_mul([x, x.exp()], 0.5)).sum(0),
}


@pytest.mark.parametrize("name", DECOMPOSED)
def test_ops_with_a_decomposition_are_right_forward_and_backward(kit: Kit, name: str) -> None:
    def program(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y = DECOMPOSED[name](x)
        y.sum().backward()
        assert x.grad is not None
        return y.detach(), x.grad

    kit.agree(program, X.clone().requires_grad_())


def test_decompositions_are_functions_by_the_names_of_ops(kit: Kit) -> None:
    table = kit.backend.decompositions()
    assert all(isinstance(name, str) and name.count(".") >= 2 for name in table)
    assert all(map(callable, table.values()))
    unknown = [name for name in table if not _is_op(name)]
    assert not unknown, f"torch has no such ops: {unknown}"


def _is_op(name: str) -> bool:
    namespace, packet, overload = name.rsplit(".", 2)
    found = getattr(getattr(torch.ops, namespace), packet, None)
    return found is not None and hasattr(found, overload)


def test_torch_compile_gives_what_eager_gives(kit: Kit) -> None:
    if kit.place == "concrete":
        pytest.skip("it takes plain tensors: there is nothing lazy about it")

    def program(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (x @ y.t()).relu() * 2, torch.special.zeta(x.abs() + 2, y.abs() + 1).t()

    torch.compiler.reset()
    compiled = torch.compile(program, backend="torpor")
    x, y = X.to(kit.physical), Y.to(kit.physical)
    with kit.watched("execute", "function") as calls:
        got = compiled(x, y)
    torch.compiler.reset()
    assert calls.made, "the backend was not asked"
    kit.check(got, program(x, y))


# -- devices -----------------------------------------------------------------------------------


def _last_device(kit: Kit) -> torch.device:
    devices = kit.backend.devices()
    if len(devices) < 2 or kit.place == "concrete":
        pytest.skip("there is one device")
    return torch.device("lazy", len(devices) - 1)


def test_data_are_on_the_device_they_were_made_for(kit: Kit) -> None:
    where = _last_device(kit)
    device = kit.backend.backend_device(where)
    data = kit.backend.data_from_tensor(X.clone(), TensorType.of_tensor(X, where), device)
    assert data.device == device
    assert kit.backend.copy_data(data).device == device
    assert kit.backend.data_from_scalar(2.5, device).device == device


def test_tensors_move_between_devices(kit: Kit) -> None:
    where = _last_device(kit)
    x, y = kit.put(X), X.clone().to(where)
    moved = (x + 1).to(where)
    z = moved * y
    back = (z + 1).to(kit.device)
    assert (moved.device, z.device, back.device) == (where, where, kit.device)
    for got, expected in ((moved, X + 1), (z, (X + 1) * X), (back, (X + 1) * X + 1)):
        assert same_bits(got.cpu(), expected)
    assert z._lazy_storage.data.device == kit.backend.backend_device(where)


def test_a_graph_for_several_devices_is_compiled_once(kit: Kit) -> None:
    where = _last_device(kit)
    first, last = (str(kit.backend.backend_device(d)) for d in (kit.device, where))
    names = [str(device) for device in kit.backend.devices()]
    shared = last in kit.backend.compilation_devices(first, names)
    with kit.watched("compile") as calls:
        for device in (kit.device, where, kit.device, where):
            x = X.clone().to(device)
            assert same_bits(((x + x) * x).cpu(), (X + X) * X)  # numbers could be promoted
            torpor.sync(wait=True)
    assert calls.count("compile") <= (1 if shared else 2)
