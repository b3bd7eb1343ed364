"""Facts about a run of a program: timed events, and the statistics of each graph.

They come from the current process or from a record file, which stores them as JSON.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final

from torpor.backend.interface import Backend
from torpor.debug.file_format import Reader
from torpor.debug.plain_text import one_line, printable
from torpor.execute.plan import Plan
from torpor.ir.graph import Graph
from torpor.ir.node import Node
from torpor.observe.events import EVENTS
from torpor.observe.history import GraphRecord

Scope = tuple[str, str]  # forward, backward or optimizer, and the module's name

MAX_CODE: Final = 4 << 20
"""The most characters of generated code to store per graph."""

_LONGEST: Final = 1000  # of other texts in a file
_SEVERAL_LINES: Final = ("code", "failure", "why")
_MOST_EVENTS: Final = 100_000


@dataclass(frozen=True, slots=True)
class EventFact:
    """One event; `start` in seconds on its process's clock."""

    kind: str
    start: float
    seconds: float
    name: str = ""
    site: str = ""
    thread: int = 0  # threads are numbered by first occurrence


@dataclass(slots=True)
class GraphFacts:
    """Statistics of one graph."""

    name: str
    site: str = ""  # the line that cut or read
    hits: int = 0
    runs: int = 0
    compiled: bool = False
    compile_seconds: float = 0.0
    run_seconds: float = 0.0
    record_seconds: float = 0.0
    interpreted_runs: int = 0
    failure: str = ""
    why: str = ""  # how it differs from the most similar earlier graph
    backend: str = ""
    code: str = ""  # the backend's code
    scopes: list[Scope | None] = field(default_factory=list)  # of its nodes


@dataclass(slots=True)
class Facts:
    """All events and graphs, in order."""

    events: list[EventFact] = field(default_factory=list)
    graphs: list[GraphFacts] = field(default_factory=list)


# -- from this process -------------------------------------------------------------------------


def events_since(start: float = 0.0) -> list[EventFact]:
    """Events that ended after `start`, a reading of `time.perf_counter`, in order."""
    threads: dict[int, int] = {}
    found = [
        EventFact(
            e.kind, e.start, e.seconds, e.name, e.site, threads.setdefault(e.thread, len(threads))
        )
        for e in list(EVENTS)
        if e.start + e.seconds >= start
    ]
    return sorted(found, key=lambda event: event.start)


def clock() -> float:
    """A reading of the clock that events use."""
    return time.perf_counter()


def facts_of(record: GraphRecord) -> GraphFacts:
    """Statistics of a graph so far, without its code and scopes."""
    difference = record.difference
    return GraphFacts(
        record.name,
        record.site,
        record.hits,
        record.runs,
        record.compiled or record.loaded,
        record.compile_seconds,
        record.run_seconds,
        record.record_seconds,
        record.interpreted_runs,
        record.failure,
        "" if difference is None else str(difference),
    )


def facts_of_plan(plan: Plan, backend: Backend) -> GraphFacts:
    """Statistics of the graph of `plan`, which was made for `backend`."""
    facts = facts_of(plan.record)
    facts.backend, facts.code = backend.name, code_of(plan)
    facts.scopes = scopes_of(plan.graph.nodes)
    return facts


def code_of(plan: Plan) -> str:
    """The code of a graph, from the backend that runs it."""
    runner = plan.runner if isinstance(plan.runner, Backend) else plan.runner.reference
    try:
        return str(runner.computation_text(plan.computation))[:MAX_CODE]
    except Exception as error:  # a display must never make a step fail
        return f"{runner.name} cannot show its code: {type(error).__name__}: {error}"


def scopes_of(nodes: Sequence[Node]) -> list[Scope | None]:
    """The modules that recorded these nodes."""
    return [node.scope for node in nodes]


# -- record files ------------------------------------------------------------------------------


def to_json(facts: Facts) -> dict[str, Any]:
    """The facts as stored in record files."""
    events = [[getattr(e, f.name) for f in fields(EventFact)] for e in facts.events]
    return {"events": events, "graphs": [_graph_to_json(graph) for graph in facts.graphs]}


def _graph_to_json(graph: GraphFacts) -> dict[str, Any]:
    numbers: dict[Scope, int] = {}
    places = [None if s is None else numbers.setdefault(s, len(numbers)) for s in graph.scopes]
    return {**asdict(graph), "scopes": {"scopes": list(map(list, numbers)), "nodes": places}}


def read_facts(reader: Reader, graphs: Sequence[Graph]) -> Facts:
    """The facts in a file, with every field checked; empty if it has none."""
    if "facts" not in reader.manifest:
        return Facts()
    where = "facts"
    found = reader.json(reader.manifest["facts"], where)
    events = reader.list_of("events", found, where)
    entries = reader.list_of("graphs", found, where)
    if len(entries) != len(graphs) or len(events) > _MOST_EVENTS:
        reader.fail(f"{where}: {len(entries)} graphs and {len(events)} events")
    return Facts(
        [_read_event(reader, event, where) for event in events],
        [
            _read_graph(reader, entry, graph, f"{where}: graph {i}")
            for i, (entry, graph) in enumerate(zip(entries, graphs, strict=True))
        ],
    )


def _read_event(reader: Reader, event: Any, where: str) -> EventFact:
    kinds = [str, float, float, str, str, int]
    names = [f.name for f in fields(EventFact)]
    if not isinstance(event, list) or len(event) != len(kinds):
        reader.fail(f"{where}: an event has {len(kinds)} parts")
    values = dict(zip(names, event, strict=True))
    return EventFact(*(_checked(reader, n, k, values, where) for n, k in zip(names, kinds)))


def _read_graph(reader: Reader, entry: Any, graph: Graph, where: str) -> GraphFacts:
    empty = GraphFacts("")
    found = {
        f.name: _checked(reader, f.name, type(getattr(empty, f.name)), entry, where)
        for f in fields(GraphFacts)
        if f.name != "scopes"
    }
    return GraphFacts(**found, scopes=_read_scopes(reader, entry, graph, where))


def _checked(reader: Reader, name: str, kind: type, within: Any, where: str) -> Any:
    if kind is float and isinstance(within, dict) and type(within.get(name)) is int:
        within = {**within, name: float(min(within[name], 1 << 60))}
    found = reader.field(name, kind, within, where)
    if kind is str:
        text = found[: MAX_CODE if name == "code" else _LONGEST]
        return printable(text) if name in _SEVERAL_LINES else one_line(text)
    if kind in (int, float) and not 0 <= found < 1 << 60:
        reader.fail(f"{where}: {name!r} cannot be {found}")
    return found


def _read_scopes(reader: Reader, entry: Any, graph: Graph, where: str) -> list[Scope | None]:
    where = f"{where}: scopes"
    table = reader.field("scopes", dict, entry, where)
    known: list[Scope] = []
    for scope in reader.list_of("scopes", table, where):
        match scope:
            case [str(phase), str(path)]:
                known.append((one_line(phase[:_LONGEST]), one_line(path[:_LONGEST])))
            case _:
                reader.fail(f"{where}: a scope is two texts")
    places = reader.list_of("nodes", table, where)
    if len(places) != len(graph.nodes):
        reader.fail(f"{where}: {len(places)} for {len(graph.nodes)} nodes")
    return [None if p is None else known[reader.index(p, known, where)] for p in places]
