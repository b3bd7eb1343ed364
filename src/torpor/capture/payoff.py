"""Whether capturing pays: what a capture takes against what recording op by op has taken.

What was recorded for some time is taken to be recorded as long again. What a capture takes grows
with the ops of a call, as recording it does: it is estimated from that.
"""

from __future__ import annotations

import sys
from typing import Final

from torpor import metrics
from torpor.execute.storage import TRACE

PRICE: Final = 500
"""A capture takes as long as so many recordings of the call."""

BACKWARD: Final = 2.0
"""Forward and backward together take so many times as long to record as forward."""

FOUND: Final = 0.15
"""The part of recording that is left where a call is found by one look-up."""

_IMPORTS: Final = 3.0
"""Seconds to import TorchDynamo."""

_LEAST: Final = 2.0
"""Seconds that a capture takes, however few the ops; one, if the core is idle."""


class RecordingCost:
    """What recording the calls of one module has taken, and takes."""

    __slots__ = ("calls", "full", "misses", "seconds")

    def __init__(self) -> None:
        self.seconds = 0.0  # of calls that met no new node, which capturing would have saved
        self.calls = 0  # of those
        self.misses = 0
        self.full = 0.0

    def begin(self) -> None:
        """A call begins."""
        self.misses = TRACE.misses

    def end(self, seconds: float, has_gradients: bool) -> None:
        """It has been recorded.

        While the device's queue was full the program would have waited in any case.
        """
        full = metrics.timed("QueueFull")
        hidden, self.full = max(0.0, full - self.full), full
        if TRACE.misses <= self.misses:
            whole = seconds * (BACKWARD if has_gradients else 1.0)
            self.calls += 1
            self.seconds += max(0.0, whole - hidden)

    @property
    def usual(self) -> float:
        """Seconds that one call takes to record, backward included."""
        return self.seconds / self.calls if self.calls else 0.0

    @property
    def price(self) -> float:
        """Seconds that capturing it may well take."""
        loaded = "torch._dynamo.convert_frame" in sys.modules
        return PRICE * self.usual + _LEAST + (0.0 if loaded else _IMPORTS)

    def pays(self) -> bool:
        """It has been recorded for as long as capturing it takes."""
        return bool(self.calls) and (1.0 - FOUND) * self.seconds > self.price

    def forget(self) -> None:
        """Begin anew."""
        self.seconds, self.calls = 0.0, 0
