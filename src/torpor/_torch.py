"""Everything torpor takes from inside torch, in one place.

A new torch release that moves one of these breaks here, and the test of the same name in
`tests/unit/test_torch_internals.py` says which.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import _C
from torch._ops import OpOverload as OpOverload
from torch.utils import _pytree as pytree

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Makes a tensor with sizes, strides, dtype and device, and no memory."""

disabled_torch_function = _C._disabled_torch_function_impl
set_conj: Callable[[torch.Tensor, bool], None] = _C._set_conj
set_neg: Callable[[torch.Tensor, bool], None] = _C._set_neg

set_metadata: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]
"""Gives a tensor the sizes, strides and dtype of another (the setter of `Tensor.data`)."""

tree_map = pytree.tree_map
tree_leaves = pytree.tree_leaves


def without_torch_function() -> AbstractContextManager[Any]:
    """Switches off `__torch_function__` and its modes, the default device among them."""
    return _C.DisableTorchFunction()


@contextmanager
def plain_kernels() -> Iterator[None]:
    """Runs the body on plain tensors as eager PyTorch would, whatever mode surrounds us."""
    with _C.DisableTorchFunction(), _C._DisableTorchDispatch():
        yield


@functools.cache
def fake_mode() -> Any:
    """The fake-tensor mode that infers types with no numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=False)


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """What fake tensors raise for an op whose result type depends on numbers."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    return (DataDependentOutputException, DynamicOutputShapeException)


def unsupported_errors() -> tuple[type[BaseException], ...]:
    """What fake tensors raise for an op they know nothing about."""
    from torch._subclasses.fake_tensor import (
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )

    return (UnsupportedOperatorException, UnsupportedFakeTensorException, NotImplementedError)


def set_op_attribute(op: OpOverload, name: str, value: Any) -> None:
    """Keep something of ours on a torch op: one attribute look-up on the hot path, no hashing."""
    setattr(op, name, value)


def op_attribute(op: OpOverload, name: str) -> Any:
    """What `set_op_attribute` kept, or None."""
    return getattr(op, name, None)


def is_composite(op: OpOverload) -> bool:
    """The op is made of other ops, also for autograd: torch normally never shows it to us."""
    return bool(
        _C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd")
    )


_FACTORIES = (
    "arange", "arange.start", "arange.start_step", "bartlett_window", "blackman_window", "empty.memory_format",
    "empty_strided", "empty_permuted", "eye", "eye.m", "full", "hamming_window", "hann_window", "kaiser_window",
    "linspace", "logspace", "ones", "rand", "randint", "randint.low", "randn", "randperm", "range",
    "range.step", "scalar_tensor", "tril_indices", "triu_indices", "zeros", "rand.generator", "randn.generator",
    "randint.generator", "randint.low_generator", "randperm.generator", "normal.float_float", "_efficientzerotensor",
)  # fmt: skip


def factory_ops() -> list[OpOverload]:
    """Ops that make a tensor from nothing and choose their kernel by the `device` argument."""
    found = []
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None and not is_composite(op):
            found.append(op)
    return found
