"""Ops of torpor's own for writes that no ATen op expresses."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torpor import _torch

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
