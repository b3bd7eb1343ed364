"""Jobs of a device's queue: what each runs, fills and keeps alive till then."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch

from torpor import config, metrics
from torpor.backend.data import BackendData, Done, Failure
from torpor.backend.device import cores
from torpor.ir.types import TensorType
from torpor.observe.phases import WAITING, phase

if TYPE_CHECKING:
    from torpor.execute.queue import DeviceQueue


JOB_BYTES = 1 << 20
"""What a job counts for besides its data: nobody wants to be thousands of steps ahead."""


SHORT = 0.03
"""Seconds. A job of the CPU that takes less is run where it is submitted, if nothing is before it:
two threads that take turns at Python's lock take longer than one that does both. So is one of any
length whose kernels use every core: there is none left to record the next step on meanwhile."""


class Job:
    """Something to run in order, the handles it fills, and the data it keeps alive till then."""

    __slots__ = (
        "arguments",
        "awaited",
        "bytes",
        "donates",
        "done",
        "here",
        "kept",
        "must_be_here",
        "results",
        "run",
        "short",
        "submitted",
        "succeeded",
        "threads",
    )  # fmt: skip

    def __init__(
        self,
        run: Callable[[], None],
        results: Sequence[BackendData],
        kept: Sequence[BackendData] = (),
        usual: float | None = None,
        here: bool = False,
        one_core: bool = False,
        kept_bytes: int | None = None,
        done: Done | None = None,
    ) -> None:
        self.run = run
        self.results = results
        self.arguments: list[Any] = []  # what it needs of other jobs, among others
        self.done = done or Done()
        self.threads = torch.get_num_threads()
        self.submitted = 0.0  # when it was put on a queue
        self.here = False  # the thread that submitted it runs it
        self.awaited = False  # that thread does nothing else before it has run
        self.donates = False  # it may write over its arguments: it is not to be interrupted
        self.succeeded = False  # what comes now cannot undo it
        self.expect(kept, usual, here, one_core, kept_bytes)
        if done is None:  # else the results know it
            for result in results:
                result.done = self.done

    def expect(
        self,
        kept: Sequence[BackendData],
        usual: float | None,
        here: bool,
        one_core: bool,
        kept_bytes: int | None,
    ) -> None:
        """Say what will be known of its run."""
        self.kept = kept
        self.bytes = kept_bytes  # of all it keeps; None: not counted yet
        self.must_be_here = here
        known = usual is not None and not one_core  # the seconds it takes; beside: it leaves cores
        self.short = known and (usual < SHORT or self.threads >= cores())  # type: ignore[operator]  # not None

    def is_ready(self) -> bool:
        """All is known that it takes to run it."""
        return True

    def is_held_up(self) -> bool:
        """Another thread finds out what is missing."""
        return False

    def prepare(self) -> None:
        """Find out what is missing; may take long."""

    def give_up(self, queue: DeviceQueue, error: BaseException) -> None:
        """It could not be prepared, and the error is about to be raised."""

    def fail(self, error: BaseException) -> None:
        """Let everybody know that `error` has ended it."""
        for result in self.results:
            result.error = error
        self.done.failure = Failure(error)

    def needs(self, jobs: Collection[Done]) -> bool:
        """It needs results of `jobs`."""
        return any(
            isinstance(argument, BackendData) and argument.done in jobs
            for argument in self.arguments
        )


@functools.lru_cache(maxsize=4096)
def _nbytes(type_: TensorType) -> int:
    return type_.nbytes


class Budget:
    """The memory that waiting jobs keep alive; data that several of them hold count once.

    A job that comes when no other is there always fits. Who holds what is looked at only where
    there might be too much if nobody shared anything.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """All that the jobs keep."""
        with self.changed:
            return kept_by(self.jobs)

    def take(self, job: Job) -> None:
        """Count `job`, whether it fits or not."""
        with self.changed:
            self.jobs.append(job)

    def is_full(self) -> bool:
        """There is more than fits."""
        with self.changed:
            return not self._has_room()

    def wait(self) -> None:
        """Wait until all jobs fit; one that never will may stay when no other does."""
        with self.changed:
            if not self._has_room():
                with phase(WAITING), metrics.timer("QueueFull"):
                    self.changed.wait_for(self._has_room)

    def _has_room(self) -> bool:
        if len(self.jobs) < 2:
            return True
        most = sum(JOB_BYTES + _kept_alone(job) for job in self.jobs)
        return most <= config.queue_bytes or kept_by(self.jobs) <= config.queue_bytes

    def give_back(self, job: Job) -> None:
        """`job` has run."""
        with self.changed:
            if job in self.jobs:
                self.jobs.remove(job)
                self.changed.notify_all()


def _kept_alone(job: Job) -> int:
    """The bytes of what `job` keeps."""
    if job.bytes is None:
        job.bytes = sum(_nbytes(data.type) for data in job.kept)
    return job.bytes


def kept_by(jobs: Sequence[Job]) -> int:
    """The bytes that jobs keep together."""
    kept = {id(data): data.type for job in jobs for data in job.kept}
    return len(jobs) * JOB_BYTES + sum(map(_nbytes, kept.values()))
