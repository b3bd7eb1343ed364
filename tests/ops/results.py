"""What the sweep found out: failures, and one result per entry and mode."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Failure:
    op: str
    mode: str
    dtype: str
    sample: int
    variant: str
    where: str
    kind: str
    detail: str
    alone: bool | None = None
    """Whether it also fails when the variant is synced by itself (None: not tried)."""

    def __str__(self) -> str:
        place = f"{self.op} [{self.mode}] {self.dtype} sample {self.sample} {self.variant}"
        only = " (only when synced together with the other variants)" if self.alone is False else ""
        return f"{place}: {self.where} differs in {self.kind}: {self.detail}{only}"


@dataclass
class Result:
    """What the sweep found out about one entry in one mode."""

    op: str
    mode: str
    failures: list[Failure] = field(default_factory=list)
    fallbacks: dict[str, int] = field(default_factory=dict)
    """Ops run eagerly while recording, by name."""
    syncs: dict[str, int] = field(default_factory=dict)
    """Syncs by nature (`item`, `nonzero`, ...), by name."""
    noisy: list[str] = field(default_factory=list)
    """Places where eager disagrees with itself, and bounds the difference."""
    late: list[str] = field(default_factory=list)
    """Places where eager raises at once and lazy, rightly typed, only when read."""
    eager_faults: int = 0
    """Runs in which eager itself did not write a strided `out=` in place, and is no judge."""
    samples: int = 0
    runs: int = 0
    excluded: str | None = None

    @property
    def status(self) -> str:
        if self.excluded:
            return "excluded"
        if self.failures:
            return "failed"
        return "fell back" if self.fallbacks else "passed"

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "status": self.status}

    @staticmethod
    def from_json(record: dict[str, Any]) -> Result:
        fields = {k: v for k, v in record.items() if k != "status"}
        return Result(**{**fields, "failures": [Failure(**f) for f in fields["failures"]]})
