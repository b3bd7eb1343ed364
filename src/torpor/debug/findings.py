"""One thing that costs time: what, whose line, how often, how long, and what to do about it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that costs time."""

    cause: str  # a kind of `text.difference`, "branch on a tensor", "sync", "fallback", ...
    line: str  # the user's line to look at
    title: str  # one sentence
    advice: str  # what to change
    details: tuple[str, ...] = ()
    count: int = 1
    seconds: float = 0.0
    over: bool = False  # it cost time, and will not any more
    branch: str = ""  # the line of a branch on a tensor that came just before

    @property
    def rank(self) -> tuple[bool, float]:
        """What goes on comes before what is over; what cost more comes first."""
        return self.over, -self.seconds
