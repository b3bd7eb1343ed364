"""Nodes made by the core and by backends themselves, outside any recorded op."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from torpor.inference.infer import infer
from torpor.ir.node import Node, Value, intern, leaf, scalar
from torpor.ir.types import TensorType
from torpor.ops.keys import key_of
from torpor.ops.spec import spec_of

aten = torch.ops.aten


class IrBuilder:
    """Makes leaves, run-time scalars and nodes; a backend may subclass it.

    The core uses it for every leaf and every run-time scalar of a trace. `physical` maps a device
    to the torch device that backs it; without it, nodes can be made on real devices only.
    """

    def __init__(self, physical: Callable[[torch.device], torch.device] | None = None) -> None:
        self._physical = physical or _itself

    def device_data(self, slot: int, type_: TensorType) -> Value:
        """The buffer in leaf slot `slot` of a trace."""
        return leaf(slot, type_)

    def scalar(self, slot: int, number: Any) -> Value:
        """The number in run-time scalar slot `slot` of a trace."""
        return scalar(slot, type(number))

    def expand(self, value: Value, size: Sequence[int]) -> Value:
        """`value` with dimensions of size 1 expanded to `size`."""
        return self.generic(aten.expand.default, [value, tuple(size), False]).outputs[0]

    def cast(self, value: Value, dtype: torch.dtype) -> Value:
        """`value` converted to `dtype`; `value` itself if it has that dtype already."""
        if value.type.dtype == dtype:
            return value
        bound = [value, dtype, None, None, None, False, None]
        return self.generic(aten._to_copy.default, bound).outputs[0]

    def tensor_list(self, values: Sequence[Value]) -> tuple[Value, ...]:
        """Values as an argument of type `Tensor[]`."""
        return tuple(values)

    def generic(self, target: Any, bound: list[Any], site: Any = None) -> Node:
        """The node of any op on `bound`, its arguments in schema order: found or made."""
        spec = spec_of(target)
        key = key_of(spec, bound)
        types = partial(infer, spec, key, bound, {}, self._physical)
        return intern(spec.kind, key, lambda: (tuple(bound), types(), site))

    def size(self, value: Value, dim: int) -> int:
        """The size of `value` along `dim`: an int, so arithmetic on it makes no nodes."""
        shape = value.type.shape
        if not -len(shape) <= dim < len(shape):
            raise IndexError(f"no dimension {dim} in {value.type!r}")
        return shape[dim]  # type: ignore[no-any-return]  # the value of a tensor


def _itself(device: torch.device) -> torch.device:
    return device
