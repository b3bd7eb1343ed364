"""Captured regions: the part of `torpor.explain()` on what was captured, and what was not."""

from __future__ import annotations

from dataclasses import dataclass

from torpor import metrics


@dataclass(frozen=True, slots=True)
class RegionLine:
    """Graphs captured at one line, or the reason why none was."""

    line: str
    graphs: int  # forward and backward, over all captures
    lookups: int = 0  # cache hits
    misses: int = 0  # cache misses, recorded op by op
    seconds: float = 0.0  # spent on those
    why_not: str = ""

    def __str__(self) -> str:
        if self.why_not:
            return f"{self.line}: not captured: {self.why_not}"
        recorded = f"{self.misses} recorded in {self.seconds * 1e3:.1f} ms"
        return f"{self.line}: {self.graphs} graphs, {self.lookups} calls found, {recorded}"


def regions() -> list[RegionLine]:
    """All lines that were captured, then those that could not be."""
    found, missed = metrics.lines("RegionLookups"), metrics.lines("RegionMisses")
    seconds = metrics.line_seconds("RegionMisses")
    captured = [
        RegionLine(line, graphs, found.get(line, 0), missed.get(line, 0), seconds.get(line, 0.0))
        for line, graphs in metrics.lines("CapturedRegions").items()
    ]
    return captured + [_refused(text) for text in metrics.lines("NotCaptured")]


def _refused(text: str) -> RegionLine:
    line, _, reason = text.rpartition(": ")
    return RegionLine(line or "later calls", 0, why_not=reason)
