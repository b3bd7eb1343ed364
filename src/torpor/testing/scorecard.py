"""The kit's results for a backend: points held, and how each operator ran."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass, field
from typing import Any

import torch

import torpor

STATUSES = {
    "native": "run by the backend itself",
    "decomposed": "run by the backend as simpler ops (it counted decomposed::<op>)",
    "fallback": "run by eager's kernels (it counted fallback::<op>, or could not compile it)",
    "core": "never reached the backend: random, data-dependent, or nothing to compute",
    "wrong": "another result than eager's, or an error eager does not raise",
    "skipped": "eager has no samples of it here, or refuses them itself",
}


@dataclass(frozen=True)
class Point:
    """One point of the contract: held, broken or skipped."""

    section: str
    name: str
    outcome: str
    detail: str = ""
    doc: str = ""


@dataclass
class OpResult:
    """How one entry of torch's operator table ran: forward (`status`), and backward."""

    op: str
    status: str
    detail: str = ""
    fallbacks: list[str] = field(default_factory=list)
    backward_fallbacks: list[str] = field(default_factory=list)
    samples: int = 0

    @staticmethod
    def from_json(record: dict[str, Any]) -> OpResult:
        return OpResult(**record)


@dataclass
class Scorecard:
    """All points and all operators of one run."""

    backend: str
    device: str
    points: list[Point] = field(default_factory=list)
    ops: list[OpResult] = field(default_factory=list)

    def sections(self) -> dict[str, Counter[str]]:
        """Points held, broken and skipped, by section."""
        found: dict[str, Counter[str]] = {}
        for point in self.points:
            found.setdefault(point.section, Counter())[point.outcome] += 1
        return found

    def statuses(self) -> dict[str, int]:
        """The number of operators by status."""
        counts = Counter(result.status for result in self.ops)
        return {status: counts[status] for status in STATUSES}

    @staticmethod
    def falls_back_later(result: OpResult) -> bool:
        """Whether the forward runs natively, but the backward does not."""
        return result.status in ("native", "decomposed") and bool(result.backward_fallbacks)

    @property
    def broken(self) -> list[Point]:
        return [point for point in self.points if point.outcome == "broken"]

    @property
    def wrong(self) -> list[OpResult]:
        return [result for result in self.ops if result.status == "wrong"]

    @property
    def held(self) -> bool:
        """Whether the backend passed everything."""
        return not self.broken and not self.wrong

    def text(self) -> str:
        """The scorecard as a few lines of text."""
        rows = []
        for section, counts in self.sections().items():
            asked = counts["held"] + counts["broken"]
            skipped = f", {counts['skipped']} skipped" if counts["skipped"] else ""
            rows.append(f"{section:<12} {counts['held']} of {asked} points held{skipped}")
        if self.ops:
            counts_of_ops = self.statuses().items()
            counted = ", ".join(f"{number} {status}" for status, number in counts_of_ops if number)
            rows.append(f"{'operators':<12} {len(self.ops)} entries: {counted}")
            if late := sum(self.falls_back_later(result) for result in self.ops):
                rows.append(f"{'':<12} {late} of the native ones fall back in their backward")
        return "\n".join(rows) or "nothing was run"

    def to_json(self) -> dict[str, Any]:
        return {
            "backend": self.backend,
            "device": self.device,
            "torch": torch.__version__,
            "torpor": torpor.__version__,
            "held": self.held,
            "sections": {name: dict(counts) for name, counts in self.sections().items()},
            "operators": self.statuses(),
            "points": [asdict(point) for point in self.points],
            "ops": [asdict(result) for result in self.ops],
        }
