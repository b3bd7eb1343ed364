"""Ctrl-C waits while parameters are written."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class uninterrupted:  # used as a function
    """A context in which SIGINT is kept, to be raised at its end; on other threads it never comes.

    A step whose first parameter has been written over is to write the others too.
    """

    __slots__ = ("_before", "_received")

    def __enter__(self) -> None:
        self._received: tuple[int, FrameType | None] | None = None
        self._before: Any = None
        if threading.current_thread() is threading.main_thread():
            self._before = signal.getsignal(signal.SIGINT)
            if callable(self._before):  # otherwise no exception comes of it
                signal.signal(signal.SIGINT, self._keep)

    def _keep(self, number: int, frame: FrameType | None) -> None:
        self._received = (number, frame)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if callable(self._before):
            signal.signal(signal.SIGINT, self._before)
            if self._received is not None:
                self._before(*self._received)
