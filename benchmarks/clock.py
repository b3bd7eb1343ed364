"""Two clocks for one piece of work, read with the garbage collector off."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import NamedTuple


class Time(NamedTuple):
    """Seconds on the wall clock, and of CPU time that the calling thread used.

    CPU time is what holds on a machine that others use too.
    """

    wall: float
    cpu: float


def timed(work: Callable[[], object]) -> Time:
    """The time `work` takes; the caller switches the garbage collector off (`no_gc`)."""
    wall, cpu = time.perf_counter(), time.thread_time()
    work()
    cpu_end, wall_end = time.thread_time(), time.perf_counter()
    return Time(wall_end - wall, cpu_end - cpu)


@contextmanager
def no_gc() -> Iterator[None]:
    """Keeps the garbage collector out of what is timed, as `timeit` does; collects before."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def medians(times: list[Time]) -> Time:
    """The median of each clock."""
    return Time(median(t.wall for t in times), median(t.cpu for t in times))
