"""Which graphs were made at which lines of the user's, and how each came to differ from the last.

The cut site of a graph is the line that cut or read. A record is made for each new graph, so never
in a warm step; where graphs never come back that is every step, so nothing is computed for it. How
graphs differ is found out when somebody asks. What is kept for that is bounded: the first graphs of
each cut site, and the latest of all.
"""

from __future__ import annotations

import itertools
import warnings
from collections import Counter, OrderedDict, deque
from typing import Any, Final
from weakref import ref

from torpor import config, metrics
from torpor.compiling.compilation import depth_of_user
from torpor.errors import RecompileError, TorporWarning
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.graph import Graph
from torpor.ir.node import OpKind
from torpor.observe.events import STEP, user_line
from torpor.text.difference import (
    BRANCH,
    LIST,
    OPEN,
    READ,
    RESULTS,
    SAME,
    UNKNOWN,
    Difference,
    difference,
    difference_of_parts,
)

MAX_RECORDS: Final = 1024
MAX_CUT_SITES: Final = 1024
MAX_GRAPHS: Final = 64
MAX_NODES: Final = 40_000
MAX_LEAVES: Final = 2048
"""Leaves of a trace whose storages are remembered."""
FIRST: Final = 4
"""Graphs of a cut site that are kept longest: how it began."""
TIMED_RUNS: Final = 8
"""Runs after which it is known what one takes."""
MAX_COMPARED: Final = 8
"""Earlier graphs of a cut site that a new one is compared with."""

Place = tuple[str, str, int]  # backend, file, line


class CutSite:
    """A line at which graphs are made."""

    __slots__ = ("compiled", "holding", "met")

    def __init__(self) -> None:
        self.met = 0  # graphs made here
        self.compiled = 0  # and those that were compiled
        self.holding: list[GraphRecord] = []  # those that have their graph


class GraphRecord:
    """A new graph: where it was made, what became of it, and how it differs from an earlier one."""

    __slots__ = (
        "_difference",
        "_site",
        "_usual",
        "asked_at",
        "compile_seconds",
        "compiled",
        "cut_site",
        "epoch",
        "failure",
        "graph",
        "hits",
        "interpreted_runs",
        "interpreted_seconds",
        "kept",
        "leaves",
        "loaded",
        "name",
        "place",
        "plan_seconds",
        "read_at",
        "record_seconds",
        "run_seconds",
        "runs",
        "serial",
        "size",
    )  # fmt: skip

    def __init__(self, name: str, graph: Graph, cut_site: CutSite, site: Any, serial: int) -> None:
        self.name = name
        self.serial = serial
        self._site = site
        self.cut_site = cut_site
        self.place = cut_site.met  # among the graphs that were made there
        self.epoch = TRACE.epoch
        self.graph: Graph | None = graph
        self.size = len(graph)
        self.leaves = _leaf_storages()
        self.kept: frozenset[int] = frozenset()  # leaves that the next step found unchanged
        self.hits = 0
        self.compiled = False
        self.loaded = False  # from disk, where it was kept compiled
        self.plan_seconds = 0.0  # to make its plan, but for compiling it
        self.compile_seconds = 0.0
        self.record_seconds = STEP.since_last_graph() if TRACE.misses else 0.0
        self.failure = ""
        self.runs = self.interpreted_runs = 0
        self.run_seconds = self.interpreted_seconds = 0.0
        self._usual = 0.0  # what a run takes of its thread's time, the latest counting most
        self.asked_at = STEP.last_read if STEP.last_asked == "bool" else ""  # a branch's line
        self.read_at = STEP.read_at
        self._difference: Difference | None = None

    @property
    def site(self) -> str:
        """The line that cut or read."""
        return str(self._site)

    @property
    def first(self) -> bool:
        """No graph was made at its line before."""
        return not self.place

    def met_again(self) -> None:
        """The same graph was recorded once more."""
        self.hits += 1
        if self.hits == 1:
            now = _leaf_storages()
            self.kept = frozenset(
                slot for slot, then in self.leaves.items() if slot in now and then() is now[slot]()
            )
            self.leaves = {slot: self.leaves[slot] for slot in self.kept}

    def was_compiled(self) -> None:
        """The backend has taken it."""
        self.compiled = True
        self.cut_site.compiled += 1

    def was_loaded(self) -> None:
        """It was on disk, compiled."""
        self.loaded = True
        self.cut_site.compiled += 1

    def ran(self, seconds: float, busy: float, interpreted: bool) -> None:
        """One run is over; its thread was busy for a part of the time, and waited for the rest."""
        self.runs += 1
        self.run_seconds += seconds
        self._usual += (busy - self._usual) * (0.2 if self.runs > 1 else 1.0)
        if interpreted:
            self.interpreted_runs += 1
            self.interpreted_seconds += seconds

    @property
    def usual_seconds(self) -> float | None:
        """What a run of it takes of its thread's time; None until some have told."""
        return self._usual if self.runs >= TIMED_RUNS else None

    @property
    def difference(self) -> Difference | None:
        """How it differs from the most similar graph made here before; None for the first."""
        if self._difference is None and not self.first:
            graph, other = self.graph, self._most_similar()
            before = None if other is None else other.graph  # another thread may drop it meanwhile
            if graph is None or other is None or before is None:
                return Difference(UNKNOWN)
            self._difference = self._compared(graph, other, before)
        return self._difference

    def _most_similar(self) -> GraphRecord | None:
        """Of the graphs made here before, that with most ops in common; the latest of those."""
        earlier = [other for other in self.cut_site.holding if other.serial < self.serial]
        ops = _ops(self)
        known = reversed(earlier[-MAX_COMPARED:])
        return max(known, key=lambda other: _likeness(_ops(other), ops), default=None)

    def _compared(self, graph: Graph, other: GraphRecord, before: Graph) -> Difference:
        if self._goes_on(graph, other):
            found = difference_of_parts(before, graph)
            if found.kind not in (BRANCH, LIST):
                then = None if found.kind in (SAME, RESULTS) else found
                return Difference(OPEN, line=self.site, then=then)
        replaced = [s for s in other.kept if other.leaves[s]() is not self._storage(s)]
        found = difference(before, graph, replaced)
        return (self._read_before(other) if found.kind == BRANCH else None) or found

    def _goes_on(self, graph: Graph, other: GraphRecord) -> bool:
        """It takes up what was computed for the other one: nothing has ended their trace."""
        computed = any(value.node.operands for value in graph.inputs)
        return computed and self.epoch == other.epoch

    def _read_before(self, other: GraphRecord) -> Difference | None:
        """A read ended the trace before this graph's, and not before the other's; or just so."""
        if self.read_at == other.read_at:
            return None
        reads = str(int(bool(other.read_at))), str(int(bool(self.read_at)))
        return Difference(READ, "", "", *reads, line=self.read_at or other.read_at)

    def _storage(self, slot: int) -> LazyStorage | None:
        found = self.leaves.get(slot)
        return None if found is None else found()

    def drop_graph(self) -> None:
        """Keep no nodes."""
        self.graph = None
        self.leaves, self.kept = {}, frozenset()
        self.cut_site.holding.remove(self)


