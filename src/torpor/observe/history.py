"""History of new graphs by the user's line, and how each differs from earlier ones.

The cut site of a graph is the line that cut or read. Only a new graph gets a record, so a warm step
costs nothing; as programs that never repeat get one in every step, differences are computed lazily.
The graphs kept for that are bounded: the first ones of each cut site, and the latest of all.
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
"""The most leaves of a trace whose storages are remembered."""
FIRST: Final = 4
"""The first graphs of a cut site, which are kept longest."""
TIMED_RUNS: Final = 8
"""Runs needed for an estimate of the time of one."""
MAX_COMPARED: Final = 8
"""The most earlier graphs of a cut site that a new one is compared with."""

Place = tuple[str, str, int]  # backend, file, line


class CutSite:
    """A line at which graphs are made."""

    __slots__ = ("compiled", "holding", "met")

    def __init__(self) -> None:
        self.met = 0  # graphs made here
        self.compiled = 0  # how many of them were compiled
        self.holding: list[GraphRecord] = []  # records whose graph is kept


class GraphRecord:
    """A new graph: where it was made, its statistics, and how it differs from an earlier one."""

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
        self.place = cut_site.met  # its index among the graphs made there
        self.epoch = TRACE.epoch
        self.graph: Graph | None = graph
        self.size = len(graph)
        self.leaves = _leaf_storages()
        self.kept: frozenset[int] = frozenset()  # leaves with the same storage in the next step
        self.hits = 0
        self.compiled = False
        self.loaded = False  # from the disk cache
        self.plan_seconds = 0.0  # to make its plan, excluding compilation
        self.compile_seconds = 0.0
        self.record_seconds = STEP.since_last_graph() if TRACE.misses else 0.0
        self.failure = ""
        self.runs = self.interpreted_runs = 0
        self.run_seconds = self.interpreted_seconds = 0.0
        self._usual = 0.0  # busy seconds per run, a moving average
        self.asked_at = STEP.last_read if STEP.last_asked == "bool" else ""  # the line of a branch
        self.read_at = STEP.read_at
        self._difference: Difference | None = None

    @property
    def site(self) -> str:
        """The line that cut or read."""
        return str(self._site)

    @property
    def first(self) -> bool:
        """Whether it was the first graph made at its line."""
        return not self.place

    def met_again(self) -> None:
        """Called when the same graph was recorded again."""
        self.hits += 1
        if self.hits == 1:
            now = _leaf_storages()
            self.kept = frozenset(
                slot for slot, then in self.leaves.items() if slot in now and then() is now[slot]()
            )
            self.leaves = {slot: self.leaves[slot] for slot in self.kept}

    def was_compiled(self) -> None:
        """Called when the backend has compiled it."""
        self.compiled = True
        self.cut_site.compiled += 1

    def was_loaded(self) -> None:
        """Called when it was loaded from the disk cache."""
        self.loaded = True
        self.cut_site.compiled += 1

    def ran(self, seconds: float, busy: float, interpreted: bool) -> None:
        """Called after a run; its thread was busy for part of the time, and waited otherwise."""
        self.runs += 1
        self.run_seconds += seconds
        self._usual += (busy - self._usual) * (0.2 if self.runs > 1 else 1.0)
        if interpreted:
            self.interpreted_runs += 1
            self.interpreted_seconds += seconds

    @property
    def usual_seconds(self) -> float | None:
        """The estimated busy seconds per run; None before there are enough runs."""
        return self._usual if self.runs >= TIMED_RUNS else None

    @property
    def difference(self) -> Difference | None:
        """Compared with the most similar earlier graph of its cut site; None for the first."""
        if self._difference is None and not self.first:
            graph, other = self.graph, self._most_similar()
            before = None if other is None else other.graph  # another thread may drop it
            if graph is None or other is None or before is None:
                return Difference(UNKNOWN)
            self._difference = self._compared(graph, other, before)
        return self._difference

    def _most_similar(self) -> GraphRecord | None:
        """The earlier graph of this cut site with the most ops in common; of equals, the latest."""
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
        """Whether it continues from values computed for the other: their trace was never cut."""
        computed = any(value.node.operands for value in graph.inputs)
        return computed and self.epoch == other.epoch

    def _read_before(self, other: GraphRecord) -> Difference | None:
        """The difference if a read ended the previous trace for only one of the two."""
        if self.read_at == other.read_at:
            return None
        reads = str(int(bool(other.read_at))), str(int(bool(self.read_at)))
        return Difference(READ, "", "", *reads, line=self.read_at or other.read_at)

    def _storage(self, slot: int) -> LazyStorage | None:
        found = self.leaves.get(slot)
        return None if found is None else found()

    def drop_graph(self) -> None:
        """Drop the graph, and so its nodes."""
        self.graph = None
        self.leaves, self.kept = {}, frozenset()
        self.cut_site.holding.remove(self)


def _leaf_storages() -> dict[int, ref[LazyStorage]]:
    """The storage of each leaf of the current trace."""
    first = TRACE.leaf_storages[:MAX_LEAVES]  # bounded: a trace may never be cut
    return {leaf.node.args[0]: ref(storage) for storage, leaf in reversed(first)}


def _ops(record: GraphRecord) -> Counter[OpKind]:
    nodes = record.graph.nodes if record.graph is not None else ()
    return Counter(node.op for node in nodes)


def _likeness(one: Counter[OpKind], other: Counter[OpKind]) -> float:
    shared = (one & other).total()
    return 2 * shared / max(1, one.total() + other.total())


class History:
    """Records of new graphs, by cut site."""

    def __init__(self) -> None:
        self.records: deque[GraphRecord] = deque(maxlen=MAX_RECORDS)
        self.cut_sites: OrderedDict[Place, CutSite] = OrderedDict()
        self.holding: deque[GraphRecord] = deque()  # records whose graph is kept
        self.nodes = 0
        self.serial = 0
        self.before_reset = 0
        self.forgotten = 0  # records dropped since the last reset

    def note(self, name: str, graph: Graph, backend: str) -> GraphRecord:
        """Make a record for a new graph; `keep` it once there is a plan."""
        site = user_line()
        key = (backend, getattr(site, "file", ""), getattr(site, "line", 0))
        cut_site = self.cut_sites.get(key) or self.cut_sites.setdefault(key, CutSite())
        self.cut_sites.move_to_end(key)
        while len(self.cut_sites) > MAX_CUT_SITES:
            self.cut_sites.popitem(last=False)
        self.serial += 1
        return GraphRecord(name, graph, cut_site, site, self.serial)

    def keep(self, record: GraphRecord) -> None:
        """Add a record, as its graph can be run."""
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
        """Drop the least informative graph: the oldest that is not among the first of its line.

        The latest ones stay in any case, as they are most likely to be asked about.
        """
        latest = MAX_GRAPHS // 4 if len(self.holding) > MAX_GRAPHS else 2
        older = itertools.islice(self.holding, len(self.holding) - latest)
        old = next((r for r in older if r.place >= FIRST), self.holding[0])
        self.holding.remove(old)
        self.nodes -= old.size
        old.drop_graph()

    def since_reset(self) -> list[GraphRecord]:
        """The records made since the metrics were reset."""
        return [record for record in self.records if record.serial > self.before_reset]

    def reset(self) -> None:
        """Exclude earlier records from `since_reset`; they are still compared with."""
        self.before_reset, self.forgotten = self.serial, 0

    def plans_dropped(self) -> None:
        """Count no later compilation as a recompilation."""
        for cut_site in self.cut_sites.values():
            cut_site.compiled = 0

    def clear(self) -> None:
        """Forget every graph."""
        self.__init__()  # type: ignore[misc]  # reset to the initial state


HISTORY = History()
metrics.on_reset(HISTORY.reset)


def before_compile(record: GraphRecord) -> None:
    """Warn or raise, if configured, when a line that has compiled a graph compiles another one."""
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
