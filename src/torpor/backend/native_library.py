"""Access to the native library for lower layers; `native/attach.py` sets it when it is loaded."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Native:
    """The native library, if it is loaded."""

    __slots__ = ("_on_load", "at_cut", "entered", "library", "look", "refused")

    def __init__(self) -> None:
        self.library: Any = None  # its functions
        self.look: Callable[[], None] = lambda: None  # finds the library, or has it built
        self.refused = ""  # why a library that exists is not used
        self.at_cut: Callable[[], None] | None = None  # checks whether the background build is done
        # plain tensors copied for the call being recorded, by which thread in which epoch of the
        # trace, and their values
        self.entered: list[tuple[Any, tuple[int, int], Any]] = []
        self._on_load: list[Callable[[], None]] = []

    def once(self, tensor: Any, epoch: int, value_of: Callable[[Any], Any]) -> Any:
        """The value of a plain tensor: one for a call, since kernels may compare their operands."""
        here = threading.get_ident(), epoch
        for known, place, value in self.entered:
            if known is tensor and place == here:
                return value
        value = value_of(tensor)
        self.entered.append((tensor, here, value))
        return value

    def load(self, library: Any) -> None:
        """Use `library` from now on."""
        self.library, self.at_cut = library, None
        for act in self._on_load:
            act()

    def on_load(self, act: Callable[[], None]) -> None:
        """Call `act` when the library is loaded."""
        self._on_load.append(act)

    def forget_choices(self) -> None:
        """The devices behind `lazy` have changed, so other kernels may be selected."""
        if self.library is not None:
            self.library.forget_choices()


NATIVE = Native()
