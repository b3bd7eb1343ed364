"""Whether this thread is compiling: in the background, or while a step waits for it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _CompileThread(threading.local):
    inside = False
    is_waited_for = False


_thread = _CompileThread()


@contextmanager
def compiling_in_background() -> Iterator[None]:
    """In the body, this thread compiles in the background, while the program records and draws."""
    before, _thread.inside = _thread.inside, True
    try:
        yield
    finally:
        _thread.inside = before


def on_compile_thread() -> bool:
    """Whether this thread compiles in the background, where shared state is off limits."""
    return _thread.inside


def mark_as_waited_for() -> None:
    """Mark this thread as one whose compilation a step waits for."""
    _thread.is_waited_for = True


def is_waited_for() -> bool:
    """Whether a step waits for this thread, which then must not wait for a step."""
    return _thread.is_waited_for
