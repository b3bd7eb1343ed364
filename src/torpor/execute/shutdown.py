"""The end of the process: queues run dry, then every backend is told."""

from __future__ import annotations

import atexit
import sys

from torpor.backend.registry import retire
from torpor.execute import closures
from torpor.execute.queue import queues


def _shut_down() -> None:
    """Let every queue finish; report an error that nobody has been told of."""
    closures.wait()
    for device_queue in queues():
        device_queue.stop()
        failure = device_queue.failure
        if failure is not None and not failure.told:
            text = f"torpor: a graph failed and nobody asked: {failure.error}"
            print(text, file=sys.stderr)  # noqa: T201  # no caller is left to raise to
    for backend in retire():
        try:
            backend.prepare_to_exit()
        except Exception as error:
            text = f"torpor: backend {backend.name!r} failed at exit: {error}"
            print(text, file=sys.stderr)  # noqa: T201  # no caller is left to raise to


atexit.register(_shut_down)
