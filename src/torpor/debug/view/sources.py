"""The two places that the page shows: this process while it runs, and a record file."""

from __future__ import annotations

import os
import sys
from collections import OrderedDict
from collections.abc import Collection
from pathlib import Path
from typing import Final

from torpor.debug.facts import Facts, GraphFacts, code_of, events_since, facts_of, read_facts
from torpor.debug.load import open_record
from torpor.debug.record import versions
from torpor.debug.view.model import (
    GraphDocument,
    GraphRow,
    Summary,
    difference_text,
    graph_document,
)
from torpor.execute.plan import Plan
from torpor.execute.storage import TRACE
from torpor.execute.sync import PLANS
from torpor.ir.graph import Graph
from torpor.observe.events import EVENTS
from torpor.observe.history import HISTORY, GraphRecord

_KEPT: Final = 8  # documents of graphs that are kept


class LiveSource:
    """This process."""

    def __init__(self) -> None:
        self.versions = versions()
        self._documents: OrderedDict[tuple[int, bool], GraphDocument] = OrderedDict()

    def version(self) -> str:
        events = list(EVENTS)  # in one go: the program goes on
        return f"{HISTORY.serial} {len(events)} {events[-1].start if events else 0.0}"

    def summary(self) -> Summary:
        with TRACE.lock:
            plans = self._plans()
        rows = [self._row(record, plans.get(record.serial)) for record in list(HISTORY.records)]
        return Summary.of(
            f"{program_name()} (process {os.getpid()})", True, self.versions, rows, events_since()
        )

    def _row(self, record: GraphRecord, plan: tuple[Plan, str] | None) -> GraphRow:
        facts = facts_of(record)
        facts.backend = "" if plan is None else plan[1]
        return GraphRow.of(record.serial, facts, record.size, record.graph is not None)

    def _plans(self) -> dict[int, tuple[Plan, str]]:
        """Plans and the names of their backends, by the numbers of their graphs."""
        return {plan.record.serial: (plan, key[0].name) for key, plan in PLANS.plans.items()}

    def graph(self, number: int) -> GraphDocument | None:
        record = next((r for r in list(HISTORY.records) if r.serial == number), None)
        graph = None if record is None else record.graph
        if record is None or graph is None:
            return None
        key = number, record.compiled
        found = self._documents.get(key)
        if found is None:
            with TRACE.lock:
                plan = self._plans().get(number)
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


def program_name() -> str:
    """The script that runs, or the package and its command; not known yet while `-m` finds it."""
    path = Path(sys.argv[0] if sys.argv else "")
    if path.name == "__main__.py":
        return " ".join([path.parent.name, *sys.argv[1:2]])
    return path.name or "python"


class FileSource:
    """A file that `torpor.record` wrote."""

    def __init__(self, path: str | os.PathLike[str], allow: Collection[str] = ()) -> None:
        with open_record(path, allow) as record:
            self.graphs: list[Graph] = record.graphs()
            facts = read_facts(record.reader, self.graphs)
            self.versions = record.versions
            runs = [(run.graph, run.backend) for run in record.runs]
        self.title = Path(path).name
        self.facts = facts if facts.graphs else _without_facts(self.graphs, runs)
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


def _without_facts(graphs: list[Graph], runs: list[tuple[int, str]]) -> Facts:
    """What an older file tells: which graphs ran how often."""
    found = [GraphFacts(f"graph{i}", compiled=True) for i in range(len(graphs))]
    for number, backend in runs:
        found[number].runs += 1
        found[number].hits = found[number].runs - 1
        found[number].backend = backend
    return Facts([], found)
