"""Nodes the core builds itself, outside any recorded op."""

from __future__ import annotations

from typing import Any

from torpor.ir.node import Value, leaf, scalar
from torpor.ir.types import TensorType


class IrBuilder:
    """Builds leaves and run-time scalars; a backend may derive from it."""

    def device_data(self, slot: int, type_: TensorType) -> Value:
        """The `slot`-th buffer of a trace."""
        return leaf(slot, type_)

    def scalar(self, slot: int, number: Any) -> Value:
        """The `slot`-th run-time number of a trace."""
        return scalar(slot, type(number))
