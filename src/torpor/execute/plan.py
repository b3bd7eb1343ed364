"""From the values a sync needs to a compiled graph, and the cache in between.

Values are interned, so the tuple of values to compute *is* the key of the compiled graph: a step
that was recorded before is found with one look-up, without walking its graph.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torpor import config, metrics
from torpor.backend.device import BackendDevice, cores
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.backend.picks import picker
from torpor.errors import CompileError
from torpor.execute.background import COMPILER, Job
from torpor.execute.compilation import (
    NOTHING_DONATED,
    StandIn,
    compile_graph,
    leave_reproduction,
    sizes_now,
    warn_once,
)
from torpor.execute.disk import MOST_KINDS, DiskPlace, keep, keep_bytes, load, place_of
from torpor.execute.events import span
from torpor.execute.history import HISTORY, GraphRecord, before_compile
from torpor.execute.memory import warn_if_too_large
from torpor.execute.phases import COMPILING, phase
from torpor.execute.remote import WORKER, Request, request
from torpor.execute.sizes import SIZES, Structure, is_on
from torpor.execute.storage import LOCK
from torpor.execute.worth import COSTS, is_worth_it
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, SIZE, Node, Value
from torpor.ir.sizes import Symbol
from torpor.ir.types import ScalarType, SymbolicType
from torpor.ir.verify import verify
from torpor.ops.draws import IN_TURN
from torpor.ops.spec import spec_of

_LOG = logging.getLogger(__name__)


class Outline:
    """What is known of a plan before its graph is compiled: enough to promise its results."""

    __slots__ = (
        "fragile", "graph", "in_turn", "leaves", "others", "outputs", "places", "positions",
        "sized", "symbols", "types",
    )  # fmt: skip

    def __init__(self, graph: Graph, inputs: Sequence[tuple[int, Any]]) -> None:
        self.graph = graph  # as it was recorded; the computation's may be expanded
        self.symbols = graph.symbols
        self.outputs = graph.outputs
        self.types = graph.types  # they may have symbols
        self.sized = any(type(type_) is SymbolicType for type_ in self.types)
        self.positions = {value: i for i, value in enumerate(graph.outputs)}
        self.places = {value: i for i, value in enumerate(graph.inputs)}
        self.leaves = picker([place for source, place in inputs if source == LEAVES])
        self.others = tuple(  # inputs that are no leaves: where they stand, where they come from
            (i, source, place) for i, (source, place) in enumerate(inputs) if source != LEAVES
        )
        self.fragile = tuple(filter(_may_fail, graph.nodes))
        self.in_turn = any(node.op.target in IN_TURN for node in graph.nodes)  # they draw later

    @classmethod
    def of(cls, graph: Graph, backend: Backend) -> Outline:
        """The outline of a graph; run-time numbers are numbers, whatever runs it later."""
        return cls(graph, [_source(value, backend, False) for value in graph.inputs])


class Plan(Outline):
    """A compiled graph, what runs it, and where its inputs come from."""

    __slots__ = (
        "checked", "computation", "donated", "draft", "kept_bytes", "kept_inputs", "kept_outputs",
        "record", "runner", "source", "variants",
    )  # fmt: skip

    def __init__(
        self,
        computation: Computation,
        graph: Graph,
        backend: Backend,
        runner: Backend | StandIn,
        record: GraphRecord,
    ) -> None:
        as_data = runner.scalars_as_data
        inputs = [_source(value, backend, as_data) for value in graph.inputs]
        super().__init__(graph, inputs)
        self.computation = computation
        self.record = record
        self.draft: Draft | None = None  # what it is compiled from when it is met again
        self.donated = tuple(computation.aliases)  # positions of inputs that may be written over
        self.runner = runner
        self.source: Draft | None = None  # what it was compiled from
        self.variants: list[Plan] = []  # the same graph, compiled for sizes this one is not for
        written = set(computation.aliases.values())  # what is written over is there anyway
        kept_inputs = [
            place
            for place, (source, _) in enumerate(inputs)
            if source in (LEAVES, COMPUTED) and place not in computation.aliases
        ]
        kept_outputs = [i for i in range(len(graph.outputs)) if i not in written]
        self.kept_inputs, self.kept_outputs = picker(kept_inputs), picker(kept_outputs)
        kept = [*self.kept_inputs(graph.inputs), *self.kept_outputs(graph.outputs)]
        self.kept_bytes = None if self.symbols else sum(value.type.nbytes for value in kept)
        self.checked = False  # a run of it has returned what its types promise

    def fits(self, sizes: Mapping[Symbol, int]) -> bool:
        """It was compiled for these sizes, among others."""
        if type(self.runner) is StandIn:
            return True
        return self.runner.fits(self.computation, sizes)  # type: ignore[union-attr]  # no stand-in

    def for_sizes(self, sizes: dict[Symbol, int]) -> Plan:
        """The plan itself, or one of the same graph that fits these sizes."""
        if self.fits(sizes):
            return self
        for place, plan in enumerate(self.variants):
            if plan.draft is not None and plan.draft.is_due():  # compiled beside the program by now
                plan = self.variants[place] = plan.draft.compiled(sizes)
            if plan.fits(sizes):
                return plan
        assert self.source is not None, "a compiled plan knows its source"
        made = self.source.for_other_sizes(sizes, len(self.variants) < MAX_VARIANTS)
        self.variants.append(made)
        return made


MAX_VARIANTS = MOST_KINDS - 1
"""Times a graph is compiled again for sizes of another kind; then the reference backend runs it."""


def _may_fail(node: Node) -> bool:
    return node.op.target is not None and spec_of(node.op.target).may_fail


LEAVES, SCALARS, COMPUTED, CARRIED, SCALAR_DATA, SIZE_NOW = 0, 1, 2, 3, 4, 5


def _source(value: Value, backend: Backend, scalars_as_data: bool) -> tuple[int, Any]:
    node = value.node
    if node.op is LEAF:
        data = backend.data_of(node)
        return (LEAVES, node.args[0]) if data is None else (CARRIED, data)
    if node.op is SCALAR:
        return SCALAR_DATA if scalars_as_data else SCALARS, node.args[0]
    if node.op is SIZE:
        return SIZE_NOW, node.args[0]
    return COMPUTED, value


class Making:
    """A plan that has to be compiled first: by whoever asks for it first, while others wait.

    Nobody asks under the trace's lock, so that others can record meanwhile.
    """

    __slots__ = ("_error", "_lock", "_make", "_plan", "maker", "outline")

    def __init__(self, outline: Outline, make: Callable[[], Plan]) -> None:
        self.outline = outline
        self._make = make
        self._lock = threading.RLock()
        self.maker = 0  # the thread that compiles it
        self._plan: Plan | None = None
        self._error: Exception | None = None

    def result(self) -> Plan:
        """The plan; the error, if it cannot be made."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._plan is None:
                self.maker = threading.get_ident()
                try:
                    self._plan = self._make()
                except Exception as error:  # an interrupt says nothing about the graph
                    self._error = error
                    raise
                finally:
                    self.maker = 0
            return self._plan


