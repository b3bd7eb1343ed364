"""Index errors that are apparent from types alone, but that fake kernels do not detect."""

from __future__ import annotations

from typing import Any, Final

import torch

from torpor.ir.node import Value
from torpor.ir.types import TensorType
from torpor.ops import rules
from torpor.ops.spec import OpSpec

Ints = tuple[int, ...]

_PUTS: Final = frozenset({"index_put", "index_put_", "_index_put_impl_", "_unsafe_index_put"})
_MASKS: Final = (torch.bool, torch.uint8)


def is_doubtful(spec: OpSpec, bound: list[Any]) -> bool:
    """Whether eager may reject these types for any indices, so that the real kernel must decide."""
    name = spec.target._opname
    if name not in rules.INDEXING or spec.target.namespace != "aten":
        return False
    if name in _PUTS and not _can_be_put(*bound[:3]):
        return True
    return _is_of_nothing(bound)


def _is_of_nothing(bound: list[Any]) -> bool:
    """Whether there are indices, but the indexed tensor is empty."""
    items = [item for v in bound for item in (v if type(v) is tuple else (v,))]
    types = [v.type for v in items if type(v) is Value and type(v.type) is TensorType]
    return not types[0].numel and any(type_.numel for type_ in types[1:])


def _can_be_put(target: Value, indices: tuple[Value | None, ...], values: Value) -> bool:
    """Whether `values` can be written at `indices`; True for masks, whose contents decide."""
    if values.type.dtype is not target.type.dtype:
        return False
    if any(index is not None and index.type.dtype in _MASKS for index in indices):
        return True
    found = indexed_shape(target.type.shape, [None if i is None else i.type.shape for i in indices])
    return found is not None and _expands(values.type.shape, found)


def indexed_shape(shape: Ints, indices: list[Ints | None]) -> Ints | None:
    """The size of an indexing result: dimensions of adjacent indices stay in place."""
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if len(indices) > len(shape) or not given:
        return None
    try:
        size = tuple(torch.broadcast_shapes(*(index for index in indices if index is not None)))
    except RuntimeError:
        return None
    together = given[-1] - given[0] + 1 == len(given)
    rest = [extent for dim, extent in enumerate(shape) if dim not in given]
    place = given[0] if together else 0
    return (*rest[:place], *size, *rest[place:])


def _expands(size: Ints, to: Ints) -> bool:
    if len(size) > len(to):
        return False
    return all(one in (1, other) for one, other in zip(reversed(size), reversed(to)))
