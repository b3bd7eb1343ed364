"""The compile thread, which compiles in the background while steps run on the reference backend.

A compile that takes longer than `config.compile_timeout` is abandoned: its thread cannot be
stopped, but nothing waits for it, and the next compile gets a new thread.
"""

from __future__ import annotations

import os
import queue
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from torpor import _torch, config, metrics
from torpor.backend.compile_thread import compiling_in_background
from torpor.errors import CompileError

TICK = 0.5  # seconds between two updates of the progress line
_POLL = 0.01  # seconds between two checks by a program that waits


class CompileJob:
    """A compile, and its result."""

    __slots__ = ("_error", "_result", "begun", "done", "label", "work")

    def __init__(self, label: str, work: Callable[[], Any]) -> None:
        self.label = label
        self.work = work
        self.begun = 0.0  # start time; 0: not started
        self.done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Compile; an error is stored, for `result`."""
        self.begun = time.monotonic()
        try:
            with compiling_in_background():
                self._result = self.work()
        except BaseException as error:
            self._error = error
        self.done.set()

    def is_over(self) -> bool:
        """Whether it has ended or timed out."""
        if self.done.is_set():
            return True
        COMPILER.wake()
        if not self.begun or time.monotonic() - self.begun < config.compile_timeout:
            return False
        COMPILER.abandon(self)
        return True

    def result(self) -> Any:
        """The compiled object; raises if the compile failed or timed out."""
        if not self.done.is_set():
            limit = config.compile_timeout
            raise CompileError(f"{self.label} took longer than {limit:g} s to compile; given up")
        if self._error is not None:
            raise self._error
        return self._result


class Compiler:
    """The compile thread, started on first use."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.jobs: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.current: CompileJob | None = None
        self.unfinished: list[CompileJob] = []

    def submit(self, label: str, work: Callable[[], Any]) -> CompileJob:
        """Queue a compile, after those submitted before."""
        job = CompileJob(label, work)
        with self.lock:
            self.unfinished.append(job)
            self.jobs.put(job)
        self.wake()
        return job

    def is_compiling(self) -> bool:
        """Whether a compile is in flight or queued; abandoned ones do not count."""
        return any(not job.is_over() for job in list(self.unfinished))

    def wait_while_compiling(self) -> float:
        """Block until no compile is in flight, or they time out; returns the seconds waited."""
        start = time.perf_counter()
        while self.is_compiling():
            time.sleep(_POLL)
        return time.perf_counter() - start

    def wake(self) -> None:
        """Make sure that there is a thread."""
        with self.lock:
            if self.thread is None or not self.thread.is_alive():
                self._start()

    def abandon(self, job: CompileJob) -> None:
        """Leave `job` to its thread, and start another one for the rest."""
        with self.lock:
            if self.current is not job:
                return
            metrics.count("CompileAbandoned")
            left, self.jobs = self.jobs, queue.SimpleQueue()
            while not left.empty():
                self.jobs.put(left.get())
            left.put(None)
            self._start()

    def _start(self) -> None:
        self.current = None
        self.thread = threading.Thread(
            target=self._work, args=(self.jobs,), name="torpor-compiler", daemon=True
        )
        self.thread.start()

    def _work(self, jobs: queue.SimpleQueue[CompileJob | None]) -> None:
        while (job := jobs.get()) is not None:
            if jobs is self.jobs:
                self.current = job
            with Progress(job.label):
                job.run()
            with self.lock:
                if job in self.unfinished:
                    self.unfinished.remove(job)

    def wait(self) -> None:
        """Block until every submitted compile has ended."""
        self.submit("", lambda: None).done.wait()


class Progress:
    """A line on the terminal that says what is being compiled, and for how long."""

    def __init__(self, label: str) -> None:
        self.label = label
        self.over = threading.Event()
        self.thread: threading.Thread | None = None

    def __enter__(self) -> None:
        if self.label and config.progress and sys.stderr.isatty():
            self.thread = threading.Thread(target=self._tell, name="torpor-progress", daemon=True)
            self.thread.start()

    def __exit__(self, *error: object) -> None:
        self.over.set()
        if self.thread is not None:
            self.thread.join()

    def _tell(self) -> None:
        start = time.monotonic()
        while not self.over.wait(TICK):
            seconds = time.monotonic() - start
            _write(f"\r\033[2Ktorpor: compiling {self.label} in the background, {seconds:.0f} s")
        _write("\r\033[2K")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()


COMPILER = Compiler()


def _begin_again() -> None:
    """After a fork: restart the queued compiles, because threads do not survive in the child."""
    _torch.forget_inductor_threads()
    left = [job for job in COMPILER.unfinished if not job.done.is_set()]
    COMPILER.__init__()  # type: ignore[misc]  # as new
    for job in left:
        job.begun = 0.0
        COMPILER.unfinished.append(job)
        COMPILER.jobs.put(job)


os.register_at_fork(after_in_child=_begin_again)
