"""The graph that stands behind given tensors in the trace being recorded."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torpor.backend.device import BackendDevice
from torpor.backend.registry import get_backend
from torpor.execute.storage import TRACE
from torpor.ir.graph import Graph
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import value_of


def recorded_graph(tensors: Sequence[torch.Tensor]) -> Graph:
    """The graph that will compute `tensors`, one output for each."""
    for tensor in tensors:
        if not isinstance(tensor, LazyTensor):
            raise TypeError(f"expected lazy tensors, got {type(tensor).__name__}")
    with TRACE.lock:
        values = [value_of(tensor) for tensor in tensors]  # type: ignore[arg-type]  # checked above
        return Graph.of(values, TRACE.computed)


def device_of(graph: Graph) -> BackendDevice:
    """The device on which a graph runs: that of its first tensor."""
    for value in (*graph.outputs, *graph.inputs):
        if value.type is not None:
            return get_backend().backend_device(value.type.device)
    return get_backend().backend_device(torch.device("lazy"))
