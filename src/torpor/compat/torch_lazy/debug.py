"""The recorded graph as text and as a picture."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from torpor.backend.registry import get_backend
from torpor.compat.torch_lazy.graphs import device_of, recorded_graph
from torpor.compiling.compilation import compile_graph
from torpor.text.dot import dot
from torpor.text.printer import print_graph


def render_ir_graph(tensors: Sequence[torch.Tensor]) -> str:
    """The graph that will compute `tensors`, as Graphviz text."""
    return dot(recorded_graph(tensors))


def dump_ir(tensors: Sequence[torch.Tensor], ir_format: str) -> str:
    """The graph that will compute `tensors`.

    `ir_format` is "text" for torpor's IR or "backend" for what the backend makes of it.
    """
    if ir_format == "text":
        return print_graph(recorded_graph(tensors))
    if ir_format == "backend":
        graph, backend = recorded_graph(tensors), get_backend()
        return backend.computation_text(compile_graph(graph, "shown", backend, device_of(graph)))
    raise RuntimeError(f"Unrecognized IR format: {ir_format}")
