"""The end of the process: queues run dry, then every backend is shut down.

A graph that failed and that nobody asked for ends the process with status 1. Python has settled the
status when its exit handlers run, so the process is ended when all of them have: by an object that
goes when modules are taken down.
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
    """Ends the process with `status`, if there is one, when this module goes."""

    status = 0

    def __del__(self, exit=os._exit) -> None:  # type: ignore[no-untyped-def]  # a default: `os` may be gone
        if self.status:
            exit(self.status)


_LAST = _Status()


def _shut_down() -> None:
    """Let every queue finish; report an error that has not been reported yet."""
    if queues():
        gc.collect()  # finalizers may use lazy tensors now; torch aborts if they do so any later
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
