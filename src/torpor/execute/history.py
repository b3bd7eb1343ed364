"""Which graphs were made at which lines of the user's, and how each came to differ from the last.

The cut site of a graph is the line that cut or read. A record is made for each new graph, so never
in a warm step. What a record keeps is bounded: the graphs of old ones are dropped after it was
noted what made them differ.
"""

from __future__ import annotations

import warnings
from collections import Counter, OrderedDict, deque
from typing import Any, Final
from weakref import ref

from torpor import config, metrics
from torpor.errors import RecompileError, TorporWarning
from torpor.execute.compilation import depth_of_user
from torpor.execute.events import STEP, user_line
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.difference import BRANCH, READ, UNKNOWN, Difference, difference
from torpor.ir.graph import Graph
from torpor.ir.node import OpKind

MAX_RECORDS: Final = 1024
MAX_CUT_SITES: Final = 1024
MAX_GRAPHS: Final = 64
MAX_NODES: Final = 100_000
TOLD_RUNS: Final = 8
"""Runs after which it is known what one takes."""
MAX_COMPARED: Final = 8
"""Earlier graphs of a cut site that a new one is compared with."""

Key = tuple[str, str, int]  # backend, file, line


_NO_OPS: Counter[OpKind] = Counter()


class CutSite:
    """A line at which graphs are made."""

    __slots__ = ("compiled", "explained", "met", "recent")

    def __init__(self) -> None:
        self.met = 0  # graphs made here
        self.compiled = 0  # and those that were compiled
        self.explained = 0  # differences noted when graphs were dropped
        self.recent: deque[GraphRecord] = deque(maxlen=MAX_COMPARED)


class GraphRecord:
    """A new graph: where it was made, what became of it, and how it differs from an earlier one."""

    __slots__ = (
        "_difference",
        "_usual",
        "asked_at",
        "compile_seconds",
        "compiled",
        "cut_site",
        "failure",
        "first",
        "graph",
        "hits",
        "interpreted_runs",
        "interpreted_seconds",
        "kept",
        "leaves",
        "loaded",
        "name",
        "ops",
        "previous",
        "previous_read_at",
        "read_at",
        "record_seconds",
        "replaced",
        "run_seconds",
        "runs",
        "serial",
        "site",
        "size",
    )  # fmt: skip

    def __init__(self, name: str, graph: Graph, cut_site: CutSite, site: Any, serial: int) -> None:
        self.name = name
        self.serial = serial
        self.site = str(site)  # the line that cut or read
        self.cut_site = cut_site
        self.first = not cut_site.met
        self.graph: Graph | None = graph
        self.size = len(graph)
        self.ops: Counter[OpKind] = Counter(node.op for node in graph.nodes)
        self.leaves = _leaf_storages()
        self.kept: frozenset[int] = frozenset()  # leaves that the next step found unchanged
        self.hits = 0
        self.compiled = False
        self.loaded = False  # from disk, where it was kept compiled
        self.compile_seconds = 0.0
        self.record_seconds = STEP.so_far() if TRACE.misses else 0.0  # of a step with new nodes
        self.failure = ""
        self.runs = self.interpreted_runs = 0
        self.run_seconds = self.interpreted_seconds = 0.0
        self._usual = 0.0  # what a run takes of its thread's time, the latest counting most
        self.asked_at = STEP.last_read if STEP.last_asked == "bool" else ""  # a branch's line
        self.read_at = self.previous_read_at = STEP.read_at
        self.previous: Graph | None = None
        self.replaced: frozenset[int] = frozenset()
        self._difference: Difference | None = None
        self._compare_with(_most_similar(self, cut_site))

    def _compare_with(self, other: GraphRecord | None) -> None:
        if other is not None:
            self.previous = other.graph
            self.previous_read_at = other.read_at
            self.replaced = frozenset(
                slot for slot in other.kept if other.leaves[slot]() is not self._storage(slot)
            )

    def _storage(self, slot: int) -> LazyStorage | None:
        found = self.leaves.get(slot)
        return None if found is None else found()

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
        return self._usual if self.runs >= TOLD_RUNS else None

    @property
    def difference(self) -> Difference | None:
        """How it differs from the most similar graph made here before; None for the first."""
        if self._difference is None and not self.first:
            before, after = self.previous, self.graph  # another thread may drop them meanwhile
            if before is None or after is None:
                return self._difference or Difference(UNKNOWN)
            found = difference(before, after, self.replaced)
            self._difference = self._read_before() if found.kind == BRANCH else None
            self._difference = self._difference or found
            self.previous = None
        return self._difference

    def _read_before(self) -> Difference | None:
        """A read ended the trace before this graph's, and not before the other's; or just so."""
        if self.read_at == self.previous_read_at:
            return None
        reads = str(int(bool(self.previous_read_at))), str(int(bool(self.read_at)))
        return Difference(READ, "", "", *reads, line=self.read_at or self.previous_read_at)

    def drop_graph(self) -> None:
        """Keep how it differs, unless the cut site has told that often enough; no nodes."""
        if self.cut_site.explained < MAX_GRAPHS and self.difference is not None:
            self.cut_site.explained += 1
        self.graph = self.previous = None
        self.leaves, self.kept, self.ops = {}, frozenset(), _NO_OPS


def _leaf_storages() -> dict[int, ref[LazyStorage]]:
    """The storage that entered this trace as each leaf."""
    found: dict[int, ref[LazyStorage]] = {}
    for storage, value in TRACE.leaf_storages:
        found.setdefault(value.node.args[0], ref(storage))
    return found


def _most_similar(record: GraphRecord, cut_site: CutSite) -> GraphRecord | None:
    """Of the graphs made here before, the one with the most ops in common; the latest of those."""
    known = [other for other in cut_site.recent if other.graph is not None]
    return max(reversed(known), key=lambda other: _likeness(other.ops, record.ops), default=None)


def _likeness(one: Counter[OpKind], other: Counter[OpKind]) -> float:
    shared = (one & other).total()
    return 2 * shared / max(1, one.total() + other.total())


class History:
    """Every new graph, by the line where it was made."""

    def __init__(self) -> None:
        self.records: deque[GraphRecord] = deque(maxlen=MAX_RECORDS)
        self.cut_sites: OrderedDict[Key, CutSite] = OrderedDict()
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
        record.cut_site.met += 1
        record.cut_site.recent.append(record)
        self.forgotten += len(self.records) == MAX_RECORDS
        self.records.append(record)
        self.holding.append(record)
        self.nodes += record.size
        while len(self.holding) > MAX_GRAPHS or (self.nodes > MAX_NODES and len(self.holding) > 2):
            old = self.holding.popleft()
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
