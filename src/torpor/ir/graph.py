"""A graph: the nodes needed to compute given outputs from given inputs, in topological order."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from torpor.ir.node import LEAF, SCALAR, SIZE, Node, Value, size
from torpor.ir.types import SymbolicType
from torpor.symbols.expressions import Expr, Symbol

Donated = Mapping[Value, Value]
"""Inputs whose buffers may be donated, each mapped to the output that may be written into it."""

NOTHING_DONATED: Final[Donated] = MappingProxyType({})

COMPILED, EAGER, COMMIT = "compiled", "eager", "commit"


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive nodes of a graph, compiled as one unit or run op by op.

    `stage`: blocks with the same stage were a single block when the graph was scheduled.
    """

    kind: str  # COMPILED; EAGER: eager's kernels; COMMIT: compiled, after everything that may fail
    stage: int
    nodes: tuple[Node, ...]
    repeat: int | None = None  # blocks of one stage with the same number are copies of each other
    outputs: tuple[Value, ...] | None = None  # values used after the block; None: not known yet
    donated: Donated = field(default_factory=dict)  # graph inputs that this block overwrites

    @property
    def made(self) -> list[Value]:
        """All outputs of the block's nodes."""
        return [value for node in self.nodes for value in node.outputs]

    @property
    def read(self) -> list[Value]:
        """The values that the block uses but does not compute, in order of first use."""
        made = set(self.made)
        operands = dict.fromkeys([value for node in self.nodes for value in node.operands])
        return [value for value in operands if value not in made]

    def graph(self) -> Graph:
        """The block as a separate graph."""
        inputs = dict.fromkeys((*self.read, *self.donated))
        return Graph(tuple(inputs), self.nodes, self.outputs or (), donated=self.donated)


class Graph:
    """Nodes in topological order, with their inputs and outputs.

    Inputs are leaves, run-time scalars, and values that were computed earlier (`known` in `of`).
    Nodes are in post-order of the first output that needs them. Passes group them into `blocks`.
    """

    __slots__ = ("blocks", "donated", "inputs", "nodes", "outputs", "symbols", "types")

    def __init__(
        self,
        inputs: Sequence[Value],
        nodes: Sequence[Node],
        outputs: Sequence[Value],
        blocks: Sequence[Block] = (),
        donated: Donated = NOTHING_DONATED,
    ) -> None:
        self.blocks = tuple(blocks)
        self.donated = donated
        self.inputs = tuple(inputs)
        self.nodes = tuple(nodes)
        self.outputs = tuple(outputs)
        self.types = tuple([v.type for v in self.outputs])
        self.symbols: tuple[Symbol, ...] = tuple(  # symbols that are inputs
            [v.node.args[0] for v in self.inputs if v.node.op is SIZE]
        )

    @staticmethod
    def of(outputs: Iterable[Value], known: Collection[Value] = ()) -> Graph:
        """The graph that computes `outputs`; values in `known` become inputs."""
        outputs = tuple(outputs)
        inputs: dict[Value, None] = {}
        nodes: list[Node] = []
        done: set[Node] = set()
        for output in outputs:
            _visit(output, known, inputs, nodes, done)
        return Graph(tuple(inputs), nodes, outputs)

    def in_blocks(self, blocks: Sequence[Block]) -> Graph:
        """The same graph with its nodes grouped into these blocks."""
        nodes = [node for block in blocks for node in block.nodes]
        return Graph(self.inputs, nodes, self.outputs, blocks, self.donated)

    def in_order_of(self, nodes: Iterable[Node]) -> Graph:
        """The same graph with its nodes in the order they have in `nodes`."""
        needed = set(self.nodes)
        return Graph(self.inputs, [node for node in nodes if node in needed], self.outputs)

    def __len__(self) -> int:
        return len(self.nodes)

    def with_sizes(self) -> Graph:
        """The same graph with every symbol it uses appended to its inputs."""
        symbols = _symbols_in(self)
        if not symbols:
            return self
        return Graph((*self.inputs, *map(size, symbols)), self.nodes, self.outputs)


def _symbols_in(graph: Graph) -> list[Symbol]:
    """The symbols of a graph, in an order independent of the process's symbol numbering.

    First the symbols that are a size by themselves, in order of occurrence; then, sorted, the few
    that only occur inside larger expressions.
    """
    alone: dict[Symbol, None] = {}
    parts: set[Symbol] = set()
    for each in _expressions_in(graph):
        if len(each.symbols) == 1 and each is each.symbols[0].expr:
            alone[each.symbols[0]] = None
        else:
            parts.update(each.symbols)
    return [*alone, *sorted(parts - alone.keys())]


def _expressions_in(graph: Graph) -> Iterator[Expr]:
    for value in graph.inputs:
        yield from _expressions_of(value.type)
    for node in graph.nodes:
        yield from _expressions_among(node.args)
        for output in node.outputs:
            yield from _expressions_of(output.type)


def _expressions_of(type_: Any) -> Iterator[Expr]:
    if type(type_) is SymbolicType:
        yield from _expressions_among((*type_.sizes, *type_.steps, type_.at_offset_size))


def _expressions_among(items: tuple[Any, ...]) -> Iterator[Expr]:
    for item in items:
        if type(item) is Expr:
            yield item
        elif type(item) is tuple:
            yield from _expressions_among(item)


def _visit(
    output: Value,
    known: Collection[Value],
    inputs: dict[Value, None],
    nodes: list[Node],
    done: set[Node],
) -> None:
    """Append the nodes that `output` needs, operands first. Iterative: graphs are deep."""
    stack: list[tuple[Value, bool]] = [(output, False)]
    while stack:
        value, ready = stack.pop()
        node = value.node
        if ready:
            if node not in done:
                done.add(node)
                nodes.append(node)
        elif value in known or node.op is LEAF or node.op is SCALAR:
            inputs[value] = None
        elif node not in done:
            stack.append((value, True))
            stack.extend((operand, False) for operand in reversed(node.operands))
