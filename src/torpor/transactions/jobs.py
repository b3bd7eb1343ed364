"""Jobs on a device's queue: what each runs, which handles it fills, and what it keeps alive."""

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
"""Counted per job besides its data, so that recording does not get thousands of steps ahead."""


SHORT = 0.03
"""Seconds. A CPU job expected to take less runs on the submitting thread, if the queue is idle: two
threads that contend for the GIL take longer than one that does both. So does a longer job whose
kernels use every core: no core would be left to record the next step on."""


class Job:
    """Work for a queue, the handles it fills, and the data it keeps alive until it has run."""

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
        self.arguments: list[Any] = []  # including results of other jobs
        self.done = done or Done()
        self.threads = torch.get_num_threads()
        self.submitted = 0.0  # when it was enqueued
        self.here = False  # to be run by the thread that submitted it
        self.awaited = False  # that thread will wait for it immediately
        self.donates = False  # it may overwrite its arguments, so it must not be interrupted
        self.succeeded = False  # later errors do not make it fail
        self.expect(kept, usual, here, one_core, kept_bytes)
        if done is None:  # otherwise the results have it already
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
        """Set what is known about its run."""
        self.kept = kept
        self.bytes = kept_bytes  # of everything it keeps alive; None: not computed yet
        self.must_be_here = here
        known = usual is not None and not one_core  # a one-core job leaves cores to record on
        self.short = known and (usual < SHORT or self.threads >= cores())  # type: ignore[operator]  # not None

    def is_ready(self) -> bool:
        """Whether it can be run without `prepare`."""
        return True

    def is_held_up(self) -> bool:
        """Whether another thread is preparing it."""
        return False

    def prepare(self) -> None:
        """Do what remains before it can run; may take long."""

    def give_up(self, queue: DeviceQueue, error: BaseException) -> None:
        """Preparing it has failed; the error is about to be raised."""

    def fail(self, error: BaseException) -> None:
        """Set `error` as the error of the job and all its results."""
        for result in self.results:
            result.error = error
        self.done.failure = Failure(error)

    def needs(self, jobs: Collection[Done]) -> bool:
        """Whether it needs results of `jobs`."""
        return any(
            isinstance(argument, BackendData) and argument.done in jobs
            for argument in self.arguments
        )


@functools.lru_cache(maxsize=4096)
def _nbytes(type_: TensorType) -> int:
    return type_.nbytes


class Budget:
    """The memory that unfinished jobs keep alive; data that several of them share count once.

    A single job always fits. What is shared is only determined if the sum without sharing exceeds
    the limit.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.changed = threading.Condition()

    @property
    def bytes(self) -> int:
        """The bytes that all jobs keep alive."""
        with self.changed:
            return kept_by(self.jobs)

    def take(self, job: Job) -> None:
        """Add `job`, whether it fits or not."""
        with self.changed:
            self.jobs.append(job)

    def is_full(self) -> bool:
        """Whether the jobs exceed the limit."""
        with self.changed:
            return not self._has_room()

    def wait(self) -> None:
        """Wait until all jobs fit, or a single one is left."""
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
        """Remove `job`, which has run."""
        with self.changed:
            if job in self.jobs:
                self.jobs.remove(job)
                self.changed.notify_all()


def _kept_alone(job: Job) -> int:
    """The bytes that `job` keeps alive, regardless of the others."""
    if job.bytes is None:
        job.bytes = sum(_nbytes(data.type) for data in job.kept)
    return job.bytes


def kept_by(jobs: Sequence[Job]) -> int:
    """The bytes that jobs keep alive together."""
    kept = {id(data): data.type for job in jobs for data in job.kept}
    return len(jobs) * JOB_BYTES + sum(map(_nbytes, kept.values()))
