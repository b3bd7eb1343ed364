"""A log of timed events, for timelines and for diagnosing slow steps after the fact.

Each trace, compile, run, sync and fallback is one event; there is none per op. The latest are kept.
While torch's profiler is on, they appear on its timeline too.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torpor import _torch, metrics
from torpor.errors import HiddenSync
from torpor.observe.phases import AWAY

MAX_EVENTS = 4096


class Event:
    """Something that took time; `start` is a reading of `time.perf_counter`."""

    __slots__ = ("kind", "name", "seconds", "site", "start", "thread")

    def __init__(self, kind: str, start: float, name: str = "", site: str = "") -> None:
        self.kind = kind  # "record", "compile", "load", "keep", "run", "sync" or "fallback"
        self.start = start
        self.seconds = time.perf_counter() - start
        self.name = name
        self.site = site
        self.thread = threading.get_ident()

    def __repr__(self) -> str:
        return f"<{self.kind} {self.name} {self.seconds * 1e3:.3f} ms {self.site}>"


EVENTS: deque[Event] = deque(maxlen=MAX_EVENTS)
metrics.on_reset(EVENTS.clear)


def _nowhere() -> Any:
    return None


def _anywhere() -> int:
    return 0


class _Lines:
    """How to find the user's line; set by `observe.site`, which is in a higher layer."""

    find: Callable[[], Any] = staticmethod(_nowhere)
    place: Callable[[], int] = staticmethod(_anywhere)


def find_lines_with(find: Callable[[], Any], place: Callable[[], int]) -> None:
    """Register `find()`, which returns the user's current line, and `place()` (`place_of_read`)."""
    _Lines.find = staticmethod(find)
    _Lines.place = staticmethod(place)


def user_line() -> Any:
    """The user's current line; None if there is none."""
    return _Lines.find()


def place_of_read() -> int:
    """A number for the current place in the program: equal for equal innermost call sites."""
    return _Lines.place()


# -- the current step --------------------------------------------------------------------------


class _StepClock:
    """Times recording: from the first leaf of a trace to its cut, without other phases."""

    __slots__ = (
        "away", "began", "counted", "last", "last_asked", "last_read", "read_at",
        "span", "thread",
    )  # fmt: skip

    def __init__(self) -> None:
        self.began = 0.0
        self.away = 0.0  # seconds spent in other phases before `began`
        self.counted = 0.0  # seconds attributed to graphs made so far in this trace
        self.last = 0.0  # seconds of the previous step
        self.last_read = ""  # the line of the last read
        self.last_asked = ""  # and the conversion it was for, until the next cut
        self.read_at = ""  # the line whose read ended the previous trace; "" after a cut
        self.span: Any = None  # on the timeline of torch's profiler
        self.thread = 0

    def begin(self) -> None:
        """Called when the first leaf enters."""
        if _torch.is_profiler_on():
            self.span, self.thread = _torch.profiler_span("torpor record"), threading.get_ident()
            self.span.__enter__()
        self.began, self.away, self.counted = time.perf_counter(), AWAY.seconds, 0.0

    def so_far(self) -> float:
        """Seconds of recording since the first leaf; those of the last step once it has ended."""
        return self._until(time.perf_counter()) if self.began else self.last

    def _until(self, now: float) -> float:
        return max(0.0, now - self.began - (AWAY.seconds - self.away))

    def since_last_graph(self) -> float:
        """Seconds of recording since the last graph of this trace was made."""
        before, self.counted = self.counted, self.so_far()
        return self.counted - before

    def end(self, new_nodes: int, now: float) -> None:
        """Called when the trace ends, having recorded until `now`, with `new_nodes` misses."""
        if not self.began:
            self.last = self.counted = 0.0
            return
        self.last = self._until(now)
        EVENTS.append(Event("record", self.began))
        metrics.add_time("Record", self.last)
        if new_nodes:
            metrics.add_time("RecordNew", self.last)
        if self.span is not None:
            if self.thread == threading.get_ident():  # a span must end on its own thread
                self.span.__exit__(None, None, None)
            self.span = None
        self.began = 0.0

    def restart(self) -> None:
        """Restart the clock, for a trace in progress."""
        if self.began:
            self.began, self.away, self.counted = time.perf_counter(), AWAY.seconds, 0.0


STEP = _StepClock()
metrics.on_reset(STEP.restart)


# -- spans -------------------------------------------------------------------------------------


class span:  # a class for speed, like `metrics.timer`
    """Records an event for the body, and a span on the profiler's timeline if it is on."""

    __slots__ = ("kind", "name", "shown", "start")

    def __init__(self, kind: str, name: str) -> None:
        self.kind = kind
        self.name = name
        self.shown: Any = None

    def __enter__(self) -> None:
        if _torch.is_profiler_on():
            self.shown = _torch.profiler_span(f"torpor {self.kind} {self.name}")
            self.shown.__enter__()
        self.start = time.perf_counter()

    def __exit__(self, *error: Any) -> None:
        EVENTS.append(Event(self.kind, self.start, self.name))
        if self.shown is not None:
            self.shown.__exit__(*error)


# -- reads -------------------------------------------------------------------------------------


class _ReadState(threading.local):
    """What this thread reads for, and whether it may."""

    forbidden = 0
    asked = ""  # "bool", "int", ...: the conversion in progress


_reads = _ReadState()


@contextmanager
def no_sync() -> Iterator[None]:
    """Raise `torpor.errors.HiddenSync` where the body waits implicitly for a result.

    Reading a queued result counts, even if it happens to be computed already. Explicit waits do
    not: `torpor.sync(..., wait=True)` and `torpor.wait()`.
    """
    _reads.forbidden += 1
    try:
        yield
    finally:
        _reads.forbidden -= 1


@contextmanager
def asked_for(what: str) -> Iterator[None]:
    """Within the body, reads are for the conversion `what`."""
    before, _reads.asked = _reads.asked, what
    try:
        yield
    finally:
        _reads.asked = before


def refuse_read() -> None:
    """Raise if this read is in the body of a `no_sync`."""
    if _reads.forbidden:
        raise HiddenSync(
            "a tensor is read here, inside torpor.no_sync(): the program has to wait for it\n"
            f"  read at: {user_line()}\n"
            "  fix:     read it after the body, or ask for it: torpor.sync(tensor, wait=True)"
        )


def was_read(start: float, made: float) -> None:
    """Record a read that began at `start`; `made` seconds of it were spent making the graph."""
    site = str(user_line())
    event = Event("sync", start, _reads.asked, site)
    waited = event.seconds - made
    STEP.last_read, STEP.last_asked = site, _reads.asked
    metrics.add_time("Sync", waited)
    metrics.time_line(f"Wait::{_reads.asked}" if _reads.asked else "Wait", site, waited)
    EVENTS.append(event)


def fell_back(start: float, op: str) -> None:
    """Record that eager ran an op that could not be recorded, from `start` until now."""
    event = Event("fallback", start, op, str(user_line()))
    metrics.time_line("FallbackTime", event.site, event.seconds)
    EVENTS.append(event)