class PlanCache:
    """Plans by the values they compute; the least recently used goes first.

    Everything but the compiling itself happens under the trace's lock.
    """

    def __init__(self) -> None:
        self.plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self.making: dict[tuple[Any, ...], Making] = {}  # those that somebody is compiling
        self.serial = 0

    def find(self, key: tuple[Any, ...]) -> Plan | Making | None:
        """The plan under `key`, if there is one; to be compiled now, if it is worth it."""
        plan = self.plans.get(key)
        if plan is None:
            return self.making.get(key)
        self.plans.move_to_end(key)
        plan.record.met_again()
        sizes = sizes_now(plan.graph) if plan.symbols else {}
        if plan.draft is None:
            metrics.count("CachedCompile")
        elif plan.draft.is_due():
            return self._compile_draft(key, plan, sizes)
        else:
            metrics.count("InterpretedGraph")
        if not plan.symbols or plan.fits(sizes):
            return plan
        return Making(plan, functools.partial(plan.for_sizes, sizes))

    def _compile_draft(
        self, key: tuple[Any, ...], plan: Plan, sizes: dict[Symbol, int]
    ) -> Plan | Making:
        """Compile a plan that was interpreted until now; meanwhile others go on as before."""
        if key in self.making:
            return plan
        draft = plan.draft
        assert draft is not None, "an interpreted plan knows its source"

        def make() -> Plan:
            try:
                made = self.plans[key] = draft.compiled(sizes)
            finally:
                self.making.pop(key, None)
            return made.for_sizes(sizes) if made.symbols else made

        making = self.making[key] = Making(plan, make)
        return making

    def begin(
        self,
        key: tuple[Any, ...],
        graph: Graph,
        backend: Backend,
        device: BackendDevice,
        donated: Mapping[int, int] = NOTHING_DONATED,
    ) -> Making:
        """Keep `graph` under `key`, to be compiled now or when it is met again."""
        start = time.perf_counter()
        self.serial += 1
        recorded, graph = graph, graph.with_sizes()
        if config.verify_graphs:
            verify(graph)
        warn_if_too_large(graph, backend, device, donated)
        record = HISTORY.note(f"graph{self.serial}", graph, backend.name)
        structure = SIZES.note(recorded, record) if is_on(backend) else None
        draft = Draft(graph, record, backend, device, donated, structure)
        make = functools.partial(self._make, key, draft, sizes_now(graph))
        making = self.making[key] = Making(Outline.of(graph, backend), make)
        record.plan_seconds = time.perf_counter() - start
        return making

    def _make(self, key: tuple[Any, ...], draft: Draft, sizes: dict[Symbol, int]) -> Plan:
        start, record = time.perf_counter(), draft.record
        try:
            plan = draft.first_plan(sizes)
            record.plan_seconds += time.perf_counter() - start - record.compile_seconds
            with LOCK:
                self.plans[key] = plan
                HISTORY.keep(record)
                while len(self.plans) > config.max_cached_plans:
                    self.plans.popitem(last=False)
        finally:
            self.making.pop(key, None)
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
        return self.begin(key, graph, backend, device, donated).result()

    def clear(self) -> None:
        """Forget every plan."""
        self.plans.clear()
        HISTORY.plans_dropped()


