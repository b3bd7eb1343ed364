"""The page's data as plain JSON: a summary of the program, and one document per graph.

Both have the same form for a running process and for a record file. Strings are in a table and are
referred to by index; nodes and groups are rows. Nothing in it is code or markup.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Final, NamedTuple, Protocol

from torpor.backend.interface import Backend
from torpor.compiling.compilation import device_of, passes_of
from torpor.debug.facts import EventFact, GraphFacts, Scope
from torpor.debug.view.cost import flops, size, traffic
from torpor.debug.view.folding import Fold, fold
from torpor.debug.view.memory_profile import Lives, MemoryProfile, memory_of
from torpor.debug.view.steps import Step, steps
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.observe.memory import lifetimes
from torpor.passes import stages
from torpor.text.difference import SAME, difference
from torpor.text.printer import (
    argument_text,
    given_arguments,
    input_words,
    name_values,
    print_graph,
    type_text,
)

FORMAT: Final = "torpor view"
VERSION: Final = 1
_LONGEST_LIST: Final = 64  # the most operands of one argument to show


class Source(Protocol):
    """Where the page gets its data from."""

    def version(self) -> str:
        """A string that changes whenever the summary does."""
        ...

    def summary(self) -> Summary: ...

    def graph(self, number: int) -> GraphDocument | None:
        """The graph with that number; None if it is unknown or no longer kept."""
        ...

    def difference(self, before: int, after: int) -> str | None:
        """The first difference between two graphs, as text."""
        ...

    def passes(self, number: int) -> list[PassText] | None:
        """A graph after each pass; None if it is unknown or no longer kept."""
        ...


class PassText(NamedTuple):
    """A graph as text after a pass of a backend."""

    name: str
    description: str
    text: str | None  # None: unchanged


@dataclass
class GraphRow:
    """One graph in the list of graphs."""

    number: int
    name: str
    site: str
    nodes: int
    hits: int
    runs: int
    interpreted_runs: int
    compiled: bool
    compile_seconds: float
    run_seconds: float
    record_seconds: float
    failure: str
    why: str
    backend: str
    known: bool  # whether its nodes can be shown

    @staticmethod
    def of(number: int, facts: GraphFacts, nodes: int, known: bool) -> GraphRow:
        return GraphRow(
            number,
            facts.name,
            facts.site,
            nodes,
            facts.hits,
            facts.runs,
            facts.interpreted_runs,
            facts.compiled,
            facts.compile_seconds,
            facts.run_seconds,
            facts.record_seconds,
            facts.failure,
            facts.why,
            facts.backend,
            known,
        )


@dataclass
class Summary:
    """The whole program."""

    title: str
    live: bool
    versions: dict[str, str]
    graphs: list[GraphRow] = field(default_factory=list)
    events: list[EventFact] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)

    @staticmethod
    def of(
        title: str,
        live: bool,
        versions: dict[str, str],
        graphs: list[GraphRow],
        events: Sequence[EventFact],
    ) -> Summary:
        """A summary with times that start at 0."""
        zero = min((event.start for event in events), default=0.0)
        moved = [
            EventFact(e.kind, e.start - zero, e.seconds, e.name, e.site, e.thread) for e in events
        ]
        return Summary(title, live, versions, graphs, moved, steps(moved))

    def to_json(self) -> dict[str, Any]:
        found = {"format": FORMAT, "version": VERSION, **asdict(self)}
        found["events"] = [
            [e.kind, _rounded(e.start), _rounded(e.seconds), e.name, e.site, e.thread]
            for e in self.events
        ]
        return found


def _rounded(seconds: float) -> float:
    return round(seconds, 7)


@dataclass
class GraphDocument:
    """One graph with all its nodes."""

    number: int
    name: str
    texts: list[str]
    nodes: list[list[int]]  # `NODE_FIELDS`; the first five are indices of texts
    operands: list[list[int]]  # node numbers; input i is -1 - i
    inputs: list[list[int]]  # name, type and origin: indices of texts; bytes
    outputs: list[int]  # node numbers; input i is -1 - i
    groups: list[list[int]]  # parent, kind and label: the latter two are indices of texts
    parents: list[int]  # the group of each node
    memory: MemoryProfile
    code: str

    def to_json(self) -> dict[str, Any]:
        found: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            **found,
            "memory": asdict(self.memory),
            "node_fields": NODE_FIELDS,
            "group_fields": GROUP_FIELDS,
        }


NODE_FIELDS: Final = (
    "op", "name", "call", "type", "line", "scope",
    "flops", "traffic", "bytes", "last_use", "alive",
)  # fmt: skip
GROUP_FIELDS: Final = ("parent", "kind", "label")


class _Texts:
    """A table of distinct strings."""

    def __init__(self) -> None:
        self.numbers: dict[str, int] = {}

    def __call__(self, text: str) -> int:
        return self.numbers.setdefault(text, len(self.numbers))


class _DocumentBuilder:
    """Builds the document of one graph."""

    def __init__(self, graph: Graph, scopes: Sequence[Scope | None]) -> None:
        self.graph = graph
        self.scopes = scopes if len(scopes) == len(graph.nodes) else [None] * len(graph.nodes)
        self.texts = _Texts()
        self.names = name_values(graph)
        self.place = {node: i for i, node in enumerate(graph.nodes)}
        self.input_place = {value: i for i, value in enumerate(dict.fromkeys(graph.inputs))}
        self.lives: Lives = lifetimes(graph)
        self.memory = memory_of(graph, self.lives)
        self.alive = self._alive()

    def build(self, number: int, name: str, code: str) -> GraphDocument:
        nodes = self.graph.nodes
        rows = [self._node(i, node) for i, node in enumerate(nodes)]
        groups, parents = self._groups()
        return GraphDocument(
            number,
            name,
            nodes=rows,
            operands=[[self._source(value) for value in node.operands] for node in nodes],
            inputs=self._inputs(),
            outputs=[self._source(value) for value in self.graph.outputs],
            groups=groups,
            parents=parents,
            memory=self.memory,
            code=code,
            texts=list(self.texts.numbers),
        )

    def _source(self, value: Value) -> int:
        place = self.input_place.get(value)
        return self.place[value.node] if place is None else -1 - place

    def _node(self, position: int, node: Node) -> list[int]:
        texts, scope = self.texts, self.scopes[position]
        made = [self.lives[v] for v in node.outputs if v in self.lives]
        return [
            texts(node.op.name),
            texts(", ".join(self.names[value] for value in node.outputs)),
            texts(self._call(node)),
            texts(", ".join(map(type_text, node.outputs))),
            texts("" if node.site is None else str(node.site)),
            texts("" if scope is None else ": ".join(filter(None, scope))),
            flops(node),
            traffic(node),
            sum(map(size, node.outputs)),
            max((last for _, _, last in made), default=-1),
            self.alive[position],
        ]

    def _call(self, node: Node) -> str:
        parts = []
        for given in given_arguments(node):
            text = argument_text(given.value, lambda v: self.names.get(v, "%?"), _LONGEST_LIST)
            parts.append(f"{given.name}={text}" if given.name and given.by_name else text)
        return ", ".join(parts)

    def _alive(self) -> list[int]:
        """Bytes alive at each node."""
        changes = [0] * (len(self.graph.nodes) + 2)
        for bytes_, first, last in self.lives.values():
            changes[first] += bytes_
            changes[last + 1] -= bytes_
        total, found = 0, []
        for change in changes:
            total += change
            found.append(total)
        return found

    def _inputs(self) -> list[list[int]]:
        words = input_words(self.graph)
        return [
            [
                self.texts(self.names[value]),
                self.texts(type_text(value)),
                self.texts(" ".join(map(str, words[value]))),
                size(value),
            ]
            for value in self.input_place
        ]

    def _groups(self) -> tuple[list[list[int]], list[int]]:
        """The tree of groups as rows, parents before children, and the group of each node."""
        lines = ["" if n.site is None else str(n.site) for n in self.graph.nodes]
        rows: list[list[int]] = []
        parents = [0] * len(lines)
        stack: list[tuple[int, Fold]] = [(-1, fold(self.graph, self.scopes, lines))]
        while stack:
            parent, group = stack.pop()
            number = len(rows)
            rows.append([parent, self.texts(group.kind), self.texts(group.label)])
            for item in reversed(group.items):
                if isinstance(item, Fold):
                    stack.append((number, item))
                else:
                    parents[item] = number
        return rows, parents


def graph_document(
    number: int, name: str, graph: Graph, scopes: Sequence[Scope | None], code: str = ""
) -> GraphDocument:
    """Everything the page shows of a graph."""
    return _DocumentBuilder(graph, scopes).build(number, name, code)


def pass_texts(graph: Graph, backend: Backend) -> list[PassText]:
    """`graph` as recorded, and after each pass of compiling it on `backend`."""
    found = [PassText("recorded", f"before the passes of {backend.name}", print_graph(graph))]
    try:
        for one, made in stages(passes_of(backend, device_of(graph, backend)), graph):
            text = None if made is graph else print_graph(made)
            found.append(PassText(one.name, one.description, text))
            graph = made
    except Exception as error:  # graphs that fail to compile are shown too
        found.append(PassText("failed", "the next pass raised an error", str(error)))
    return found


def difference_text(before: Graph, after: Graph) -> str:
    """The first difference between two graphs, as text."""
    found = difference(before, after)
    return "They are alike, node by node." if found.kind == SAME else str(found)
