"""Ops of torpor's own for writes that no ATen op expresses."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torpor import _torch
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType

Apply = Callable[[Any, list[Any]], Node]

_library = torch.library.Library("torpor", "DEF")
_library.define(
    "storage_scatter(Tensor self, Tensor src, ScalarType dtype, int[] size, int[] stride, "
    "int offset, bool conj, bool neg) -> Tensor"
)


def _storage_scatter(
    self: torch.Tensor,
    src: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    conj: bool,
    neg: bool,
) -> torch.Tensor:
    """A copy of `self` with `src` written through a view of any dtype and strides."""
    result = torch.empty_strided(
        self.shape, self.stride(), dtype=self.dtype, device=self.device
    ).copy_(self)
    window(result, dtype, size, stride, offset, conj, neg).copy_(src)
    return result


def window(
    tensor: torch.Tensor,
    dtype: torch.dtype,
    size: Sequence[int],
    stride: Sequence[int],
    offset: int,
    conj: bool = False,
    neg: bool = False,
    memory: torch.UntypedStorage | None = None,
) -> torch.Tensor:
    """A view of the memory of `tensor`, or of `memory`: any dtype, size, strides and offset."""
    view = torch.empty((0,), dtype=dtype, device=tensor.device)
    view.set_(memory or tensor.untyped_storage(), offset, tuple(size), tuple(stride))
    if conj:
        _torch.set_conj(view, True)
    if neg:
        _torch.set_neg(view, True)
    return view


def _storage_scatter_type(self: torch.Tensor, *args: object) -> torch.Tensor:
    return torch.empty_strided(self.shape, self.stride(), dtype=self.dtype, device=self.device)


_library.impl("storage_scatter", _storage_scatter, "CompositeExplicitAutograd")
_library._register_fake("storage_scatter", _storage_scatter_type)

storage_scatter = torch.ops.torpor.storage_scatter.default


# -- the write that works for views of any kind ----------------------------------------------------


def scatter_anywhere(apply: Apply, root: Value, type_: TensorType, new: Value) -> Value:
    """The contents `root` after `new` was written to the memory that `type_` describes.

    `apply` records an op on values.
    """
    type_, new = _without_repeats(apply, type_, new)
    if type_.dtype == root.type.dtype and not type_.conj and not type_.neg:
        bound = [root, new, type_.shape, type_.stride, type_.offset]
        return apply(torch.ops.aten.as_strided_scatter.default, bound).outputs[0]
    bound = [
        root, new, type_.dtype, type_.shape, type_.stride, type_.offset, type_.conj, type_.neg,
    ]  # fmt: skip
    return apply(storage_scatter, bound).outputs[0]


def _without_repeats(apply: Apply, type_: TensorType, new: Value) -> tuple[TensorType, Value]:
    """One element for each address: an expanded dimension is written once."""
    shape = list(type_.shape)
    for dim, stride in enumerate(type_.stride):
        if stride == 0 and shape[dim] > 1:
            shape[dim] = 1
            new = apply(torch.ops.aten.slice.Tensor, [new, dim, 0, 1, 1]).outputs[0]
    narrowed = TensorType.of(
        tuple(shape), type_.stride, type_.dtype, type_.device, type_.offset, type_.conj, type_.neg
    )
    return narrowed, new
