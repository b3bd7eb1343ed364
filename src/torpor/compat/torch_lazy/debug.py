"""The recorded graph as text and as Graphviz."""

from __future__ import annotations

import hashlib
import os
import traceback
from collections.abc import Sequence
from typing import Any

import torch

from torpor.backend.registry import get_backend
from torpor.compat.torch_lazy.pending_graph import recorded_graph
from torpor.compiling.compilation import compile_graph, device_of
from torpor.execute.storage import TRACE
from torpor.ir.graph import Graph
from torpor.text.dot import dot
from torpor.text.printer import print_graph


def _get_tensors_text(tensors: Sequence[torch.Tensor]) -> str:
    """The graph that would compute `tensors`, as text (`torch._C._lazy._get_tensors_text`)."""
    return dump_ir(tensors, "text")


def save_graph() -> None:
    """Append the graph of everything live to the file named by `LTC_SAVE_TENSORS_FILE`, if set.

    Includes the Python stack, innermost first, in LTC's format. `LTC_SAVE_TENSORS_FMT` is "text",
    "dot" or "backend".
    """
    path = os.environ.get("LTC_SAVE_TENSORS_FILE")
    with TRACE.lock:
        values: list[Any] = [storage.value for storage in TRACE.live()] if path else []
        graph = Graph.of(values, TRACE.computed)
    if not path or not values:
        return
    text = _as(os.environ.get("LTC_SAVE_TENSORS_FMT", "text"), graph)
    frames = reversed(traceback.extract_stack()[:-1])
    stack = "\n".join(f"  {frame.name} ({frame.filename}:{frame.lineno})" for frame in frames)
    digest = hashlib.sha256(text.encode()).hexdigest()[:32]
    with open(path, "a", encoding="utf-8") as file:
        file.write(
            f"[ScheduleSyncTensorsGraph]\nPython Stacktrace:\n{stack}\n\nHashes: ({digest})\n\n"
            f"## BEGIN_GRAPH\n{text}\n## END_GRAPH\n\n"
        )


def _as(form: str, graph: Graph) -> str:
    if form == "text":
        return print_graph(graph)
    if form == "dot":
        return dot(graph)
    if form == "backend":
        backend = get_backend()
        return backend.computation_text(
            compile_graph(graph, "shown", backend, device_of(graph, backend))
        )
    raise RuntimeError(f"Unrecognized IR format: {form}")


def render_ir_graph(tensors: Sequence[torch.Tensor]) -> str:
    """The graph that would compute `tensors`, as Graphviz text."""
    return dot(recorded_graph(tensors))


def dump_ir(tensors: Sequence[torch.Tensor], ir_format: str) -> str:
    """The graph that would compute `tensors`.

    `ir_format` is "text" for torpor's IR, or "backend" for the backend's text.
    """
    if ir_format == "dot":  # that is `render_ir_graph`
        raise RuntimeError(f"Unrecognized IR format: {ir_format}")
    return _as(ir_format, recorded_graph(tensors))
