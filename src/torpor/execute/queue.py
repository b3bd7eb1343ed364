"""One first-in first-out queue per device, with its own thread.

Jobs are enqueued under the trace's lock, so they run in the order of cuts. A job is run by the
queue's thread or by the thread that submitted it, or, if neither would, by a thread that waits for
it. No thread waits for a queue while it holds the trace's lock.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torpor import _torch, config, metrics
from torpor.backend.compile_thread import is_waited_for
from torpor.backend.data import Done, Failure
from torpor.backend.device import BackendDevice
from torpor.backend.heap import retain_free_memory
from torpor.backend.interrupts import Shield
from torpor.errors import DivergenceError, RankError, StepError
from torpor.execute.storage import LOCK, unlocked
from torpor.observe.phases import PLANNING, RUNNING, WAITING, mark_as_background, phase
from torpor.transactions.jobs import Budget, Job


class DeviceQueue:
    """Runs jobs in the order of submission."""

    def __init__(self, device: BackendDevice) -> None:
        self.device = device
        if device.torch_device.type == "cpu":
            retain_free_memory()
        self.jobs: deque[Job] = deque()  # not started
        self.running: list[Job] = []  # nested, on one thread: a kernel that waits may run others
        self.runner = 0  # id of that thread
        self.changed = threading.Condition()
        self.waiting = 0  # threads waiting for the end of a job, or for their turn
        self.budget = Budget()
        self.failure: Failure | None = None  # the first that was not reported yet
        self.thread: threading.Thread | None = None
        self.stopping = False
        self._threads = 0  # torch's thread count on its thread; 0: the default of a new thread

    # -- submitting ----------------------------------------------------------------------------

    def submit(self, job: Job) -> None:
        """Run `job` after all jobs submitted before it."""
        with Shield() as shield:
            self.enqueue(job)
            self.serve(job, shield)

    def enqueue(self, job: Job) -> None:
        """Append `job`, without waiting. The caller must call `serve` next."""
        job.here = not job.is_ready() or self._runs_here(job, self.is_idle())
        job.submitted = time.perf_counter()
        job.done.finish = functools.partial(self.finish, job)
        with self.changed:
            self.jobs.append(job)
        if not job.here:
            self._leave_to_thread(job)

    def _runs_here(self, job: Job, alone: bool) -> bool:
        best = (job.short or job.awaited) and alone and self.device.torch_device.type == "cpu"
        if best or job.must_be_here or not config.async_queue:
            return True
        return _torch.is_profiler_on_this_thread()  # it does not see other threads

    def serve(self, job: Job, shield: Shield) -> None:
        """Run an enqueued job, or leave it to the queue's thread; wait if that has too much to do.

        An interrupt during the wait leaves the job on the queue, where it will be run.
        """
        try:
            if not job.is_ready():
                self._prepare(job, shield)
            if job.here:
                self._run_here(job, shield)
            elif self.runner != threading.get_ident() and self.budget.is_full():
                with unlocked(), _opened(shield):
                    self.budget.wait()
        finally:
            self.leave(job)

    def leave(self, job: Job) -> None:
        """Hand a job that this thread should have run, but did not, to the queue's thread."""
        if job.here and not job.done.is_set():
            self._leave_to_thread(job)

    def _prepare(self, job: Job, shield: Shield) -> None:
        try:
            with phase(PLANNING), unlocked(), _opened(shield):
                job.prepare()
        except BaseException as error:
            job.give_up(self, error)
            raise
        with self.changed:
            alone = not self.running and len(self.jobs) == 1
            self.changed.notify_all()
        if not self._runs_here(job, alone):
            self._leave_to_thread(job)

    def _leave_to_thread(self, job: Job) -> None:
        self.budget.take(job)
        with self.changed:
            if job.done.is_set():  # another thread has run it meanwhile
                self.budget.give_back(job)
                return
            job.here = False
            if self.thread is None or not (self.thread.is_alive() or self.stopping):
                self._start_thread()
            self.changed.notify_all()

    def _start_thread(self) -> None:
        name = f"torpor-{self.device}"
        self.thread = threading.Thread(target=self._work, name=name, daemon=True)
        self.thread.start()

    def _run_here(self, job: Job, shield: Shield) -> None:
        with phase(RUNNING), metrics.timer("ExecuteHere"), self._on_its_stream():
            self._finish(job, shield)
        failure = job.done.failure
        if failure is not None and not failure.reported and _is_for_this_thread(failure.error):
            failure.tell()

    def _on_its_stream(self) -> AbstractContextManager[Any]:
        """The stream of the queue's thread, regardless of the caller's current stream."""
        if self.device.type.physical != "cuda":
            return nullcontext()
        return torch.cuda.stream(torch.cuda.default_stream(self.device.ordinal))

    def withdraw(self, job: Job, error: BaseException) -> bool:
        """Remove a job, unless it has started; threads that wait for it get `error`."""
        with self.changed:
            if job not in self.jobs:
                return False
            self.jobs.remove(job)
            job.here = False
            Job.fail(job, error)
            job.done.failure.reported = True  # type: ignore[union-attr]  # it has failed
            self._ended(job)
        return True

    def borrow(self) -> Job | None:
        """Reserve the queue for a run on this thread; None unless the queue is idle."""
        with self.changed:
            if self.running or self.jobs:
                return None
            job = _Borrowed()
            self.running.append(job)
            self.runner = threading.get_ident()
        return job

    def give_back(self, job: Job) -> None:
        """End the reservation made by `borrow`."""
        with self.changed:
            self.running.remove(job)
            if not self.running:
                self.runner = 0
            job.done.set()
            if self.jobs or self.waiting:  # otherwise, do not wake the queue's thread
                self.changed.notify_all()

    # -- waiting -------------------------------------------------------------------------------

    def is_idle(self) -> bool:
        """Whether no job is running or queued."""
        return not self.jobs and not self.running

    def wait(self) -> None:
        """Block until every submitted job has run, except those that need this thread's job."""
        with self.changed:
            jobs = [*self.running, *self.jobs]
        if self.runner == threading.get_ident():
            self._run_inside(None, Shield())
            return
        for job in jobs:
            self.finish(job)

    def finish(self, job: Job) -> None:
        """Block until `job` has run; run it here if no other thread would."""
        if not job.done.is_set():
            with Shield() as shield:
                self._finish(job, shield)

    def _finish(self, job: Job, shield: Shield) -> None:
        if self.runner == threading.get_ident():
            self._run_inside(job, shield)
        while not job.done.is_set():
            turn = self._begin(self._is_ours)
            if turn is not None:
                self._execute(turn, shield)
            elif is_waited_for():
                raise StepError(_COMPILER)
            else:
                with phase(WAITING), unlocked(), _opened(shield):
                    self._wait_for_turn(job)

    def _wait_for_turn(self, job: Job) -> None:
        with self.changed:
            self.waiting += 1
            try:
                while not (
                    job.done.is_set() or (self.jobs and not self.running and self._is_ours())
                ):
                    self.changed.wait()
            finally:
                self.waiting -= 1

    def _is_ours(self) -> bool:
        """Whether the next job may be run by a waiting thread: it is not left to another thread."""
        job = self.jobs[0]
        if job.here:
            return not job.is_held_up()
        return self.thread is None or not self.thread.is_alive()

    def _begin(self, is_ours: Callable[[], bool]) -> Job | None:
        """Start the next job, if there is one and this thread may run it."""
        with self.changed:
            if self.running or not self.jobs or not is_ours():
                return None
            job = self.jobs.popleft()
            self.running.append(job)
            self.runner = threading.get_ident()
        return job

    def _run_inside(self, wanted: Job | None, shield: Shield) -> None:
        """Called from a kernel of the running job, which waits for `wanted`, or for all jobs.

        Runs all queued jobs up to it, except those that need results of the running job.
        """
        with self.changed:
            blocked = {job.done for job in self.running}
            waiting = list(self.jobs)
        if wanted is not None and wanted.done in blocked:
            raise StepError(_OWN_RESULT)
        for job in waiting:
            if job.needs(blocked):
                blocked.add(job.done)
                if job is wanted:
                    raise StepError(_OWN_RESULT)
                continue
            with self.changed:
                if job not in self.jobs:
                    continue
                self.jobs.remove(job)
                self.running.append(job)
            self._execute(job, shield)
            if job is wanted:
                return

    # -- running -------------------------------------------------------------------------------

    def stop(self) -> None:
        """Finish all submitted jobs and end the thread."""
        self.wait()
        self.end_thread()

    def end_thread(self) -> None:
        """End the thread; if jobs for it arrived meanwhile, start another."""
        thread = self.thread
        if thread is None or thread is threading.current_thread():
            return
        with self.changed:
            self.stopping = True
            self.changed.notify_all()
        thread.join()
        with self.changed:
            self.thread, self.stopping = None, False
            if any(not job.here for job in self.jobs):
                self._start_thread()

    def raise_error(self) -> None:
        """Raise the first error that was not reported yet."""
        failure, self.failure = self.failure, None
        if failure is not None and not failure.reported:
            failure.tell()

    def _work(self) -> None:
        mark_as_background()
        self._threads = 0
        torch.get_num_threads()  # initializes the thread; later, it would undo `set_num_threads`
        if self.device.type.physical == "cuda":
            torch.cuda.set_device(self.device.ordinal)  # the current device is per thread
        shield = Shield()
        while self._wait_for_work():
            job = self._begin(lambda: not self.jobs[0].here)
            if job is not None:
                self._execute(job, shield)
            del job  # an idle queue must not keep the last step's buffers alive

    def _wait_for_work(self) -> bool:
        """Wait; True if there is a job for the thread, False if it should end."""
        with self.changed:
            while self.running or not self.jobs or self.jobs[0].here:
                if self.stopping:
                    return False
                self.changed.wait()
        return True

    def _execute(self, job: Job, shield: Shield) -> None:
        """Run a job that `_begin` has given to this thread."""
        on_thread = threading.current_thread() is self.thread
        is_alone = len(self.running) == 1 and not self.jobs
        if job.threads > 1 and job.here and job.short and not on_thread and is_alone:
            self.end_thread()  # OpenMP workers sleep early while other threads' workers exist
        if self._threads != job.threads and on_thread:
            torch.set_num_threads(job.threads)  # it is a per-thread setting
            self._threads = job.threads
        metrics.add_time("QueueWait", time.perf_counter() - job.submitted)
        interrupt = self._run(job, shield)
        with self.changed:
            self.running.remove(job)
            if not self.running:
                self.runner = 0
            self._ended(job)
        if interrupt is not None:
            raise interrupt

    def _run(self, job: Job, shield: Shield) -> BaseException | None:
        """Run `job`; returns an interrupt that arrived after it had succeeded."""
        late: BaseException | None = None
        try:
            shield.open = not job.donates
            with metrics.timer("Execute"), _torch.as_on_another_thread():
                job.run()
            shield.open = False
        except BaseException as error:  # raised at the next sync, and where a result is read
            shield.open = False
            if job.succeeded:
                late = error
            else:
                job.fail(error)
        return late

    def _ended(self, job: Job) -> None:
        failure = job.done.failure
        if failure is not None and (self.failure is None or self.failure.reported):
            self.failure = failure
        job.run = _ran
        job.done.set()
        job.done.finish = None
        self.budget.give_back(job)
        job.kept, job.results, job.arguments = (), (), []  # waiting threads may still hold the job
        self.changed.notify_all()


