"""Stragglers: the part of `torpor.explain()` on collectives."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import median
from typing import Final

from torpor import _torch
from torpor.distributed.agreement import stream_of
from torpor.errors import TorporError
from torpor.observe.traffic import TRAFFIC

HELD_UP: Final = 0.05
"""The fraction of time for which others wait for a rank that counts as a straggler."""


@dataclass(frozen=True, slots=True)
class RankTraffic:
    """All collectives of one rank, as last reported by it."""

    rank: int
    count: int
    bytes: int
    waited: float  # seconds


@dataclass(frozen=True, slots=True)
class GroupTraffic:
    """Collectives of one process group."""

    group: str
    rank: int  # this process's rank in the group
    ops: tuple[tuple[str, int, int, float], ...]  # op, count, bytes, seconds of this rank
    ranks: tuple[RankTraffic, ...]
    straggler: int | None  # the rank that the others wait for

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"group {self.group}, rank {self.rank} of {len(self.ranks)}"
        for op, count, nbytes, waited in self.ops:
            yield f"  {count} x {op}: {nbytes / 2**20:.2f} MiB, waited {waited * 1e3:.1f} ms"
        for one in self.ranks if len(self.ranks) > 1 else ():
            held = ", and the others wait for it" if one.rank == self.straggler else ""
            yield f"  rank {one.rank}: {one.count} collectives, {one.waited * 1e3:.1f} ms{held}"


def straggler_of(ranks: tuple[RankTraffic, ...], seconds: float) -> int | None:
    """The rank that waits least, if others wait for it; `seconds` is the length of the run."""
    if len(ranks) < 2:
        return None
    least, *others = sorted(ranks, key=lambda one: one.waited)
    usual = median(one.waited for one in others)
    held_up = usual - least.waited
    return least.rank if usual > 2 * least.waited and held_up > HELD_UP * seconds else None


def traffic(seconds: float) -> tuple[GroupTraffic, ...]:
    """Traffic of each group in which this rank ran collectives, in a run of that length."""
    found = []
    for group, by_op in list(TRAFFIC.items()):
        ops = tuple((op, t.count, t.bytes, t.waited) for op, t in sorted(by_op.items()))
        rank, ranks = _ranks(group)
        found.append(GroupTraffic(group, rank, ops, ranks, straggler_of(ranks, seconds)))
    return tuple(found)


def _ranks(group: str) -> tuple[int, tuple[RankTraffic, ...]]:
    """This rank, and the last reports of all ranks; does not wait for any."""
    try:
        stream = stream_of(group) if _torch.is_distributed() else None
        known = {} if stream is None else stream.traffic_of_ranks()
    except (RuntimeError, TorporError):  # the group is gone
        stream, known = None, {}
    return (0 if stream is None else stream.rank), tuple(
        RankTraffic(r, *t) for r, t in known.items()
    )
