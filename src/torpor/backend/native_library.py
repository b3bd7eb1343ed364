"""The native library, for backends: whoever loads it puts it here (`native/attach.py`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Native:
    """Whether there is a native library, and which."""

    __slots__ = ("_on_load", "at_cut", "library", "refused")

    def __init__(self) -> None:
        self.library: Any = None  # its functions
        self.refused = ""  # why a library that is there is not used
        self.at_cut: Callable[[], None] | None = None  # looks for one that is being built
        self._on_load: list[Callable[[], None]] = []

    def load(self, library: Any) -> None:
        """Use `library` from now on."""
        self.library, self.at_cut = library, None
        for act in self._on_load:
            act()

    def on_load(self, act: Callable[[], None]) -> None:
        """Call `act` when there is a library."""
        self._on_load.append(act)

    def forget_choices(self) -> None:
        """Other devices are behind `lazy` than before: other kernels may be chosen there."""
        if self.library is not None:
            self.library.forget_choices()


NATIVE = Native()
