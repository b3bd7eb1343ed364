"""Packing and padding of sequences, as gathers with indices known when recorded.

Sequence lengths and batch sizes are plain tensors, as on every device. So all sizes are known
without a sync. In the graph the indices are ordinary leaves: a batch with other lengths uses the
same graph.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torpor import _torch
from torpor.errors import annotate
from torpor.observe.site import site
from torpor.overrides.composites import on_cpu, override, taken_apart
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import wrap_data

aten = torch.ops.aten


class _Places(NamedTuple):
    """Maps rows of a packed sequence to positions (step, sequence) in the padded one, and back."""

    steps: torch.Tensor  # of each row
    sequences: torch.Tensor
    rows: torch.Tensor  # at each position; 0 for padding
    is_padding: torch.Tensor

    @staticmethod
    def of_rows(places: torch.Tensor, shape: torch.Size, device: torch.device) -> _Places:
        """From flat positions, in packed order, in a padded sequence of `shape`."""
        table = torch.full(shape, -1)
        table.view(-1)[places] = torch.arange(len(places))
        return _Places._of(places, table, device)

    @staticmethod
    def of_table(table: torch.Tensor, device: torch.device) -> _Places:
        """From a table of row numbers, -1 for padding."""
        places = (table.view(-1) >= 0).nonzero().view(-1)
        return _Places._of(places, table, device)

    @staticmethod
    def _of(places: torch.Tensor, table: torch.Tensor, device: torch.device) -> _Places:
        batch = table.shape[1]
        found = (places // batch, places % batch, table.clamp(min=0), table < 0)
        return _Places(*(wrap_data(tensor, device) for tensor in found))

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """Gather the rows of a padded sequence."""
        return padded[self.steps, self.sequences].contiguous()

    def padded(self, packed: torch.Tensor, value: Any) -> torch.Tensor:
        """Scatter rows to their positions, with `value` as padding."""
        is_padding = self.is_padding[(..., *[None] * (packed.dim() - 1))]
        return packed[self.rows].masked_fill(is_padding, value).contiguous()


class Packed(torch.autograd.Function):
    """Packs a padded sequence, differentiable."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, places: _Places) -> Any:
        ctx.places = places
        return places.packed(padded)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _padded(grad, ctx.places, 0), None


class Padded(torch.autograd.Function):
    """Pads a packed sequence, differentiable."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, places: _Places, value: Any) -> Any:
        ctx.places = places
        return places.padded(packed, value)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _packed(grad, ctx.places), None, None


_apply_packed: Callable[..., torch.Tensor] = Packed.apply
_apply_padded: Callable[..., torch.Tensor] = Padded.apply


def _has_own_derivative(tensor: torch.Tensor) -> bool:
    return not (_torch.is_transforming() or _torch.has_tangent(tensor))


def _packed(padded: torch.Tensor, places: _Places) -> torch.Tensor:
    if _has_own_derivative(padded):
        return _apply_packed(padded, places)
    return places.packed(padded)


def _padded(packed: torch.Tensor, places: _Places, value: Any) -> torch.Tensor:
    if _has_own_derivative(packed):
        return _apply_padded(packed, places, value)
    return places.padded(packed, value)


def _judged(op: Any, *args: Any) -> Any:
    """Run eager's op on plain tensors, or raise its error."""
    try:
        with _torch.kernels(), _torch.without_modes():
            return op(*args)
    except Exception as error:
        raise annotate(error, str(op), str(site())) from None


@override(aten._pack_padded_sequence.default)
def pack_padded_sequence(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """The packed rows are lazy; batch sizes are plain, as on every device."""
    op = aten._pack_padded_sequence.default
    if type(lengths) is LazyTensor:
        lengths = on_cpu(lengths)
    with _torch.without_modes():
        if type(input) is not LazyTensor:
            return op(input, lengths, batch_first)
        if input.dim() < 2 or not input.numel():
            return _judged(op, torch.zeros(input.shape), lengths, batch_first)
        padded = input.transpose(0, 1) if batch_first else input
        shape = padded.shape[:2]
        rows, batch_sizes = _judged(op, torch.arange(shape.numel()).view(shape), lengths, False)
        places = _Places.of_rows(rows, shape, input.device)
    return _packed(padded, places), batch_sizes


@override(aten._pad_packed_sequence.default)
def pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: Any, length: int
) -> Any:
    """The padded sequence is lazy; lengths are plain."""
    op = aten._pad_packed_sequence.default
    if type(batch_sizes) is LazyTensor:
        batch_sizes = on_cpu(batch_sizes)
    with _torch.without_modes():
        if type(data) is not LazyTensor:
            return taken_apart(op, data, batch_sizes, batch_first, value, length)
        table, lengths = _judged(op, torch.arange(len(data)), batch_sizes, False, -1, length)
        places = _Places.of_table(table, data.device)
    padded = _padded(data, places, value)
    return padded.transpose(0, 1) if batch_first else padded, lengths
