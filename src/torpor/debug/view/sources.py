"""The two sources for the page: the current process, and a record file."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final

from torpor.backend.interface import Backend
from torpor.backend.registry import get_backend
from torpor.debug.facts import (
    EventFact,
    Facts,
    GraphFacts,
    code_of,
    events_since,
    facts_of,
    read_facts,
)
from torpor.debug.load import open_record
from torpor.debug.ranks import RankTraffic, straggler_of
from torpor.debug.record import versions
from torpor.debug.view.document import (
    GraphDocument,
    GraphRow,
    PassText,
    Summary,
    difference_text,
    graph_document,
    pass_texts,
)
from torpor.execute.plan import Plan
from torpor.execute.storage import TRACE
from torpor.execute.sync import PLANS
from torpor.ir.graph import Graph
from torpor.observe.events import EVENTS
from torpor.observe.history import HISTORY, GraphRecord
from torpor.observe.traffic import AWAIT, COLLECTIVE

_KEPT: Final = 8  # number of graph documents to cache


class LiveSource:
    """The current process."""

    def __init__(self) -> None:
        self.versions = versions()
        self._documents: OrderedDict[tuple[int, bool], GraphDocument] = OrderedDict()

    def version(self) -> str:
        events = list(EVENTS)  # atomic: the program is running
        return f"{HISTORY.serial} {len(events)} {events[-1].start if events else 0.0}"

    def summary(self) -> Summary:
        with TRACE.lock:
            plans = self._plans()
        rows = [self._row(record, plans.get(record.serial)) for record in list(HISTORY.records)]
        return Summary.of(
            f"{program_name()} (process {os.getpid()})", True, self.versions, rows, events_since()
        )

    def _row(self, record: GraphRecord, plan: tuple[Plan, Backend] | None) -> GraphRow:
        facts = facts_of(record)
        facts.backend = "" if plan is None else plan[1].name
        return GraphRow.of(record.serial, facts, record.size, record.graph is not None)

    def _plans(self) -> dict[int, tuple[Plan, Backend]]:
        """Plans and their backends, by graph number."""
        return {plan.record.serial: (plan, key[0]) for key, plan in PLANS.plans.items()}

    def _plan(self, number: int) -> tuple[Plan, Backend] | None:
        with TRACE.lock:
            return self._plans().get(number)

    def graph(self, number: int) -> GraphDocument | None:
        record = next((r for r in list(HISTORY.records) if r.serial == number), None)
        graph = None if record is None else record.graph
        if record is None or graph is None:
            return None
        key = number, record.compiled
        found = self._documents.get(key)
        if found is None:
            plan = self._plan(number)
            code = "" if plan is None else code_of(plan[0])
            scopes = [node.scope for node in graph.nodes]
            found = self._documents[key] = graph_document(number, record.name, graph, scopes, code)
            while len(self._documents) > _KEPT:
                self._documents.popitem(last=False)
        return found

    def difference(self, before: int, after: int) -> str | None:
        graphs = {record.serial: record.graph for record in list(HISTORY.records)}
        one, other = graphs.get(before), graphs.get(after)
        return None if one is None or other is None else difference_text(one, other)

    def passes(self, number: int) -> list[PassText] | None:
        graph = next((r.graph for r in list(HISTORY.records) if r.serial == number), None)
        plan = self._plan(number)
        backend = get_backend() if plan is None else plan[1]
        return None if graph is None else pass_texts(graph, backend)


def program_name() -> str:
    """The script, or the package and its command; not known yet while `-m` is resolving it."""
    path = Path(sys.argv[0] if sys.argv else "")
    if path.name == "__main__.py":
        return " ".join([path.parent.name, *sys.argv[1:2]])
    return path.name or "python"


class FileSource:
    """A file written by `torpor.record`, with the collectives of `others`, further ranks."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        allow: Collection[str] = (),
        others: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        with open_record(path, allow) as record:
            self.graphs: list[Graph] = record.graphs()
            facts = read_facts(record.reader, self.graphs)
            self.versions = record.versions
            runs = [(run.graph, run.backend) for run in record.runs]
        self.title = Path(path).name
        self.facts = facts if facts.graphs else _without_facts(self.graphs, runs)
        if others:
            events, waits = events_of_ranks([path, *others], allow)
            self.facts.events = sorted(self.facts.events + events, key=lambda event: event.start)
            self.title += f" and {len(others)} more: {waits}"
        self._documents: dict[int, GraphDocument] = {}

    def version(self) -> str:
        return "file"

    def summary(self) -> Summary:
        rows = [
            GraphRow.of(number, facts, len(graph), known=True)
            for number, (graph, facts) in enumerate(zip(self.graphs, self.facts.graphs))
        ]
        return Summary.of(self.title, False, self.versions, rows, self.facts.events)

    def graph(self, number: int) -> GraphDocument | None:
        if not 0 <= number < len(self.graphs):
            return None
        found = self._documents.get(number)
        if found is None:
            graph, facts = self.graphs[number], self.facts.graphs[number]
            found = graph_document(number, facts.name, graph, facts.scopes, facts.code)
            self._documents[number] = found
        return found

    def difference(self, before: int, after: int) -> str | None:
        numbers = range(len(self.graphs))
        if before not in numbers or after not in numbers:
            return None
        return difference_text(self.graphs[before], self.graphs[after])

    def passes(self, number: int) -> list[PassText] | None:
        """The passes of the active backend here; the file's own choice is never executed."""
        known = 0 <= number < len(self.graphs)
        return pass_texts(self.graphs[number], get_backend()) if known else None


def events_of_ranks(
    paths: Sequence[str | os.PathLike[str]], allow: Collection[str]
) -> tuple[list[EventFact], str]:
    """The collectives of each rank as events of a separate kind, and who was waited for.

    Ranks have different clocks, which are aligned at the end of the first collective.
    """
    found: list[EventFact] = []
    ranks: list[RankTraffic] = []
    zero: float | None = None
    for path in paths:
        with open_record(path, allow) as record:
            events = read_facts(record.reader, record.graphs()).events
            rank = len(ranks) if record.rank is None else record.rank
        own = [event for event in events if event.kind == COLLECTIVE]
        waited = sum(event.seconds for event in events if event.kind == AWAIT)
        ranks.append(RankTraffic(rank, len(own), 0, waited))
        end = own[0].start + own[0].seconds if own else 0.0
        zero = end if zero is None else zero
        found += [replace(e, kind=f"rank {rank}", start=e.start - end + zero) for e in own]
    seconds = max((event.start for event in found), default=0.0) - (zero or 0.0)
    late = straggler_of(tuple(ranks), seconds)
    waits = ", ".join(f"rank {one.rank} waited {one.waited * 1e3:.1f} ms" for one in ranks)
    return found, waits if late is None else f"{waits}; the others wait for rank {late}"


def _without_facts(graphs: list[Graph], runs: list[tuple[int, str]]) -> Facts:
    """What files of older versions contain: how often each graph ran."""
    found = [GraphFacts(f"graph{i}", compiled=True) for i in range(len(graphs))]
    for number, backend in runs:
        found[number].runs += 1
        found[number].hits = found[number].runs - 1
        found[number].backend = backend
    return Facts([], found)
