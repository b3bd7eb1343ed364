"""Compiling one graph: with its backend, or with the reference backend as a stand-in."""

from __future__ import annotations

import functools
import sys
import warnings
from collections.abc import Collection, Mapping, Sequence
from types import FrameType, MappingProxyType
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torpor import config
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.failures import CompileFailure, reproduction
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.backend.registry import make
from torpor.errors import CompileError, TorporWarning
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.passes import Pass, run_passes
from torpor.passes.buckets import buckets
from torpor.passes.expand import Vocabulary, expand
from torpor.symbols.expressions import Symbol
from torpor.text.canonical import NotCanonical, canonical_text
from torpor.text.printer import print_node

NOTHING_DONATED: Mapping[int, int] = MappingProxyType({})


def device_of(graph: Graph, backend: Backend) -> BackendDevice:
    """The device on which a backend runs a graph: that of its first tensor."""
    for value in (*graph.outputs, *graph.inputs):
        if isinstance(value.type, TensorType):
            return backend.backend_device(value.type.device)
    return backend.backend_device(torch.device("cpu"))


def compile_graph(
    graph: Graph,
    name: str,
    backend: Backend,
    device: BackendDevice,
    donated: Mapping[int, int] = NOTHING_DONATED,
    saved: bytes | None = None,
    sizes: Mapping[Symbol, int] | None = None,
    free_strides: Collection[int] = (),
) -> Computation:
    """Lower and compile `graph`; an error names the backend, the graph and the user's line.

    With `saved`, the bytes from the backend's `dump` for this graph, it is loaded instead. A graph
    with symbols is compiled for `sizes`, among others; by default, those of this trace. The strides
    of results in `free_strides` may differ from the promised ones.
    """
    node: Node | None = None
    sizes = dict(sizes_now(graph) if sizes is None else sizes)
    try:
        graph = for_backend(graph, backend)
        context = backend.lowering_context(name, device, graph.nodes)
        context.devices = devices_for(backend, device)
        context.hints = sizes
        context.free_strides = frozenset(free_strides)
        for value in graph.inputs:
            context.add_parameter(value)
        for node in graph.nodes:
            context.lower(node)
        node = None
        for value in graph.outputs:
            context.add_result(value)
        for parameter, result in donated.items():
            context.set_alias(parameter, result)
        lowered = context.build()
        if saved is not None:
            return _only([backend.load(lowered, saved)])
        return _only(backend.compile([lowered]))
    except Exception as error:
        node = node or getattr(error, "node", None)  # from a registered lowering that is wrong
        failed = CompileError(_explain(error, graph, name, backend, node))
        failed.failure = CompileFailure(graph, backend, error, donated, sizes)
        if isinstance(error, CompileError) and error.failure is not None:
            failed.failure = error.failure  # more precise: a part of the graph
        raise failed from error


def devices_for(backend: Backend, device: BackendDevice) -> tuple[str, ...]:
    """The devices on which a graph compiled for `device` may run."""
    return tuple(backend.compilation_devices(str(device), list(map(str, backend.devices()))))


_compiled: WeakKeyDictionary[Backend, dict[Any, Computation]] = WeakKeyDictionary()


def compile_once(
    graph: Graph,
    name: str,
    backend: Backend,
    device: BackendDevice,
    donated: Mapping[int, int],
    saved: bytes | None,
    sizes: Mapping[Symbol, int],
) -> Computation:
    """`compile_graph`, or its result for the same graph on another, interchangeable device."""
    devices = devices_for(backend, device)
    key = _without_devices(graph) if len(devices) > 1 and not graph.symbols else None
    known = _compiled.setdefault(backend, {})
    found = None if key is None else known.get((key, devices, *donated.items()))
    if found is None:
        found = compile_graph(graph, name, backend, device, donated, saved, sizes)
        if key is not None:
            known[key, devices, *donated.items()] = found
    return found


def _without_devices(graph: Graph) -> str | None:
    """The text of a graph on one device, without its index; None if there is no such text."""
    devices = {value.type.device for value in (*graph.inputs, *graph.outputs) if _is_tensor(value)}
    try:
        text = canonical_text(graph)
    except NotCanonical:
        return None
    return text.replace(str(devices.pop()), "lazy") if len(devices) == 1 else None


def _is_tensor(value: Value) -> bool:
    return type(value.type) is TensorType


def sizes_now(graph: Graph) -> dict[Symbol, int]:
    """The values of the symbols of `graph` in this trace."""
    return {symbol: symbol.value for symbol in graph.symbols}


