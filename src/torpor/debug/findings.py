"""Findings of `explain`: one thing that costs time, with its line, count, seconds and advice."""

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
    over: bool = False  # it cost time in the past, but no longer
    branch: str = ""  # the line of a branch on a tensor shortly before

    @property
    def rank(self) -> tuple[bool, float]:
        """The sort key: ongoing ones first, then by cost."""
        return self.over, -self.seconds
