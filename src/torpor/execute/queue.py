"""One first-in first-out queue per device, with a thread of its own."""

from __future__ import annotations

import functools
import os
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torpor import _torch, config, metrics
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice, cores
from torpor.execute.heap import keep
from torpor.ir.types import TensorType

JOB_BYTES = 1 << 20
"""What a job counts for besides its data: nobody wants to be thousands of steps ahead."""


SHORT = 0.03
"""Seconds. A job of the CPU that takes less is run where it is submitted, if nothing is before it:
two threads that take turns at Python's lock take longer than one that does both. So is one of any
length whose kernels use every core: there is none left to record the next step on meanwhile."""


class Job:
    """Something to run in order, the handles it fills, and the data it keeps alive till then."""

    __slots__ = ("bytes", "done", "here", "kept", "results", "run", "short", "submitted", "threads")

    def __init__(
        self,
        run: Callable[[], None],
        results: Sequence[BackendData],
        kept: Sequence[BackendData] = (),
        usual: float | None = None,
        here: bool = False,
        beside: bool = False,
        kept_bytes: int | None = None,
    ) -> None:
        self.bytes = kept_bytes  # of all it keeps; None: not counted yet
        self.here = here  # it has to be run by the thread that submits it
        self.run = run
        self.results = results
        self.kept = kept
        self.done = threading.Event()
        self.threads = torch.get_num_threads()
        known = usual is not None and not beside  # the seconds it takes; beside: it leaves cores
        self.short = known and (usual < SHORT or self.threads >= cores())  # type: ignore[operator]  # not None
        self.submitted = 0.0  # when it was put on a queue
        for result in results:
            result.done = self.done


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
        """Wait until `job` fits; one that never will may run when no other does."""
        with self.changed:
            if not self._fits(job):
                with metrics.timer("QueueFull"):
                    self.changed.wait_for(lambda: self._fits(job))
            self.jobs.append(job)

    def _fits(self, job: Job) -> bool:
        if not self.jobs:
            return True
        jobs = [*self.jobs, job]
        most = sum(JOB_BYTES + _kept_alone(job) for job in jobs)
        return most <= config.queue_bytes or kept_by(jobs) <= config.queue_bytes

    def give_back(self, job: Job) -> None:
        """`job` has run."""
        with self.changed:
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


class DeviceQueue:
    """Runs jobs in the order in which they were submitted."""

    def __init__(self, device: BackendDevice) -> None:
        self.device = device
        if device.torch_device.type == "cpu":
            keep()
        self.jobs: queue.Queue[Job | None] = queue.Queue()
        self.budget = Budget()
        self.error: BaseException | None = None  # the first that nobody was told of yet
        self.thread: threading.Thread | None = None
        self._threads = 0  # what its thread has; 0: that of a new one

    def submit(self, job: Job) -> None:
        """Run `job` after all that were submitted before."""
        short = job.short and self.device.torch_device.type == "cpu" and self.is_idle()
        here = short or job.here or not config.async_queue
        if here or _torch.is_profiler_on_this_thread():  # which sees no other thread
            self._run_here(job, short)
            return
        if self.thread is None or not self.thread.is_alive():
            name = f"torpor-{self.device}"
            self.thread = threading.Thread(target=self._work, name=name, daemon=True)
            self.thread.start()
        self.budget.take(job)
        job.submitted = time.perf_counter()
        self.jobs.put(job)

    def _run_here(self, job: Job, short: bool) -> None:
        try:
            self.jobs.join()
            if short:
                self.stop()  # OpenMP lets threads sleep early while those of others exist
        except BaseException as error:  # Ctrl-C: who waits for the job is told
            _fail(job, error)
            job.done.set()
            raise
        with metrics.timer("ExecuteHere"), self._on_its_stream():
            self._run(job)
        if self.error is not None and not isinstance(self.error, Exception):
            self.raise_error()  # Ctrl-C was meant for this thread, which it reached

    def _on_its_stream(self) -> AbstractContextManager[Any]:
        """The stream of the queue's own thread, whatever stream the caller uses."""
        if self.device.type.name != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.default_stream(self.device.ordinal))

    def is_idle(self) -> bool:
        """Nothing is running or waiting to."""
        return not self.jobs.unfinished_tasks

    def wait(self) -> None:
        """Block until every submitted job has run."""
        if self.thread is not None:
            self.jobs.join()

    def stop(self) -> None:
        """Finish what was submitted and end the thread."""
        if self.thread is not None and self.thread.is_alive():
            self.jobs.put(None)
            self.thread.join()
        self.thread = None

    def raise_error(self) -> None:
        """Raise the first error that nobody was told of yet."""
        error, self.error = self.error, None
        if error is not None and not getattr(error, "_torpor_told", False):
            raise error.with_traceback(None)

    def _work(self) -> None:
        self._threads = 0
        torch.get_num_threads()  # sets a thread up: if asked later, it undoes what was set before
        if self.device.type.name == "cuda":
            torch.cuda.set_device(self.device.ordinal)  # a thread starts without one
        while True:
            job = self.jobs.get()
            try:
                if job is None:
                    return
                self._run(job)
                self.budget.give_back(job)
                job.kept = ()
            finally:
                del job  # an idle queue must not keep the last step's buffers alive
                self.jobs.task_done()

    def _run(self, job: Job) -> None:
        if self._threads != job.threads and threading.current_thread() is self.thread:
            torch.set_num_threads(job.threads)  # a setting of its own on every thread
            self._threads = job.threads
        if job.submitted:
            metrics.add_time("QueueWait", time.perf_counter() - job.submitted)
        try:
            with metrics.timer("Execute"), _torch.as_on_another_thread():
                job.run()
        except BaseException as error:  # reported at the next sync, and by whoever reads a result
            _fail(job, error)
        for result in job.results:
            if result.error is not None and self.error is None:
                self.error = result.error
        job.run = _ran
        job.done.set()


def _fail(job: Job, error: BaseException) -> None:
    for result in job.results:
        result.error = error


def _ran() -> None:
    """What a job that has run holds in place of its closure."""


_queues: dict[BackendDevice, DeviceQueue] = {}


def queue_of(device: BackendDevice) -> DeviceQueue:
    """The queue of `device`, made on first use."""
    found = _queues.get(device)
    if found is None:
        found = _queues.setdefault(device, DeviceQueue(device))
    return found


def queues(device: BackendDevice | None = None) -> list[DeviceQueue]:
    """All queues, or the one of `device`."""
    return list(_queues.values()) if device is None else [queue_of(device)]


os.register_at_fork(after_in_child=_queues.clear)  # threads do not survive a fork