def for_backend(graph: Graph, backend: Backend) -> Graph:
    """`graph` as `backend` sees it: ops with a registered lowering are decomposed."""
    return run_passes(_first_passes(backend), graph)


def _first_passes(backend: Backend) -> tuple[Pass, ...]:
    """The passes that do not depend on the device."""
    largest = config.bucket_bytes
    return (_expand(backend), *((buckets(largest),) if largest > 0 else ()))


def _expand(backend: Backend) -> Pass:
    def physical(device: torch.device) -> torch.device:
        return backend.backend_device(device).torch_device

    table = backend.decompositions()
    return expand(Vocabulary(backend.name, physical, table, backend.functional, backend.draws))


def passes_of(backend: Backend, device: BackendDevice) -> tuple[Pass, ...]:
    """All passes between a recorded graph and a compiled one, in order."""
    return (*_first_passes(backend), *backend.passes(device))


def _only(computations: Any) -> Computation:
    if not isinstance(computations, (list, tuple)) or len(computations) != 1:
        raise TypeError(f"compile was given one computation and returned {computations!r}")
    if not isinstance(computations[0], Computation):
        raise TypeError(f"compile returned a {type(computations[0]).__name__}, not a Computation")
    return computations[0]


def _explain(error: Exception, graph: Graph, name: str, backend: Backend, node: Node | None) -> str:
    what = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    lines = [f"backend {backend.name!r} could not compile {name}: {what}"]
    at_fault = node or next((value.node for value in graph.outputs), None)
    if at_fault is not None and at_fault.site is not None:
        lines.append(f"  recorded at: {at_fault.site}")
    if at_fault is not None:
        lines.append(f"  in graph:    {print_node(at_fault)}")
    lines.append("  fix:         lower the op, or run the step with torpor.use('reference')")
    return "\n".join(lines)


class StandIn:
    """Runs a graph on the reference backend, in place of a backend that has not compiled it.

    Data remain the backend's: they are converted to tensors before the run, and back after it.
    """

    scalars_as_data = False  # the reference backend takes numbers

    def __init__(
        self,
        graph: Graph,
        name: str,
        backend: Backend,
        device: BackendDevice,
        failure: CompileError | None = None,
    ) -> None:
        self.backend = backend
        self.reference = _reference()
        try:
            self.computation = compile_graph(graph, name, self.reference, device)
        except CompileError:
            if failure is None:
                raise
            raise failure from failure.__cause__

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        """Run on the reference backend; returns data of the original backend."""
        arguments = arguments[: len(computation.graph.inputs)]  # without the seed: it ignores that
        given = [self._lend(a) if isinstance(a, BackendData) else a for a in arguments]
        return [self._take(r) for r in self.reference.execute(computation, given, device)]

    def runs_here(self, computation: Computation, in_turn: bool) -> bool:
        """As for the reference backend."""
        return self.reference.runs_here(computation, in_turn)

    def runs_on_one_core(self, computation: Computation) -> bool:
        """As for the reference backend."""
        return self.reference.runs_on_one_core(computation)

    def _lend(self, data: BackendData) -> BackendData:
        if data.error is not None:
            return data
        return BackendData(data.device, data.type, self.backend.tensor_from_data(data))

    def _take(self, result: BackendData) -> BackendData:
        if result.tensor is None:
            return result
        device = self.backend.backend_device(result.type.device)  # `x.cpu()` is on another device
        return self.backend.data_from_tensor(result.tensor, result.type, device)


@functools.cache
def _reference() -> Backend:
    return make("reference")


def leave_reproduction(error: CompileError) -> None:
    """Write a program that reproduces the failure, and add its path to the error."""
    if isinstance(error.failure, CompileFailure):
        error.args = (f"{error}\n{reproduction(error.failure)}",)
        error.failure = None


_warned: WeakKeyDictionary[Backend, set[str]] = WeakKeyDictionary()


def warn_once(backend: Backend, error: CompileError) -> None:
    """Warn at the user's line that the reference backend runs instead; once for each reason."""
    reasons = _warned.setdefault(backend, set())
    reason = repr(error.__cause__)
    if reason in reasons:
        return
    reasons.add(reason)
    text = f"{error}\nThe reference backend runs it instead; with config.strict this is an error."
    warnings.warn(text, TorporWarning, stacklevel=depth_of_user())


def depth_of_user() -> int:
    """How many frames up the first frame outside of torpor and torch is."""
    depth, frame = 1, _caller()
    while frame is not None and frame.f_globals.get("__name__", "").startswith(
        ("torpor.", "torch.")
    ):
        depth, frame = depth + 1, frame.f_back
    return depth - 1


def _caller() -> FrameType | None:
    return sys._getframe(1)
