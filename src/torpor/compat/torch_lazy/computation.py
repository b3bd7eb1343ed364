"""Graphs extracted from the trace, to be run again on other inputs.

`get_graph_hash` caches its graph, `run_cached_graph` compiles it once and runs it. The hash is that
of the graph's structure: traces that record the same ops on tensors of the same types have the same
one.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch

from torpor import config
from torpor.backend.data import BackendData
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.backend.registry import get_backend
from torpor.compat.torch_lazy.pending_graph import recorded_graph
from torpor.compat.torch_lazy.tensor_ids import UNKNOWN, id_of_storage
from torpor.compiling.compilation import compile_graph, device_of
from torpor.execute.queue import queue_of
from torpor.execute.storage import TRACE
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, Value
from torpor.ir.types import TensorType
from torpor.text.canonical import canonical_text
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import clone_plain, plain
from torpor.transactions.jobs import Job


def get_tensors_ts_device_data_node(
    tensors: Sequence[torch.Tensor],
) -> tuple[list[int], list[Any]]:
    """Ids and contents of the inputs of the graph that computes `tensors`.

    Contents are plain tensors, copied, or Python numbers where the graph takes those. An input
    whose id was never requested has the id -1.
    """
    with TRACE.lock:
        inputs = [_input(value) for value in recorded_graph(tensors).inputs]
    backend = get_backend()
    ids = [number for number, _ in inputs]
    return ids, [_contents(backend, content) for _, content in inputs]


def _input(value: Value) -> tuple[int, Any]:
    node = value.node
    if node.op is SCALAR:
        return UNKNOWN, TRACE.scalars[node.args[0]]
    if node.op is LEAF:
        storage = next(storage for storage, leaf in TRACE.leaf_storages if leaf is value)
        return id_of_storage(storage), TRACE.leaves[node.args[0]]
    return UNKNOWN, TRACE.computed[value]


def _contents(backend: Backend, content: Any) -> Any:
    if not isinstance(content, BackendData):
        return content
    return clone_plain(backend.tensor_from_data(content.wait()))


def get_graph_hash(tensors: Sequence[torch.Tensor]) -> bytes:
    """A hash of the graph that computes `tensors`, which is cached for `run_cached_graph`."""
    different = list({id(tensor): tensor for tensor in tensors}.values())
    graph = recorded_graph(different)
    digest = hashlib.sha256(canonical_text(graph).encode()).digest()[:16]
    if digest not in _cache:
        _cache[digest] = CachedGraph(graph)
    _cache.move_to_end(digest)
    while len(_cache) > config.max_cached_plans:
        _cache.popitem(last=False)
    return digest


def run_cached_graph(hash_str: bytes, graph_inputs: Sequence[Any]) -> list[torch.Tensor]:
    """Run a graph on inputs in the order of `get_tensors_ts_device_data_node`.

    Returns one plain tensor per distinct tensor given to `get_graph_hash`; for an unmodified input,
    the given input itself.
    """
    return find_graph(hash_str).run(graph_inputs)


def find_graph(hash_str: bytes) -> CachedGraph:
    """The cached graph with that hash."""
    found = _cache.get(hash_str)
    if found is None:
        raise RuntimeError(
            "Failed to get computation by hash. Maybe the entry get kicked out of the LRU cache: "
            f"it keeps {config.max_cached_plans} graphs (torpor.config.max_cached_plans)"
        )
    return found


class CachedGraph:
    """A copy of a recorded graph, compiled for the active backend."""

    def __init__(self, recorded: Graph) -> None:
        self.inputs = recorded.inputs
        self.outputs = recorded.outputs
        computed = [value for value in dict.fromkeys(self.outputs) if value not in self.inputs]
        self.graph = Graph(recorded.inputs, recorded.nodes, computed)
        self.device = device_of(recorded, get_backend())
        self._compiled: tuple[Backend, Computation] | None = None

    def compiled(self) -> tuple[Backend, Computation]:
        """The active backend, and the graph compiled by it."""
        backend = get_backend()
        if self._compiled is None or self._compiled[0] is not backend:
            name = f"cached{id(self):x}"
            self._compiled = backend, compile_graph(self.graph, name, backend, self.device)
        return self._compiled

    def run(self, inputs: Sequence[Any]) -> list[torch.Tensor]:
        """Run the graph and wait for it."""
        if len(inputs) != len(self.inputs):
            raise RuntimeError(f"expected {len(self.inputs)} inputs, but got {len(inputs)}")
        by_value = dict(zip(self.inputs, inputs, strict=True))
        if self.graph.outputs:
            backend, computation = self.compiled()
            arguments = [
                self._argument(backend, position, value, given)
                for position, (value, given) in enumerate(by_value.items())
            ]
            results = self._execute(backend, computation, arguments)
            for value, result in zip(self.graph.outputs, results, strict=True):
                by_value[value] = backend.tensor_from_data(result.wait())
        return [by_value[value] for value in self.outputs]

    def _argument(self, backend: Backend, position: int, value: Value, given: Any) -> Any:
        if value.node.op is SCALAR:
            return given
        try:
            real = _coerced(given, value.type)
        except ValueError as error:
            raise RuntimeError(f"graph input {position}: {error}") from None
        return backend.data_from_tensor(real, value.type, self.device)

    def _execute(
        self, backend: Backend, computation: Computation, arguments: list[Any]
    ) -> list[BackendData]:
        """Run on the device's queue; errors are raised here only."""
        results: list[BackendData] = []
        errors: list[Exception] = []

        def run() -> None:
            try:
                results.extend(backend.execute(computation, arguments, self.device))
            except Exception as error:
                errors.append(error)

        job = Job(run, [])
        queue_of(self.device).submit(job)
        job.done.wait()
        if errors:
            raise errors[0]
        return results


def _coerced(given: Any, type_: TensorType) -> torch.Tensor:
    """`given` as a plain tensor of the type that the graph was recorded for."""
    if not isinstance(given, torch.Tensor):
        raise ValueError(f"expected a tensor, got {type(given).__name__}")
    if tuple(given.shape) != type_.shape or given.dtype != type_.dtype:
        raise ValueError(
            f"the graph was recorded for {type_.dtype} of shape {list(type_.shape)}, "
            f"not {given.dtype} of shape {list(given.shape)}"
        )
    real = (plain(given) if isinstance(given, LazyTensor) else given).detach()
    if real.stride() == type_.stride and not (real.is_conj() or real.is_neg()):
        return real
    copy = torch.empty_strided(type_.shape, type_.stride, dtype=real.dtype, device=real.device)
    return copy.copy_(real)


_cache: OrderedDict[bytes, CachedGraph] = OrderedDict()
