"""The native library, for backends: whoever loads it puts it here (`trace/native.py`)."""

from __future__ import annotations

from typing import Any


class Native:
    """Whether there is a native library, and which."""

    __slots__ = ("library",)

    def __init__(self) -> None:
        self.library: Any = None  # its functions

    def forget_choices(self) -> None:
        """Other devices are behind `lazy` than before: other kernels may be chosen there."""
        if self.library is not None:
            self.library.forget_choices()


NATIVE = Native()
