"""From the values a sync needs to a compiled graph, and the cache in between.

Values are interned, so the tuple of values to compute *is* the key of the compiled graph: a step
that was recorded before is found with one look-up, without walking its graph.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torpor import config, metrics
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.errors import CompileError
from torpor.execute.compilation import NOTHING_DONATED, StandIn, compile_graph, warn_once
from torpor.execute.events import STEP, span
from torpor.execute.history import HISTORY, GraphRecord, before_compile
from torpor.execute.memory import warn_if_too_large
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, Node, Value
from torpor.ir.verify import verify
from torpor.ops.spec import spec_of


class Plan:
    """A compiled graph, what runs it, and where its inputs come from."""

    __slots__ = (
        "checked", "computation", "donated", "draft", "fragile", "graph", "inputs", "kept_inputs",
        "kept_outputs", "outputs", "positions", "record", "runner",
    )  # fmt: skip

    def __init__(
        self,
        computation: Computation,
        graph: Graph,
        backend: Backend,
        runner: Backend | StandIn,
        record: GraphRecord,
    ) -> None:
        self.computation = computation
        self.record = record
        self.graph = graph  # as it was recorded; the computation's may be expanded
        self.draft: Draft | None = None  # what it is compiled from when it is met again
        self.donated = tuple(computation.aliases)  # positions of inputs that may be written over
        self.runner = runner
        self.outputs = graph.outputs
        self.positions = {value: i for i, value in enumerate(graph.outputs)}
        self.inputs = tuple(_source(value, backend, runner) for value in graph.inputs)
        written = set(computation.aliases.values())  # what is written over is there anyway
        self.kept_inputs = tuple(
            place
            for place, (source, _) in enumerate(self.inputs)
            if source in (LEAVES, COMPUTED) and place not in computation.aliases
        )
        self.kept_outputs = tuple(i for i in range(len(graph.outputs)) if i not in written)
        self.checked = False  # a run of it has returned what its types promise
        self.fragile = tuple(filter(_may_fail, graph.nodes))


def _may_fail(node: Node) -> bool:
    return node.op.target is not None and spec_of(node.op.target).may_fail


LEAVES, SCALARS, COMPUTED, CARRIED, SCALAR_DATA = 0, 1, 2, 3, 4


def _source(value: Value, backend: Backend, runner: Backend | StandIn) -> tuple[int, Any]:
    node = value.node
    if node.op is LEAF:
        data = backend.data_of(node)
        return (LEAVES, node.args[0]) if data is None else (CARRIED, data)
    if node.op is SCALAR:
        return SCALAR_DATA if runner.scalars_as_data else SCALARS, node.args[0]
    return COMPUTED, value


class PlanCache:
    """Plans by the values they compute; the least recently used goes first."""

    def __init__(self) -> None:
        self.plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self.serial = 0

    def find(self, key: tuple[Any, ...]) -> Plan | None:
        """The plan under `key`, if there is one; compiled by now, if it is worth it."""
        plan = self.plans.get(key)
        if plan is None:
            return None
        self.plans.move_to_end(key)
        plan.record.met_again()
        if plan.draft is None:
            metrics.count("CachedCompile")
        elif plan.draft.is_due():
            plan = self.plans[key] = plan.draft.compiled()
        else:
            metrics.count("InterpretedGraph")
        return plan

    def add(
        self,
        key: tuple[Any, ...],
        graph: Graph,
        backend: Backend,
        device: BackendDevice,
        donated: Mapping[int, int] = NOTHING_DONATED,
    ) -> Plan:
        """Compile `graph`, now or when it is met again, and keep it under `key`."""
        self.serial += 1
        if config.verify_graphs:
            verify(graph)
        warn_if_too_large(graph, backend, device, donated)
        record = HISTORY.note(f"graph{self.serial}", graph, backend.name)
        draft = Draft(graph, record, backend, device, donated)
        plan = self.plans[key] = draft.compiled() if draft.is_due() else draft.interpreted()
        HISTORY.keep(record)
        while len(self.plans) > config.max_cached_plans:
            self.plans.popitem(last=False)
        return plan

    def clear(self) -> None:
        """Forget every plan."""
        self.plans.clear()
        HISTORY.plans_dropped()


class Draft:
    """A graph that may be compiled: at once, or after it was run some times by the reference."""

    __slots__ = ("backend", "device", "donated", "graph", "left", "record")

    def __init__(
        self,
        graph: Graph,
        record: GraphRecord,
        backend: Backend,
        device: BackendDevice,
        donated: Mapping[int, int],
    ) -> None:
        self.graph = graph
        self.record = record
        self.backend = backend
        self.device = device
        self.donated = donated
        chosen = config.compile_after
        self.left = backend.compile_after if chosen < 0 else chosen

    def is_due(self) -> bool:
        """It was met often enough; asked once each time it is met."""
        self.left -= 1
        return self.left < 0

    def interpreted(self) -> Plan:
        """A plan that runs on the reference backend until it is due."""
        metrics.count("InterpretedGraph")
        stand_in = StandIn(self.graph, self.record.name, self.backend, self.device)
        plan = Plan(stand_in.computation, self.graph, self.backend, stand_in, self.record)
        plan.draft = self
        return plan

    def compiled(self) -> Plan:
        """A plan on the backend; on the reference, with a warning, where that cannot compile it."""
        before_compile(self.record)
        metrics.count("UncachedCompile")
        graph, backend, record = self.graph, self.backend, self.record
        try:
            with _timed_compile(record):
                computation = compile_graph(graph, record.name, backend, self.device, self.donated)
            return Plan(computation, graph, backend, backend, record)
        except CompileError as error:
            metrics.count("CompileFailed")
            if config.strict or backend.name == "reference":
                raise
            stand_in = StandIn(graph, record.name, backend, self.device, error)
            record.failure = str(error).partition("\n")[0]
            warn_once(backend, error)
            return Plan(stand_in.computation, graph, backend, stand_in, record)


@contextmanager
def _timed_compile(record: GraphRecord) -> Iterator[None]:
    """The body compiles the graph of `record`."""
    start = time.perf_counter()
    try:
        with metrics.timer("Compile"), span("compile", record.name):
            yield
        record.was_compiled()
    finally:
        seconds = time.perf_counter() - start
        record.compile_seconds += seconds
        STEP.away += seconds
        STEP.compiling += seconds


def needed_graph(wanted: Sequence[Value], live: Sequence[Value], known: Collection[Value]) -> Graph:
    """The graph for `wanted` alone, with every value in it that is needed again as an output.

    Live values inside the cone of `wanted` are computed on the way, so they become outputs; so
    does everything that live values outside the cone take from inside it. Nothing is ever
    computed twice.
    """
    cone = Graph.of(wanted, known)
    inside = {output for node in cone.nodes for output in node.outputs}
    outputs = dict.fromkeys(wanted)
    outputs.update(dict.fromkeys(value for value in live if value in inside))
    rest = Graph.of([value for value in live if value not in inside], inside | set(known))
    outputs.update(dict.fromkeys(value for value in rest.inputs if value in inside))
    return Graph(cone.inputs, cone.nodes, tuple(outputs))
