"""Where the time of each step went, computed from overlapping events."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from torpor.debug.facts import EventFact

Interval = tuple[float, float]

COMPILING: Final = ("compile", "load", "keep")
"""Kinds of events of compiling, including loading and storing compiled graphs."""


@dataclass(frozen=True, slots=True)
class Step:
    """From the first op of a trace to the first op of the next; times in seconds."""

    number: int
    start: float
    seconds: float
    record: float  # recording, excluding waits and compiles
    compile: float
    run: float  # a device was busy
    wait: float  # the program waited for a result
    idle: float  # nothing recorded, compiled or ran


def steps(events: Sequence[EventFact]) -> list[Step]:
    """The steps of a program, in order."""
    starts = [event.start for event in events if event.kind == "record"]
    if not starts:
        return []
    last = max(event.start + event.seconds for event in events)
    spans = {kind: _union(_of(events, kind)) for kind in ("record", "run", "sync")}
    spans["compile"] = _union(_of(events, *COMPILING))
    spans["wait"] = _without(spans["sync"], spans["compile"])
    away = _union([*spans["compile"], *spans["wait"]])
    spans["record"] = _without(spans["record"], away)
    busy = _union([*spans["record"], *spans["compile"], *spans["run"]])
    walks = {kind: _Walk(span) for kind, span in {**spans, "busy": busy}.items()}
    found = []
    for number, (start, end) in enumerate(zip(starts, [*starts[1:], last])):
        took = {kind: walk.within(start, end) for kind, walk in walks.items()}
        idle = max(0.0, end - start - took["busy"])
        found.append(
            Step(
                number,
                start,
                end - start,
                took["record"],
                took["compile"],
                took["run"],
                took["wait"],
                idle,
            )
        )
    return found


def _of(events: Iterable[EventFact], *kinds: str) -> list[Interval]:
    return [(e.start, e.start + e.seconds) for e in events if e.kind in kinds]


def _union(intervals: Sequence[Interval]) -> list[Interval]:
    """The union of intervals, in order and disjoint."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((start, end))
    return found


def _without(intervals: Sequence[Interval], taken: Sequence[Interval]) -> list[Interval]:
    """The parts of `intervals` outside of `taken`; both in order and disjoint."""
    found: list[Interval] = []
    first = 0
    for start, end in intervals:
        while first < len(taken) and taken[first][1] <= start:
            first += 1
        place = first
        while place < len(taken) and taken[place][0] < end:
            if taken[place][0] > start:
                found.append((start, taken[place][0]))
            start = max(start, taken[place][1])
            place += 1
        if start < end:
            found.append((start, end))
    return found


class _Walk:
    """Sums of intervals within windows, which must be queried in order."""

    def __init__(self, intervals: Sequence[Interval]) -> None:
        self.intervals = intervals
        self.first = 0

    def within(self, start: float, end: float) -> float:
        """Total seconds of the intervals between `start` and `end`."""
        while self.first < len(self.intervals) and self.intervals[self.first][1] <= start:
            self.first += 1
        total, place = 0.0, self.first
        while place < len(self.intervals) and self.intervals[place][0] < end:
            total += min(end, self.intervals[place][1]) - max(start, self.intervals[place][0])
            place += 1
        return total