def _is_for_this_thread(error: BaseException) -> bool:
    """Whether to raise now: Ctrl-C on this thread, or an error that all ranks raise together."""
    return not isinstance(error, Exception) or isinstance(error, (DivergenceError, RankError))


_OWN_RESULT = (
    "a kernel reads a result of its own step, or of one that waits for it: it would wait for "
    "itself. Give it the tensor as an argument, or end the step before it (torpor.sync())"
)

_COMPILER = (
    "a type rule or lowering waits for a step while a graph is compiled: that step may wait for "
    "the graph. Leave out torpor.sync(wait=True) and reads there"
)


class _Borrowed(Job):
    """A placeholder among the running jobs for a run by a thread that borrowed the queue."""

    __slots__ = ()

    def __init__(self) -> None:
        self.done = Done()
        self.arguments = []


class _opened:  # a class: faster than a generator
    """Signals are handled immediately in the body."""

    __slots__ = ("before", "shield")

    def __init__(self, shield: Shield) -> None:
        self.shield = shield

    def __enter__(self) -> None:
        self.before, self.shield.open = self.shield.open, True

    def __exit__(self, *error: object) -> None:
        self.shield.open = self.before


def _ran() -> None:
    """Replaces the closure of a job that has run, to free what it holds."""


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


# -- forks -----------------------------------------------------------------------------------------


def _before_fork() -> None:
    """Drain the queues, so that every result exists in the child, and take the trace's lock."""
    while True:
        for device_queue in queues():
            device_queue.wait()
        LOCK.acquire()
        if all(q.is_idle() or q.runner == threading.get_ident() for q in queues()):
            return
        LOCK.release()


def _in_child() -> None:
    _queues.clear()  # threads do not survive a fork; failures are reported by the parent
    LOCK.release()


os.register_at_fork(before=_before_fork, after_in_parent=LOCK.release, after_in_child=_in_child)
