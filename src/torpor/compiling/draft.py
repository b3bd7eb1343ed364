"""When and where a graph is compiled, and what runs it in the meantime."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from torpor import config, metrics
from torpor.backend.device import BackendDevice, cores
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.cache.graphs import DiskPlace, keep, keep_bytes, load, place_of
from torpor.compiling.background import COMPILER, CompileJob
from torpor.compiling.compilation import StandIn, compile_once, leave_reproduction, warn_once
from torpor.compiling.remote import WORKER, Request, request
from torpor.compiling.worth import COSTS, is_worth_it
from torpor.distributed.ops import collectives_in
from torpor.errors import CompileError
from torpor.execute.plan import Plan
from torpor.ir.graph import Graph
from torpor.observe.events import span
from torpor.observe.history import GraphRecord, before_compile
from torpor.observe.phases import COMPILING, phase
from torpor.symbols.expressions import Symbol
from torpor.symbols.leaves import Structure

_LOG = logging.getLogger(__name__)


class Draft:
    """A graph that is to be compiled: immediately, or after some runs on the reference backend."""

    __slots__ = (
        "backend", "device", "donated", "elsewhere", "graph", "interpreter", "job", "left",
        "looked", "may_be_remote", "place", "record", "sizes", "structure", "together", "weighs",
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
        self.structure = structure  # of graphs that differ only in their sizes
        self.record = record
        self.backend = backend
        self.device = device
        self.donated = donated
        self.place: DiskPlace | None = None  # its place in the disk cache
        self.sizes: dict[Symbol, int] = {}  # sizes it is compiled for, among others
        self.job: CompileJob | None = None  # its compile in the background
        self.elsewhere = True  # another process may compile it
        self.looked = False  # it was looked up in the disk cache
        self.interpreter: Plan | None = None  # runs it in the meantime
        chosen = config.compile_after
        self.left = backend.compile_after if chosen < 0 else chosen
        self.may_be_remote = chosen < 0 and backend.weighs_compiles  # unless configured otherwise
        # ranks must all compile it at the same run, not when one of them finds that it pays
        self.together = bool(collectives_in(graph))
        self.weighs = self.may_be_remote and not self.together  # compiled when that pays

    def first_plan(self, sizes: dict[Symbol, int]) -> Plan:
        """A plan from disk; else a compiled one; or an interpreted one if it is not due.

        If compiles are weighed, the disk cache is only consulted when the graph recurs.
        """
        if self.weighs:
            return self.interpreted()
        self._look()
        if self.is_due():
            return self.compiled(sizes)
        return self.loaded(sizes) or self.interpreted()

    def _look(self) -> None:
        """Find its place in the disk cache."""
        self.looked = True
        backend_key = self.backend.cache_key() if config.cache else None
        if backend_key is not None:
            with _timed("DiskCache", "load", self.record):
                self.place = place_of(
                    self.graph, self.backend, self.device, self.donated, backend_key
                )

    def for_other_sizes(self, sizes: dict[Symbol, int], may_compile: bool) -> Plan:
        """A plan of the same graph for these sizes; an interpreted one accepts all sizes."""
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
        """Whether it has recurred often enough; to be called once for each recurrence."""
        if self.job is not None:
            return self.job.is_over()
        self.left -= 1
        if not self.looked:
            return True
        return self.left < 0 and self._may_compile() and self._pays()

    def _pays(self) -> bool:
        """Whether its runs have taken so long that compiling pays; True if that is not weighed."""
        if not self.weighs:
            return True
        spent, size = self.record.interpreted_seconds, self.record.size
        return is_worth_it(spent, size, in_background=self._goes_on())

    def _goes_on(self) -> bool:
        """Whether the program can go on while another process compiles it, as far as is known."""
        if self.together:
            return False
        wish = config.compile_async
        wanted = self.may_be_remote and cores() > 1 if wish is None else wish
        return (
            wanted
            and self.elsewhere
            and self.backend.compiles_in_background
            and bool(self.record.size)
        )

    def _may_compile(self) -> bool:
        """Whether the number of compiled graphs that differ only in sizes is below the limit."""
        if self.structure is None or self.backend.name == "reference":
            return True
        return self.structure.compiled < config.max_graphs_per_structure

    def interpreted(self) -> Plan:
        """A plan that runs on the reference backend until compiling is due."""
        metrics.count("InterpretedGraph")
        if self.interpreter is None:
            self.backend.expect(self.device)
            stand_in = StandIn(self.graph, self.record.name, self.backend, self.device)
            plan = Plan(stand_in.computation, self.graph, self.backend, stand_in, self.record)
            plan.draft, self.interpreter = self, plan
        return self.interpreter

    def loaded(self, sizes: dict[Symbol, int]) -> Plan | None:
        """A plan from the disk cache; None if it has none."""
        if self.place is None:
            return None
        self.sizes = sizes
        with _timed("DiskCache", "load", self.record):
            computation = load(self.place, self._compile, self._accepts_sizes)
        if computation is None:
            return None
        self.record.was_loaded()
        return self._plan(computation)

    def _accepts_sizes(self, computation: Computation) -> bool:
        return not self.sizes or self.backend.accepts_sizes(computation, self.sizes)

    def _plan(self, computation: Computation) -> Plan:
        plan = Plan(computation, self.graph, self.backend, self.backend, self.record)
        plan.source = self
        return plan

    def compiled(self, sizes: dict[Symbol, int]) -> Plan:
        """A plan on the backend; if it fails to compile, one on the reference, with a warning."""
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
        if not self._pays():  # now that it is known where it would be compiled
            return self.interpreted()
        before_compile(self.record)
        if self.structure is not None:
            self.structure.compiled += 1
        metrics.count("UncachedCompile")
        if asked is not None:
            self.job = COMPILER.submit("", functools.partial(self._compile_elsewhere, asked))
            return self.interpreted()
        if (
            config.compile_async
            and not self.together
            and self.backend.compiles_in_background
            and self.record.size
        ):
            label = f"{self.record.name} ({self.record.size:,} ops)"
            self.job = COMPILER.submit(label, self._compile_in_background)
            return self.interpreted()
        return self._plan_of(self._compile_here)

    def _request(self) -> Request | None:
        """The request to the compile process; None if this process compiles."""
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
        """The plan compiled by another process; if that failed, interpreted: this one may try."""
        assert self.job is not None, "there is an answer"
        try:
            saved = self.job.result()
            with _timed("DiskCache", "load", self.record):
                computation = self._compile(saved)
        except CompileError as error:
            _LOG.info("%s is not compiled by another process: %s", self.record.name, error)
            if not self.job.done.is_set():  # it has timed out
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

    def _compile_in_background(self) -> Computation:
        """Like `_compile_here`, but the time is not counted as lost to the program."""
        start = time.perf_counter()
        with metrics.timer("CompileBeside"):
            computation = self._compile()
        if self.place is not None:
            seconds = time.perf_counter() - start
            keep(self.place, computation, self.backend, seconds, self.sizes)
        return computation

    def _compile(self, saved: bytes | None = None) -> Computation:
        name, donated = self.record.name, self.donated
        return compile_once(self.graph, name, self.backend, self.device, donated, saved, self.sizes)


@contextmanager
def _timed(timer: str, kind: str, record: GraphRecord) -> Iterator[None]:
    """Time the body, which compiles the graph of `record` or uses the disk cache instead."""
    start = time.perf_counter()
    try:
        with phase(COMPILING), metrics.timer(timer), span(kind, record.name):
            yield
    finally:
        record.compile_seconds += time.perf_counter() - start
