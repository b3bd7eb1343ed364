"""Counts this rank's collectives, and the time it waited in them."""

from __future__ import annotations

from typing import Final

from torpor import metrics
from torpor.distributed.ops import Attend
from torpor.observe.events import EVENTS, Event

COLLECTIVE: Final = "collective"
"""The kind of event from the launch of a collective to its end."""
AWAIT: Final = "await"
"""The kind of event for the part of it in which this rank waited."""


class OpTraffic:
    """All collectives of one kind in one group."""

    __slots__ = ("bytes", "count", "waited")

    def __init__(self) -> None:
        self.count = 0
        self.bytes = 0  # contributed by this rank
        self.waited = 0.0  # seconds blocked


TRAFFIC: Final[dict[str, dict[str, OpTraffic]]] = {}
"""By group, then by kind."""
metrics.on_reset(TRAFFIC.clear)


def _note(group: str, op: str, nbytes: int, begun: float, since: float) -> None:
    """Record a collective that was launched at `begun` and waited for since `since`."""
    wait = Event(AWAIT, since, op)
    found = TRAFFIC.setdefault(group, {}).setdefault(op, OpTraffic())
    found.count += 1
    found.bytes += nbytes
    found.waited += wait.seconds
    text = f"{op}, {nbytes:,} bytes, waited {wait.seconds * 1e3:.2f} ms"
    EVENTS.extend((Event(COLLECTIVE, begun, text), wait))


Attend.done = staticmethod(_note)


def totals(group: str) -> tuple[int, int, float]:
    """Collectives of a group, bytes contributed, and seconds waited."""
    found = list(TRAFFIC.get(group, {}).values())
    return sum(t.count for t in found), sum(t.bytes for t in found), sum(t.waited for t in found)
