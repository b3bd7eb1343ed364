"""Whether this thread compiles: for a step that waits for it, or while the program goes on."""

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
    """On this thread the body compiles while the program records and draws."""
    before, _thread.inside = _thread.inside, True
    try:
        yield
    finally:
        _thread.inside = before


def on_compile_thread() -> bool:
    """The program goes on meanwhile: what it uses too, as its generators, must be left alone."""
    return _thread.inside


def mark_as_waited_for() -> None:
    """A step waits for what this thread compiles."""
    _thread.is_waited_for = True


def is_waited_for() -> bool:
    """A step waits for this thread, so it must not wait for a step."""
    return _thread.is_waited_for