def _leaf_storages() -> dict[int, ref[LazyStorage]]:
    """The storage that entered this trace as each leaf."""
    first = TRACE.leaf_storages[:MAX_LEAVES]  # a read may leave the trace open for ever
    return {leaf.node.args[0]: ref(storage) for storage, leaf in reversed(first)}


def _ops(record: GraphRecord) -> Counter[OpKind]:
    nodes = record.graph.nodes if record.graph is not None else ()
    return Counter(node.op for node in nodes)


def _likeness(one: Counter[OpKind], other: Counter[OpKind]) -> float:
    shared = (one & other).total()
    return 2 * shared / max(1, one.total() + other.total())


class History:
    """Every new graph, by the line where it was made."""

    def __init__(self) -> None:
        self.records: deque[GraphRecord] = deque(maxlen=MAX_RECORDS)
        self.cut_sites: OrderedDict[Place, CutSite] = OrderedDict()
        self.holding: deque[GraphRecord] = deque()  # records that have their graph
        self.nodes = 0
        self.serial = 0
        self.before_reset = 0
        self.forgotten = 0  # records dropped since the last reset

    def note(self, name: str, graph: Graph, backend: str) -> GraphRecord:
        """A record for a new graph; `keep` it when there is a plan for it."""
        site = user_line()
        key = (backend, getattr(site, "file", ""), getattr(site, "line", 0))
        cut_site = self.cut_sites.get(key) or self.cut_sites.setdefault(key, CutSite())
        self.cut_sites.move_to_end(key)
        while len(self.cut_sites) > MAX_CUT_SITES:
            self.cut_sites.popitem(last=False)
        self.serial += 1
        return GraphRecord(name, graph, cut_site, site, self.serial)

    def keep(self, record: GraphRecord) -> None:
        """A graph that can be run."""
        record.place = record.cut_site.met
        record.cut_site.met += 1
        record.cut_site.holding.append(record)
        self.forgotten += len(self.records) == MAX_RECORDS
        self.records.append(record)
        self.holding.append(record)
        self.nodes += record.size
        while len(self.holding) > MAX_GRAPHS or (self.nodes > MAX_NODES and len(self.holding) > 2):
            self._drop_one()

    def _drop_one(self) -> None:
        """Drop the graph that tells least: the oldest, but for those with which a line began.

        The latest stay, whatever they are: somebody may ask why they are new.
        """
        latest = MAX_GRAPHS // 4 if len(self.holding) > MAX_GRAPHS else 2
        older = itertools.islice(self.holding, len(self.holding) - latest)
        old = next((r for r in older if r.place >= FIRST), self.holding[0])
        self.holding.remove(old)
        self.nodes -= old.size
        old.drop_graph()

    def since_reset(self) -> list[GraphRecord]:
        """The records made since the metrics were set back."""
        return [record for record in self.records if record.serial > self.before_reset]

    def reset(self) -> None:
        """Leave out of later answers what was made so far; it is still compared with."""
        self.before_reset, self.forgotten = self.serial, 0

    def plans_dropped(self) -> None:
        """Whatever is compiled from now on is compiled for the first time."""
        for cut_site in self.cut_sites.values():
            cut_site.compiled = 0

    def clear(self) -> None:
        """Forget every graph."""
        self.__init__()  # type: ignore[misc]  # as if new


HISTORY = History()
metrics.on_reset(HISTORY.reset)


def before_compile(record: GraphRecord) -> None:
    """Tell of a graph that is compiled where another was compiled before, as the user wishes."""
    wish = config.on_recompile
    if wish == "ignore" or not record.cut_site.compiled:
        return
    text = (
        f"a graph is compiled again: {record.name}\n  cut at:  {record.site}\n"
        f"  because: {record.difference}"
    )
    if wish == "raise":
        raise RecompileError(text)
    if wish != "warn":
        raise ValueError(f"config.on_recompile is 'ignore', 'warn' or 'raise', not {wish!r}")
    warnings.warn(text, TorporWarning, stacklevel=depth_of_user())
