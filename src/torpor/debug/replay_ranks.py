"""Replays the record files of several ranks together in one process, one thread per rank.

Their collectives run on gloo, in groups of these threads, so that reductions are bit-identical to a
gloo run. Before anything runs, the ranks' sequences of collectives are compared.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torpor import _torch
from torpor.backend.interface import Backend
from torpor.debug.judge import run_graph
from torpor.debug.load import Record, RecordedRun
from torpor.debug.replay import (
    Advance,
    Replay,
    Replayed,
    as_recorded,
    backend_named,
    compared,
    failed,
    notes_on,
    prepared,
    recorded_backend,
    refuse_empty,
)
from torpor.distributed.agreement import Entry, divergence, entries_of
from torpor.distributed.ops import RUNNING, collectives_in, forget
from torpor.errors import DivergenceError, RecordFileError

SECONDS: Any = 60.0
"""How long one rank waits for the others."""


def replay_ranks(
    records: Sequence[Record], backend: str | None = None, advance: Advance | None = None
) -> list[Replay]:
    """Run what each rank recorded, all together, and compare with the recorded results."""
    ranks = _in_order(records)
    refuse_empty(ranks)
    _compare_sequences(ranks)
    reports = []
    for record in ranks:
        notes: list[str] = []
        name = backend or recorded_backend(record.runs, notes)
        notes += notes_on(record, record.runs, data=True)
        reports.append(Replay(str(record.reader.path), name, record.versions, notes))
    store = torch.distributed.HashStore()
    players = [
        _Player(record, report, backend_named(report.backend), store, advance)
        for record, report in zip(ranks, reports, strict=True)
    ]
    with as_recorded(ranks[0]):
        _play(players)
    return reports


def _in_order(records: Sequence[Record]) -> list[Record]:
    """The files by rank; raises if they are of different jobs, or some are missing."""
    by_rank: dict[int, Record] = {}
    for record in records:
        if record.rank is None or not record.has_data:
            raise _refused(record, "not a rank's record with data")
        if by_rank.setdefault(record.rank, record) is not record:
            raise _refused(record, f"another file is of rank {record.rank} too")
    for record in records:
        for name, members in record.groups.items():
            missing = [rank for rank in members if rank not in by_rank]
            if missing:
                raise _refused(record, f"group {name}: the file of rank {missing[0]} is missing")
    return [by_rank[rank] for rank in sorted(by_rank)]


def _refused(record: Record, why: str) -> RecordFileError:
    return RecordFileError(f"{record.reader.path}: {why}")


def _compare_sequences(records: Sequence[Record]) -> None:
    """Raise if ranks in one group ran different collectives."""
    first: dict[tuple[int, ...], tuple[int, list[Entry]]] = {}
    for record in records:
        sequences: dict[str, list[Entry]] = {}
        for run in record.runs:
            nodes = tuple(collectives_in(record.graph(run)))
            for name, entries in entries_of(nodes).items():
                sequences.setdefault(name, []).extend(entries)
        for name, entries in sequences.items():
            rank, theirs = first.setdefault(record.groups[name], (record.rank or 0, entries))
            compare(theirs, rank, entries, record.rank or 0)


def compare(theirs: list[Entry], first: int, mine: list[Entry], rank: int) -> None:
    """Raise at the first difference between two ranks' sequences of collectives."""
    nothing = ("nothing", "the end of its record")
    for place in range(max(len(theirs), len(mine))):
        a = theirs[place] if place < len(theirs) else nothing
        b = mine[place] if place < len(mine) else nothing
        if a[0] != b[0]:
            raise DivergenceError(divergence(place, (first, a), (rank, b)))


@dataclass(slots=True)
class _Player:
    """One rank: its file, and the thread that runs it."""

    record: Record
    report: Replay
    backend: Backend
    store: Any
    advance: Advance | None
    error: BaseException | None = None

    def play(self) -> None:
        """Run everything in the file."""
        try:
            torch.set_num_threads(self.record.settings["threads"])
            RUNNING.groups = self._groups()
            for run in self.record.runs:
                self.report.runs.append(self._replayed(run))
                if self.advance is not None:
                    self.advance(f"rank {self.record.rank}, run {run.number}")
        except BaseException as error:
            self.error = error
        finally:
            RUNNING.groups = None
            forget()

    def _groups(self) -> Mapping[str, Any]:
        rank = self.record.rank
        assert rank is not None, "it was asked for"
        return {
            name: _torch.gloo_group(
                torch.distributed.PrefixStore(repr(members), self.store),
                members.index(rank), len(members), SECONDS,
            )
            for name, members in sorted(self.record.groups.items(), key=lambda item: item[1])
        }  # fmt: skip

    def _replayed(self, run: RecordedRun) -> Replayed:
        graph, arguments = prepared(self.record, run, data=True)
        outputs = self.record.outputs(run, graph)
        try:
            results = run_graph(graph, arguments, self.backend, f"graph{run.number}")
        except Exception as error:
            return failed(run, graph, outputs, error)
        verdicts = compared(self.record, run, self.backend, results, outputs)
        return Replayed(run.number, graph, verdicts, results, 0.0, "the recorded results")


def _play(players: Sequence[_Player]) -> None:
    threads = [threading.Thread(target=player.play, daemon=True) for player in players]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for player in players:
        if player.error is not None:
            raise player.error