class Draft:
    """A graph that may be compiled: at once, or after it was run some times by the reference."""

    __slots__ = (
        "backend", "device", "donated", "elsewhere", "graph", "interpreter", "job", "left",
        "looked", "place", "record", "sizes", "structure", "weighs",
    )  # fmt: skip

    def __init__(
        self,
        graph: Graph,
        record: GraphRecord,
        backend: Backend,
        device: BackendDevice,
        donated: Mapping[int, int],
        structure: Structure | None = None,
    ) -> None:
        self.graph = graph
        self.structure = structure  # graphs that differ from it in their sizes only
        self.record = record
        self.backend = backend
        self.device = device
        self.donated = donated
        self.place: DiskPlace | None = None  # where it is kept on disk
        self.sizes: dict[Symbol, int] = {}  # it is compiled for, among others
        self.job: Job | None = None  # that compiles it beside the program
        self.elsewhere = True  # another process may compile it
        self.looked = False  # for it on the disk
        self.interpreter: Plan | None = None  # that runs it meanwhile
        chosen = config.compile_after
        self.left = backend.compile_after if chosen < 0 else chosen
        self.weighs = chosen < 0 and backend.weighs_compiles  # it is compiled when that pays

    def first_plan(self, sizes: dict[Symbol, int]) -> Plan:
        """A plan from disk; else a compiled one, or while it is not due an interpreted one.

        Where compiles are weighed, the disk is looked at when the graph has come back.
        """
        if self.weighs:
            return self.interpreted()
        self._look()
        if self.is_due():
            return self.compiled(sizes)
        return self.loaded(sizes) or self.interpreted()

    def _look(self) -> None:
        """Find its place on disk."""
        self.looked = True
        told = self.backend.cache_key() if config.cache else None
        if told is not None:
            with _timed("DiskCache", "load", self.record):
                self.place = place_of(self.graph, self.backend, self.device, self.donated, told)

    def for_other_sizes(self, sizes: dict[Symbol, int], may_compile: bool) -> Plan:
        """A plan of the same graph for these sizes; an interpreted one is for all."""
        draft = Draft(
            self.graph, self.record, self.backend, self.device, self.donated, self.structure
        )
        draft.place, draft.looked, draft.elsewhere = self.place, True, self.elsewhere
        if may_compile and draft._may_compile():
            if draft._pays():
                return draft.compiled(sizes)
            return draft.loaded(sizes) or draft.interpreted()
        plan = draft.loaded(sizes)
        if plan is None:
            plan = draft.interpreted()
            plan.draft = None
        return plan

    def is_due(self) -> bool:
        """It was met often enough; asked once each time it is met."""
        if self.job is not None:
            return self.job.is_over()
        self.left -= 1
        if not self.looked:
            return True
        return self.left < 0 and self._may_compile() and self._pays()

    def _pays(self) -> bool:
        """It has run so long that compiling it is worth the time; not asked where none is lost."""
        if not self.weighs:
            return True
        spent, size = self.record.interpreted_seconds, self.record.size
        return is_worth_it(spent, size, beside=self._goes_on())

    def _goes_on(self) -> bool:
        """The program goes on while another process compiles it, as far as is known."""
        wish = config.compile_async
        wanted = self.weighs and cores() > 1 if wish is None else wish
        return wanted and self.elsewhere and self.backend.compiles_beside and bool(self.record.size)

    def _may_compile(self) -> bool:
        """Not too many graphs that differ in their sizes only were compiled."""
        if self.structure is None or self.backend.name == "reference":
            return True
        return self.structure.compiled < config.max_graphs_per_structure

    def interpreted(self) -> Plan:
        """A plan that runs on the reference backend until it is due."""
        metrics.count("InterpretedGraph")
        if self.interpreter is None:
            self.backend.expect(self.device)
            stand_in = StandIn(self.graph, self.record.name, self.backend, self.device)
            plan = Plan(stand_in.computation, self.graph, self.backend, stand_in, self.record)
            plan.draft, self.interpreter = self, plan
        return self.interpreter

    def loaded(self, sizes: dict[Symbol, int]) -> Plan | None:
        """A plan that was compiled before, by this process or another; None if there is none."""
        if self.place is None:
            return None
        self.sizes = sizes
        with _timed("DiskCache", "load", self.record):
            computation = load(self.place, self._compile, self._fits)
        if computation is None:
            return None
        self.record.was_loaded()
        return self._plan(computation)

    def _fits(self, computation: Computation) -> bool:
        return not self.sizes or self.backend.fits(computation, self.sizes)

    def _plan(self, computation: Computation) -> Plan:
        plan = Plan(computation, self.graph, self.backend, self.backend, self.record)
        plan.source = self
        return plan

    def compiled(self, sizes: dict[Symbol, int]) -> Plan:
        """A plan on the backend; on the reference, with a warning, where that cannot compile it."""
        if self.job is not None:
            return self._answered() if self.elsewhere else self._plan_of(self.job.result)
        looked = self.looked
        if not looked:
            self._look()
        found = self.loaded(sizes) or (None if looked else self.interpreted())
        if found is not None:
            return found
        self.sizes = sizes
        asked = self._request()
        if not self._pays():  # now that it is known who would compile it
            return self.interpreted()
        before_compile(self.record)
        if self.structure is not None:
            self.structure.compiled += 1
        metrics.count("UncachedCompile")
        if asked is not None:
            self.job = COMPILER.submit("", functools.partial(self._compile_elsewhere, asked))
            return self.interpreted()
        if config.compile_async and self.backend.compiles_beside and self.record.size:
            label = f"{self.record.name} ({self.record.size:,} ops)"
            self.job = COMPILER.submit(label, self._compile_beside)
            return self.interpreted()
        return self._plan_of(self._compile_here)

    def _request(self) -> Request | None:
        """What to ask of another process; None if it is compiled in this one."""
        if not self._goes_on():
            self.elsewhere = False
            return None
        asked = request(self.graph, self.record.name, self.backend, self.device, self.donated)
        self.elsewhere = asked is not None
        return asked

    def _compile_elsewhere(self, asked: Request) -> bytes:
        with metrics.timer("CompileBeside"), COSTS.expected(self.record.size):
            answer = WORKER.compile(asked)
        assert answer.saved is not None, "it is compiled"
        COSTS.note(answer.seconds, self.record.size)
        if self.place is not None:
            place, size = self.place, self.record.size
            keep_bytes(place, place.key, answer.saved, self.backend, size, answer.seconds)
        return answer.saved

    def _answered(self) -> Plan:
        """The plan of what another process has compiled; if it could not, this one may try."""
        assert self.job is not None, "there is an answer"
        try:
            saved = self.job.result()
            with _timed("DiskCache", "load", self.record):
                computation = self._compile(saved)
        except CompileError as error:
            _LOG.info("%s is not compiled by another process: %s", self.record.name, error)
            if not self.job.done.is_set():  # it took too long
                WORKER.stop()
            self.job, self.elsewhere = None, False
            return self.interpreted()
        self.record.was_compiled()
        return self._plan(computation)

    def _plan_of(self, compile_: Callable[[], Computation]) -> Plan:
        graph, backend, record = self.graph, self.backend, self.record
        try:
            computation = compile_()
            record.was_compiled()
        except CompileError as error:
            metrics.count("CompileFailed")
            leave_reproduction(error)
            if config.strict or backend.name == "reference":
                raise
            stand_in = StandIn(graph, record.name, backend, self.device, error)
            record.failure = str(error).partition("\n")[0]
            warn_once(backend, error)
            return Plan(stand_in.computation, graph, backend, stand_in, record)
        return self._plan(computation)

    def _compile_here(self) -> Computation:
        before = time.process_time()
        with _timed("Compile", "compile", self.record):
            computation = self._compile()
        COSTS.note(time.process_time() - before, self.record.size)
        if self.place is not None:
            with _timed("DiskCache", "keep", self.record):
                seconds = self.record.compile_seconds
                keep(self.place, computation, self.backend, seconds, self.sizes)
        return computation

    def _compile_beside(self) -> Computation:
        """The same while the program goes on, which loses no time."""
        start = time.perf_counter()
        with metrics.timer("CompileBeside"):
            computation = self._compile()
        if self.place is not None:
            seconds = time.perf_counter() - start
            keep(self.place, computation, self.backend, seconds, self.sizes)
        return computation

    def _compile(self, saved: bytes | None = None) -> Computation:
        name, donated = self.record.name, self.donated
        return compile_graph(
            self.graph, name, self.backend, self.device, donated, saved, self.sizes
        )


@contextmanager
def _timed(timer: str, kind: str, record: GraphRecord) -> Iterator[None]:
    """The body compiles the graph of `record`, or does what saves that."""
    start = time.perf_counter()
    try:
        with phase(COMPILING), metrics.timer(timer), span(kind, record.name):
            yield
    finally:
        record.compile_seconds += time.perf_counter() - start


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
    taken = [_memory(value) for value in rest.inputs if value in inside]
    outputs.update(dict.fromkeys(value for value in taken if value in inside))
    return Graph(cone.inputs, cone.nodes, tuple(outputs))


def _memory(value: Value) -> Value:
    """What `value` is a conjugate or negative view of: results are memory, without such bits."""
    while type(value.type) is not ScalarType and (value.type.conj or value.type.neg):
        value = value.node.args[spec_of(value.node.op.target).views]
    return value
