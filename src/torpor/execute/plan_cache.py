"""The cache of plans, keyed by the values that a sync computes.

Values are interned, so the tuple of values to compute *is* the key of the compiled graph: a step
that was recorded before is found with one lookup, without walking its graph.
"""

from __future__ import annotations

import functools
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from torpor import config, metrics
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.compiling.compilation import NOTHING_DONATED, sizes_now
from torpor.compiling.draft import Draft
from torpor.compiling.together import draft_of
from torpor.execute.plan import Outline, Plan
from torpor.execute.storage import LOCK
from torpor.ir.graph import Graph
from torpor.observe.history import HISTORY
from torpor.observe.memory import warn_if_too_large
from torpor.symbols.expressions import Symbol
from torpor.symbols.leaves import SIZES, is_on
from torpor.text.verify import verify


class Making:
    """A plan that has yet to be compiled: the first thread that asks for it compiles, others wait.

    `result` is called without the trace's lock, so that other threads can record meanwhile.
    """

    __slots__ = ("_error", "_lock", "_make", "_plan", "maker", "outline")

    def __init__(self, outline: Outline, make: Callable[[], Plan]) -> None:
        self.outline = outline
        self._make = make
        self._lock = threading.RLock()
        self.maker = 0  # id of the thread that compiles it; 0: none
        self._plan: Plan | None = None
        self._error: Exception | None = None

    def result(self) -> Plan:
        """The plan; raises if it cannot be compiled."""
        with self._lock:
            if self._error is not None:
                raise self._error
            if self._plan is None:
                self.maker = threading.get_ident()
                try:
                    self._plan = self._make()
                except Exception as error:  # not an interrupt: that is not about the graph
                    self._error = error
                    raise
                finally:
                    self.maker = 0
            return self._plan


class PlanCache:
    """Plans by the values they compute; a least-recently-used cache.

    Everything but the compilation itself happens under the trace's lock.
    """

    def __init__(self) -> None:
        self.plans: OrderedDict[tuple[Any, ...], Plan] = OrderedDict()
        self.making: dict[tuple[Any, ...], Making] = {}  # being compiled
        self.serial = 0

    def find(self, key: tuple[Any, ...]) -> Plan | Making | None:
        """The plan for `key`; a `Making` if it is, or should now be, compiled; None on a miss."""
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
        if not plan.symbols or plan.accepts_sizes(sizes):
            return plan
        return Making(plan, functools.partial(plan.for_sizes, sizes))

    def _compile_draft(
        self, key: tuple[Any, ...], plan: Plan, sizes: dict[Symbol, int]
    ) -> Plan | Making:
        """Start compiling a plan that was interpreted so far; other threads go on interpreting."""
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
        """Register `graph` under `key`, to be compiled when the result is asked for, or later."""
        start = time.perf_counter()
        self.serial += 1
        recorded, graph = graph, graph.with_sizes()
        if config.verify_graphs:
            verify(graph)
        warn_if_too_large(graph, backend, device, donated)
        record = HISTORY.note(f"graph{self.serial}", graph, backend.name)
        structure = SIZES.note(recorded, record) if is_on(backend) else None
        draft = draft_of(graph, record, backend, device, donated, structure)
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

    def clear(self) -> None:
        """Drop every plan."""
        self.plans.clear()
        HISTORY.plans_dropped()
