"""Functions to call at the end of a step, when its graphs are in flight or done."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable
from typing import Any

_pending: list[tuple[Callable[..., Any], tuple[Any, ...], bool]] = []
_lock = threading.Lock()


class _Worker:
    """Runs asynchronous closures in order, on its own thread."""

    def __init__(self) -> None:
        self.jobs: queue.Queue[tuple[Callable[..., Any], tuple[Any, ...]]] = queue.Queue()
        self.thread: threading.Thread | None = None
        self.error: BaseException | None = None

    def submit(self, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
        if self.thread is None or not self.thread.is_alive():
            self.thread = threading.Thread(target=self._work, name="torpor-closures", daemon=True)
            self.thread.start()
        self.jobs.put((function, args))

    def _work(self) -> None:
        while True:
            function, args = self.jobs.get()
            try:
                function(*args)
            except BaseException as error:  # raised at the end of the next step
                self.error = self.error or error
            finally:
                del function, args
                self.jobs.task_done()

    def raise_error(self) -> None:
        error, self.error = self.error, None
        if error is not None:
            raise error


_worker = _Worker()


def _as_new() -> None:
    _worker.__init__()  # type: ignore[misc]  # threads do not survive a fork


os.register_at_fork(after_in_child=_as_new)


def at_step_end(fn: Callable[..., Any], *args: Any, run_async: bool = False) -> None:
    """Call `fn(*args)` after the next cut; with `run_async`, on another thread.

    An error in an asynchronous closure is raised at the end of the next step.
    """
    if not callable(fn):
        raise TypeError(f"expected a function to call, got {type(fn).__name__}")
    with _lock:
        _pending.append((fn, args, run_async))


def run() -> None:
    """Run the registered closures, in order of registration."""
    if not _pending and _worker.error is None:
        return
    _worker.raise_error()
    with _lock:
        todo = list(_pending)
        _pending.clear()
    for function, args, run_async in todo:
        if run_async:
            _worker.submit(function, args)
        else:
            function(*args)


def wait() -> None:
    """Block until every asynchronous closure has run."""
    if _worker.thread is not None:
        _worker.jobs.join()
    _worker.raise_error()
