"""What the program's own threads do in torpor besides recording, and how long: every moment of a
thread counts once, for the innermost phase it is in.

The thread of a queue and those that compile run in the background: their time is not its time.
"""

from __future__ import annotations

import threading
from time import perf_counter
from typing import Final

from torpor import metrics

PLANNING: Final = "planning"  # finding or making the plan of a graph, and its job
COMPILING: Final = "compiling"  # in the compiler, or loading and keeping what it made
RUNNING: Final = "running"  # graphs, and ops that cannot be recorded
WAITING: Final = "waiting"  # for numbers, for the queue, for another thread

TOTALS: dict[str, float] = dict.fromkeys((PLANNING, COMPILING, RUNNING, WAITING), 0.0)
"""Seconds since the process began."""


class _Away:
    """Seconds in all phases together."""

    __slots__ = ("before", "began", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0
        self.restart()

    def restart(self) -> None:
        """Leave out of later answers what was counted so far."""
        self.began, self.before = perf_counter(), dict(TOTALS)


AWAY = _Away()
metrics.on_reset(AWAY.restart)


class _Thread(threading.local):
    """Whether the thread is the program's, and the seconds of phases inside the one it is in."""

    in_background = False
    inner: float | None = None


_thread = _Thread()


def mark_as_background() -> None:
    """This thread is not the program's."""
    _thread.in_background = True


class phase:  # a class for speed
    """The body is spent on `name`, but for the phases inside it."""

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
