"""Where the program's threads spend time in torpor, besides recording. Each moment of a thread is
attributed to the innermost phase that it is in.

Queue threads and compile threads run in the background, so their time is not counted.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Final

from torpor import metrics

PLANNING: Final = "planning"  # finding or making a graph's plan and its job
COMPILING: Final = "compiling"  # in the compiler, or loading and storing compiled graphs
RUNNING: Final = "running"  # graphs, and ops that cannot be recorded
WAITING: Final = "waiting"  # for results, for the queue, for another thread

TOTALS: dict[str, float] = dict.fromkeys((PLANNING, COMPILING, RUNNING, WAITING), 0.0)
"""Seconds since the process started."""


class _Away:
    """Seconds in all phases together."""

    __slots__ = ("before", "began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.restart()

    def restart(self) -> None:
        """Exclude everything counted so far from later queries."""
        self.began, self.before = perf_counter(), dict(TOTALS)


AWAY = _Away()
metrics.on_reset(AWAY.restart)


class _Thread(threading.local):
    """Whether the thread is torpor's, and the seconds of phases nested in the current one."""

    in_background = False
    inner: float | None = None


_thread = _Thread()


def mark_as_background() -> None:
    """Exclude this thread, which is not the program's."""
    _thread.in_background = True


class phase:  # a class for speed
    """Attributes the body's time to `name`, minus that of nested phases."""

    __slots__ = ("name", "outer", "start")

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> float:
        self.outer = _thread.inner
        _thread.inner = 0.0
        self.start = start = perf_counter()
        return start

    def __exit__(self, *_: object) -> None:
        seconds = perf_counter() - self.start
        inner, outer = _thread.inner, self.outer
        _thread.inner = None if outer is None else outer + seconds
        if not _thread.in_background:
            TOTALS[self.name] += seconds - (inner or 0.0)
            if outer is None:
                AWAY.seconds += seconds


def spent() -> dict[str, float]:
    """Seconds in each phase since the metrics were reset."""
    return {name: seconds - AWAY.before[name] for name, seconds in TOTALS.items()}


def wall_clock() -> float:
    """Seconds since the metrics were reset."""
    return perf_counter() - AWAY.began
