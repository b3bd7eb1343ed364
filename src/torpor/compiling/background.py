"""Compiling in the background: one thread that compiles, while steps run on the reference backend.

A compile that takes longer than `config.compile_timeout` is abandoned: its thread cannot be
stopped, but nobody waits for it, and the next compile gets a thread of its own.
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

TICK = 0.5  # seconds between two looks of the progress line
_POLL = 0.01  # seconds between two looks of a program that waits


class CompileJob:
    """Something to compile, and what came of it."""

    __slots__ = ("_error", "_result", "begun", "done", "label", "work")

    def __init__(self, label: str, work: Callable[[], Any]) -> None:
        self.label = label
        self.work = work
        self.begun = 0.0  # when it was begun
        self.done = threading.Event()
        self._result: Any = None
        self._error: BaseException | None = None

    def run(self) -> None:
        """Compile; errors are for whoever asks for the result."""
        self.begun = time.monotonic()
        try:
            with compiling_in_background():
                self._result = self.work()
        except BaseException as error:
            self._error = error
        self.done.set()

    def is_over(self) -> bool:
        """It has ended, or has taken too long."""
        if self.done.is_set():
            return True
        COMPILER.wake()
        if not self.begun or time.monotonic() - self.begun < config.compile_timeout:
            return False
        COMPILER.abandon(self)
        return True

    def result(self) -> Any:
        """What was compiled; the error, if that failed or took too long."""
        if not self.done.is_set():
            limit = config.compile_timeout
            raise CompileError(f"{self.label} took longer than {limit:g} s to compile; given up")
        if self._error is not None:
            raise self._error
        return self._result


class Compiler:
    """The thread that compiles, made when it is needed."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.jobs: queue.SimpleQueue[CompileJob | None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.current: CompileJob | None = None
        self.unfinished: list[CompileJob] = []

    def submit(self, label: str, work: Callable[[], Any]) -> CompileJob:
        """Compile after all that was submitted before."""
        job = CompileJob(label, work)
        with self.lock:
            self.unfinished.append(job)
            self.jobs.put(job)
        self.wake()
        return job

    def is_compiling(self) -> bool:
        """Something is being compiled, or waits for it; what takes too long does not count."""
        return any(not job.is_over() for job in list(self.unfinished))

    def wait_while_compiling(self) -> float:
        """Stand still until nothing is compiled any more, or it takes too long; the seconds."""
        start = time.perf_counter()
        while self.is_compiling():
            time.sleep(_POLL)
        return time.perf_counter() - start

    def wake(self) -> None:
        """See that there is a thread."""
        with self.lock:
            if self.thread is None or not self.thread.is_alive():
                self._start()

    def abandon(self, job: CompileJob) -> None:
        """Let the thread that is at `job` be; another one does the rest."""
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
        """Block until all that was submitted has been compiled."""
        self.submit("", lambda: None).done.wait()


class Progress:
    """A line on a terminal that says what is compiling, and since when."""

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
    """Threads do not survive a fork: the child compiles what it comes to need itself."""
    _torch.forget_inductor_threads()
    left = [job for job in COMPILER.unfinished if not job.done.is_set()]
    COMPILER.__init__()  # type: ignore[misc]  # as new
    for job in left:
        job.begun = 0.0
        COMPILER.unfinished.append(job)
        COMPILER.jobs.put(job)


os.register_at_fork(after_in_child=_begin_again)
