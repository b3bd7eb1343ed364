"""The end of the process: drain the queues, then shut down every backend.

If a graph failed and the error was never raised, the process exits with status 1. Python fixes the
status before it runs exit handlers, so the process is ended after all of them, by an object whose
finalizer runs when modules are torn down.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys

from torpor.backend.registry import retire
from torpor.execute.queue import queues
from torpor.transactions import closures


class _Status:
    """Ends the process with `status`, if nonzero, when this module is torn down."""

    status = 0

    def __del__(self, exit=os._exit) -> None:  # type: ignore[no-untyped-def]  # a default: `os` may be gone
        if self.status:
            exit(self.status)


_LAST = _Status()


def _shut_down() -> None:
    """Finish every queue; print errors that were never reported."""
    if queues():
        gc.collect()  # finalizers may still use lazy tensors now; later, torch would abort
    closures.wait()
    for device_queue in queues():
        device_queue.stop()
        failure = device_queue.failure
        if failure is not None and not failure.reported:
            _say(f"torpor: a graph failed and nobody asked: {failure.error}")
            _LAST.status = 1
    for backend in retire():
        try:
            backend.prepare_to_exit()
        except Exception as error:
            _say(f"torpor: backend {backend.name!r} failed at exit: {error}")


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # no caller is left to raise to


atexit.register(_shut_down)
