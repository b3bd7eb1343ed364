"""`torpor.explain()`: why it compiled, where it waited, and what to change."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from typing import Any

from torpor import metrics
from torpor.adaptive.bound import report
from torpor.debug.causes import failures, recompiles
from torpor.debug.findings import Finding
from torpor.debug.ranks import GroupTraffic, traffic
from torpor.debug.reads import fallbacks, syncs, with_branches
from torpor.debug.regions import RegionLine, regions
from torpor.debug.report import text
from torpor.execute.storage import TRACE
from torpor.observe.events import STEP
from torpor.observe.history import HISTORY, GraphRecord
from torpor.observe.phases import spent, wall_clock

COMPUTE_BOUND = "compute-bound"
TRACING_BOUND = "tracing-bound"
COMPILE_BOUND = "compile-bound"
IDLE = "idle"


@dataclass(frozen=True, slots=True)
class NewGraph:
    """A new graph, and why it is new."""

    name: str
    line: str  # the line that cut or read
    why: str  # as a sentence
    cause: str  # "first time", or a kind of `text.difference`
    nodes: int
    compiled: bool
    loaded: bool  # from the disk cache
    seconds: float  # to compile or load it
    hits: int  # later cache hits
    runs: int
    run_seconds: float


@dataclass(frozen=True, slots=True)
class Balance:
    """Where the time goes, in seconds; the two per step are medians.

    The last seven are times of the program's threads: six disjoint parts, and the wall clock, which
    they add up to. Several recording threads are added up.
    """

    traces: int
    new_traces: int  # those with cache misses
    record: float  # per step, on the program's thread
    run: float  # per step, on the device's queue or on the submitting thread
    recording: float  # total: from a trace's first leaf to its cut, with the Python in between
    planning: float  # finding or making the plan of a graph
    compiling: float  # or loading compiled graphs from disk
    running: float  # graphs, on the program's thread
    waiting: float  # for results that the program read, or for a full queue
    outside: float  # while no trace was open
    wall: float

    @property
    def verdict(self) -> str:
        """What limits the speed of a step."""
        if not self.traces and not self.run:
            return IDLE
        if self.compiling > self.recording + self.planning + self.running + self.waiting:
            return COMPILE_BOUND
        return COMPUTE_BOUND if self.run >= self.record else TRACING_BOUND


@dataclass(frozen=True, slots=True)
class Explanation:
    """What torpor has done since the process began or `torpor.metrics.reset()` was called."""

    balance: Balance
    findings: tuple[Finding, ...]  # most expensive first
    graphs: tuple[NewGraph, ...]  # in the order in which they were made
    forgotten: int  # new graphs whose records were dropped
    places: tuple[str, ...] = ()  # model groups of `enable`: how each runs, and why
    regions: tuple[RegionLine, ...] = ()  # what was captured, and what could not be
    collectives: tuple[GroupTraffic, ...] = ()  # by process group, including other ranks

    def __str__(self) -> str:
        return text(self)

    def to_json(self) -> str:
        """The same as JSON."""
        content: dict[str, Any] = asdict(self)
        content["verdict"] = self.balance.verdict
        return json.dumps(content, indent=2)


def explain() -> Explanation:
    """Why graphs were compiled, where the program waited, and what to change.

    The result prints as text, has fields for programs, and `to_json()`.
    """
    with TRACE.lock:
        records = HISTORY.since_reset()
        compiles = recompiles(records)
        graphs = tuple(map(_new_graph, records))
    found = with_branches(syncs(), compiles) + fallbacks() + failures(records)
    found.sort(key=lambda one: one.rank)
    places, captured = tuple(report()), tuple(regions())
    balance = _balance()
    groups = traffic(balance.wall)
    return Explanation(balance, tuple(found), graphs, HISTORY.forgotten, places, captured, groups)


def _new_graph(record: GraphRecord) -> NewGraph:
    found = record.difference
    return NewGraph(
        record.name,
        record.site,
        "first graph of this line" if found is None else str(found),
        "first time" if found is None else found.kind,
        record.size,
        record.compiled,
        record.loaded,
        record.compile_seconds,
        record.hits,
        record.runs,
        record.run_seconds,
    )


def _balance() -> Balance:
    timers = metrics.timers()
    nothing = {"count": 0.0, "total": 0.0, "p50": 0.0}
    record, run = timers.get("Record", nothing), timers.get("Execute", nothing)
    steps = int(record["count"])
    new = int(timers.get("RecordNew", nothing)["count"])
    wall, parts = wall_clock(), spent()
    open_ = STEP.so_far() if STEP.began else 0.0
    parts["recording"] = record["total"] + open_
    outside = max(0.0, wall - sum(parts.values()))
    medians = record["p50"], run["p50"] * run["count"] / steps if steps else run["p50"]
    if STEP.began and not steps:  # the first trace was never cut
        steps, medians = 1, (open_, run["total"])
    return Balance(steps, new, *medians, **parts, outside=outside, wall=wall)
