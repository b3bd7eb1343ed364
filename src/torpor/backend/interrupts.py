"""Deferring signals with Python handlers while state must not be left inconsistent.

Such a handler runs on the main thread between any two bytecodes, and may raise, as Ctrl-C does.
Blocking signals does not help: the kernel picks another thread, Python still uses the main one.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` converts handlers to enums: 10 times slower
import signal
import threading
from types import FrameType
from typing import Any, Final

_NAMES = ("SIGINT", "SIGTERM", "SIGHUP", "SIGQUIT", "SIGALRM", "SIGUSR1", "SIGUSR2", "SIGBREAK")
_NUMBERS: Final = tuple(int(getattr(signal, name)) for name in _NAMES if hasattr(signal, name))


class Shield:
    """Signals that arrive in the body are handled after it, or immediately while `open` is set.

    Does nothing on other threads than the main one, where handlers never run.
    """

    __slots__ = ("_before", "_received", "open")

    def __init__(self) -> None:
        self.open = False
        self._before: dict[int, Any] = {}  # handlers to restore
        self._received: list[int] = []

    def __enter__(self) -> Shield:
        if threading.get_ident() == threading.main_thread().ident:
            try:
                self._put_up()
            except BaseException:  # raised by a handler that was not replaced yet
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
                if _signal.getsignal(number) == self._receive:  # else it was replaced meanwhile
                    _signal.signal(number, handler)
                del self._before[number]
        except BaseException:  # raised by a handler that was restored already
            self._take_down()
            raise

    def __exit__(self, *_: object) -> None:
        self._take_down()
        received, self._received = self._received, []
        for number in received:
            _signal.raise_signal(number)
