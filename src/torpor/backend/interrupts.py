"""Signals whose handlers are Python functions, held back while something must not be torn apart.

Such a handler runs on the main thread between any two bytecodes, and may raise: Ctrl-C does.
Blocking signals does not help: the kernel hands them to another thread, and Python to the main one.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` looks handlers up among enums: 10 times slower
import signal
import threading
from types import FrameType
from typing import Any, Final

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_NUMBERS: Final = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class Shield:
    """Signals that arrive in the body are handled after it; while `open` is set, at once.

    On other threads than the main one handlers never run, and there is nothing to do.
    """

    __slots__ = ("_before", "_received", "open")

    def __init__(self) -> None:
        self.open = False
        self._before: dict[int, Any] = {}  # handlers that are to be put back
        self._received: list[int] = []

    def __enter__(self) -> Shield:
        if threading.get_ident() == threading.main_thread().ident:
            try:
                self._put_up()
            except BaseException:  # of a handler that was not replaced yet
                self._take_down()
                raise
        return self

    def _put_up(self) -> None:
        for number in _NUMBERS:
            handler = _signal.getsignal(number)
            if callable(handler):
                self._before[number] = handler
                _signal.signal(number, self._receive)

    def _receive(self, number: int, frame: FrameType | None) -> None:
        if self.open:
            self._before[number](number, frame)
        else:
            self._received.append(number)

    def _take_down(self) -> None:
        try:
            while self._before:
                number, handler = next(iter(self._before.items()))
                if _signal.getsignal(number) == self._receive:  # or else it was replaced meanwhile
                    _signal.signal(number, handler)
                del self._before[number]
        except BaseException:  # of a handler that is in its place again
            self._take_down()
            raise

    def __exit__(self, *_: object) -> None:
        self._take_down()
        received, self._received = self._received, []
        for number in received:
            _signal.raise_signal(number)
