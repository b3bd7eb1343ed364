"""The graph that would compute given tensors in the current trace."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torpor.execute.storage import TRACE
from torpor.ir.graph import Graph
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import value_of


def recorded_graph(tensors: Sequence[torch.Tensor]) -> Graph:
    """The graph that would compute `tensors`, with one output each."""
    for tensor in tensors:
        if not isinstance(tensor, LazyTensor):
            raise TypeError(f"expected lazy tensors, got {type(tensor).__name__}")
    with TRACE.lock:
        values = [value_of(tensor) for tensor in tensors]  # type: ignore[arg-type]  # checked above
        return Graph.of(values, TRACE.computed)
