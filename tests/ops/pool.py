"""Worker processes for the sweep: one entry at a time; a crash or hang costs that entry only."""

from __future__ import annotations

import multiprocessing
import os
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from tests.ops.results import Failure, Result
from tests.ops.sweep import check_entry, entries

Job = tuple[str, str]
"""An entry's name and a mode."""

_SPAWN = multiprocessing.get_context("spawn")


def sweep_in_processes(jobs: list[Job], workers: int, timeout: float) -> Iterator[Result]:
    """Results as they come, in no fixed order."""
    waiting = list(reversed(jobs))
    pool = [_Worker() for _ in range(min(workers, len(jobs)))]
    try:
        while waiting or any(w.job for w in pool):
            for worker in pool:
                if worker.job is None and waiting:
                    worker.give(waiting.pop())
            wait([w.link for w in pool if w.job], timeout=1)
            for worker in pool:
                result = worker.take(timeout)
                if result is not None:
                    yield result
    finally:
        for worker in pool:
            worker.stop()


class _Worker:
    def __init__(self) -> None:
        self.job: Job | None = None
        self.since = 0.0
        self._start()

    def _start(self) -> None:
        self.link, theirs = _SPAWN.Pipe()
        self.process: BaseProcess = _SPAWN.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def give(self, job: Job) -> None:
        self.job, self.since = job, time.monotonic()
        self.link.send(job)

    def take(self, timeout: float) -> Result | None:
        """The result, if there is one; a dead or stuck process is replaced and reported."""
        if self.job is None:
            return None
        if self.link.poll():
            try:
                record = self.link.recv()
            except EOFError:
                return self._lost("crash", f"the process died with {self._exit_code()}")
            self.job = None
            return Result.from_json(record)
        if time.monotonic() - self.since > timeout:
            return self._lost("timeout", f"no result after {timeout:.0f} s")
        return None

    def _exit_code(self) -> int | None:
        self.process.join(timeout=5)
        return self.process.exitcode

    def _lost(self, kind: str, detail: str) -> Result:
        assert self.job is not None
        op, mode = self.job
        self.stop()
        self.job = None
        self._start()
        return Result(op, mode, [Failure(op, mode, "?", -1, "?", "process", kind, detail)])

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.link.close()


def _serve(link: Connection) -> None:
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import torch

    torch.set_num_threads(1)
    while True:
        name, mode = link.recv()
        link.send(_checked(name, mode).to_json())


def _checked(name: str, mode: str) -> Result:
    try:
        return check_entry(entries()[name], mode)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
        return Result(name, mode, [Failure(name, mode, "?", -1, "?", "harness", "raises", text)])
