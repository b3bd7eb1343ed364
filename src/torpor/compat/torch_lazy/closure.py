"""Closures that run after `mark_step`, when the tensors they use have been submitted.

Unlike those of `torpor.at_step_end`, which run after every cut, these wait for `mark_step` itself.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

from torpor.compat.torch_lazy.device_context import DeviceContext, get_device_context

Closure = Callable[[], Any]


class ClosureHandler:
    """Runs closures one after the other, synchronously."""

    def __init__(self) -> None:
        pass

    def run(self, closure: Closure) -> None:
        """Run one closure."""
        closure()

    def __call__(self, closures: Iterable[Closure]) -> None:
        for closure in closures:
            self.run(closure)


class AsyncClosureHandler(ClosureHandler):
    """Runs closures one after the other on its own thread.

    `run` blocks while `max_queue_size` closures are waiting (the environment variable
    `LTC_MAX_ASYNC_QUEUE` overrides it). If a closure raises, the thread ends; the next `run`
    raises, and the one after resumes with the remaining closures. The thread is not a daemon, so
    that the process does not exit before all closures have run.
    """

    def __init__(self, max_queue_size: int = 100) -> None:
        super().__init__()
        self._limit = int(os.environ.get("LTC_MAX_ASYNC_QUEUE", max_queue_size))
        self._waiting: deque[Closure] = deque()
        self._changed = threading.Condition(threading.RLock())
        self._error: BaseException | None = None
        self._thread: threading.Thread | None = None

    def start_event_loop(self) -> None:
        """Start the thread if it is not running."""
        with self._changed:
            if self._thread is None:
                self._thread = threading.Thread(target=self._work, name="torpor-step-closures")
                self._thread.start()

    def run(self, closure: Closure) -> None:
        """Queue one closure."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or len(self._waiting) < self._limit)
            error, self._error = self._error, None
            if error is not None:
                raise RuntimeError(
                    "Cannot run asynchronous closure due to previously raised exception"
                ) from error
            self._waiting.append(closure)
            self.start_event_loop()

    def _work(self) -> None:
        while True:
            with self._changed:
                if not self._waiting:
                    self._thread = None
                    return
                closure = self._waiting.popleft()
                self._changed.notify_all()
            try:
                closure()
            except Exception as error:
                with self._changed:
                    self._error, self._thread = error, None
                    self._changed.notify_all()
                return


def add_step_closure(
    closure: Callable[..., Any], args: tuple[Any, ...] = (), run_async: bool = False
) -> None:
    """Call `closure(*args)` after the next `mark_step`, in the order of these calls.

    An asynchronous one does not block the program.
    """
    context = get_device_context()
    closures = context.async_step_closures if run_async else context.step_closures
    closures.append(lambda: closure(*args))


def run_step_closures() -> DeviceContext:
    """Run the closures added since the last time: asynchronous ones start first."""
    context = get_device_context()
    background, context.async_step_closures = context.async_step_closures, []
    if background:
        if context.async_closure_handler is None:
            context.async_closure_handler = AsyncClosureHandler()
        context.async_closure_handler(background)
    closures, context.step_closures = context.step_closures, []
    if closures:
        if context.closure_handler is None:
            context.closure_handler = ClosureHandler()
        context.closure_handler(closures)
    return context
