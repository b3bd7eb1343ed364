"""The end of the process: queues run dry, then the backend is told."""

from __future__ import annotations

import atexit
import sys

from torpor.backend.registry import get_backend, has_backend
from torpor.execute import closures
from torpor.execute.queue import queues


def _shut_down() -> None:
    """Let every queue finish; report an error that nobody has been told of."""
    closures.wait()
    for device_queue in queues():
        device_queue.stop()
        if device_queue.error is not None:
            text = f"torpor: a graph failed and nobody asked: {device_queue.error}"
            print(text, file=sys.stderr)  # noqa: T201  # no caller is left to raise to
    if has_backend():
        get_backend().prepare_to_exit()


atexit.register(_shut_down)
