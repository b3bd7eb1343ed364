"""Whether a backend compiles beside the program, on another thread, while that goes on."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class _Beside(threading.local):
    inside = False


_beside = _Beside()


@contextmanager
def compiling_beside() -> Iterator[None]:
    """On this thread the body compiles while the program records and draws."""
    before, _beside.inside = _beside.inside, True
    try:
        yield
    finally:
        _beside.inside = before


def is_beside() -> bool:
    """The program goes on meanwhile: what it uses too, as its generators, must be left alone."""
    return _beside.inside
