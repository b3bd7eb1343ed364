"""Cut blocks where sequences of nodes repeat, as in the layers of a network, to compile them once.

    compiled 0:                         compiled 0 repeat 0:
      %1 = aten.mm.default(%0, %0)        %1 = aten.mm.default(%0, %0)
      %2 = aten.sin.default(%1)           %2 = aten.sin.default(%1)
      %3 = aten.mm.default(%2, %2)      compiled 0 repeat 0:
      %4 = aten.sin.default(%3)           %3 = aten.mm.default(%2, %2)
                                          %4 = aten.sin.default(%3)

Nodes are compared by op, attributes and types, not by the values they use. If the same sequence
occurs several times in a row, in forward, backward or the optimizer, each copy becomes a block.
Which blocks are equal up to renaming of values, and so share compiled code, is decided later.

Items of split lists (`split-lists`) are first regrouped by item, so that an optimizer's work on one
layer repeats as the layer itself does.

The cost of a cut is weighed against what it saves, in seconds of compile time. Each node costs
compile time, and each block a fixed overhead. At run time a call of a block costs, and so does a
value that a cut forces through memory (once, however many cuts it crosses). The expected number of
runs of a graph is a guess.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from torpor.ir.graph import EAGER, Block, Graph
from torpor.ir.node import Node, Value, items_of
from torpor.ir.types import TensorType
from torpor.passes.pipeline import Pass
from torpor.passes.rewrite import is_view

NODE: Final = 0.03  # seconds to compile a node
BLOCK: Final = 0.4  # fixed seconds to compile a block, however small


@dataclass(frozen=True, slots=True)
class RunCosts:
    """Run-time costs of a graph."""

    runs: int  # expected runs of a graph
    call: float  # seconds to call a block
    byte: float  # seconds to write and reread a byte


COSTS: Final = {
    "cpu": RunCosts(10_000, 20e-6, 2 / 100e9),
    "cuda": RunCosts(50_000, 2e-6, 2 / 3e12),  # blocks are replayed in a CUDA graph
}

SEED: Final = 6  # equal consecutive nodes needed for a period to be considered
PERIODS: Final = 24  # how many periods are considered


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` consecutive copies of `length` nodes each, starting at `start`."""

    start: int
    length: int
    count: int
    saved: float  # seconds, net of costs

    @property
    def end(self) -> int:
        return self.start + self.length * self.count

    @property
    def borders(self) -> range:
        return range(self.start, self.end + 1, self.length)


def repeats(device: torch.device) -> Pass:
    """The pass, with the run-time costs of a device."""
    costs = COSTS.get(device.type, COSTS["cpu"])

    def run(graph: Graph) -> Graph:
        blocks = [part for block in graph.blocks for part in _parts(block, costs)]
        return graph.in_blocks(blocks) if len(blocks) > len(graph.blocks) else graph

    return Pass("repeats", "blocks cut where sequences of nodes repeat, to compile them once", run)


def _parts(block: Block, costs: RunCosts) -> list[Block]:
    """A block in parts, of which some are equal."""
    if block.kind == EAGER:
        return [block]
    nodes = waiting(items_together(block.nodes))
    found = find_repeats(_tokens(nodes), _lost(nodes, costs.byte), costs)
    if not found:
        return [block]
    nodes, found = _rest_together(nodes, found)
    borders = sorted({0, len(nodes), *(b for repeat in found for b in repeat.borders)})
    return [
        replace(
            block,
            nodes=tuple(nodes[a:b]),
            repeat=next((i for i, r in enumerate(found) if r.start <= a < r.end), None),
        )
        for a, b in itertools.pairwise(borders)
    ]


# -- the order of nodes ----------------------------------------------------------------------------


def items_together(nodes: Iterable[Node]) -> list[Node]:
    """The nodes reordered so that those of one list item are adjacent."""
    ordered: list[Node] = []
    strands = _Strands()
    for node in nodes:
        if items_of(node) is not None:
            strands.add(node)
            continue
        if not strands.made.keys().isdisjoint(node.operands):
            ordered += strands.taken()
        ordered.append(node)
    return ordered + strands.taken()


class _Strands:
    """Delayed items, grouped in strands: an item joins the strands of the items it reads."""

    def __init__(self) -> None:
        self.made: dict[Value, int] = {}  # value -> its strand, possibly merged since
        self.joined: list[int] = []  # strand -> itself, or the one it was merged into (union-find)
        self.nodes: list[list[Node]] = []

    def add(self, node: Node) -> None:
        found = {self._strand(self.made[v]) for v in node.operands if v in self.made}
        strand = min(found, default=len(self.nodes))
        if not found:
            self.joined.append(strand)
            self.nodes.append([])
        for other in found - {strand}:
            self.joined[other] = strand
            self.nodes[strand] += self.nodes[other]
            self.nodes[other] = []
        self.nodes[strand].append(node)
        self.made.update(dict.fromkeys(node.outputs, strand))

    def _strand(self, strand: int) -> int:
        while self.joined[strand] != strand:
            self.joined[strand] = strand = self.joined[self.joined[strand]]
        return strand

    def taken(self) -> list[Node]:
        """Remove all items: strand by strand, each in the order of the ops."""
        nodes = [node for strand in self.nodes for node in sorted(strand, key=_op_of)]
        self.__init__()  # type: ignore[misc]  # empty again
        return nodes


def _op_of(node: Node) -> int:
    items = items_of(node)
    assert items is not None, "only items wait"
    return items.op


def waiting(nodes: Sequence[Node]) -> list[Node]:
    """The nodes, with those computed only from inputs of the block moved to their first use.

    A dropout mask then lies in its layer, wherever it was recorded, and fuses with the layer.
    """
    makers: dict[Value, Node] = {}  # of delayed values
    known: set[Value] = set()  # values made and not delayed
    ordered: list[Node] = []

    def emit(node: Node) -> None:
        stack = [node]
        while stack:
            first = next((makers[v] for v in stack[-1].operands if v in makers), None)
            if first is not None:
                stack.append(first)
                continue
            ordered.append(stack.pop())
            for value in ordered[-1].outputs:
                makers.pop(value, None)

    for node in nodes:
        read = node.operands
        if items_of(node) is None and read and known.isdisjoint(read) and not _is_unfused(node):
            makers.update(dict.fromkeys(node.outputs, node))
        else:
            known.update(node.outputs)
            emit(node)
    for node in nodes:
        if any(value in makers for value in node.outputs):
            emit(node)
    return ordered


# -- repeats in a sequence of tokens ---------------------------------------------------------------


class Lost:
    """The run-time cost of cuts, in seconds per run.

    `values` are `(first, last, cost)`: a border from `first` to `last` forces that value through
    memory. Border n comes before node n.
    """

    def __init__(self, values: Iterable[tuple[int, int, float]], nodes: int) -> None:
        self.values = list(values)
        self.nodes = nodes
        self.at = functools.cache(self._at)

    def _at(self, length: int) -> list[float]:
        """The cost of each border, given another one `length` nodes before it (0: none)."""
        steps = [0.0] * (self.nodes + 2)
        for first, last, cost in self.values:
            steps[first] += cost
            steps[(min(last, first + length - 1) if length else last) + 1] -= cost
        return list(itertools.accumulate(steps))[: self.nodes + 1]

    def by(self, borders: range) -> float:
        """The total cost of equidistant borders."""
        return self.at(0)[borders.start] + sum(self.at(borders.step)[b] for b in borders[1:])


def find_repeats(tokens: Sequence[int], lost: Lost, costs: RunCosts) -> list[Repeat]:
    """Repeats worth cutting for, disjoint and in order."""
    stretches = [
        (start, end, period)
        for period in _periods(tokens)
        for start, end in _stretches(tokens, period)
    ]
    best_cut = functools.cache(functools.partial(_best_cut, lost=lost, costs=costs))
    found: list[Repeat] = []
    free = [(0, len(tokens))]
    while free:
        options = (
            best_cut(max(start, a), min(end, b), period)
            for start, end, period in stretches
            for a, b in free
            if _may_pay(min(end, b) - max(start, a), period)
        )
        best = max(options, key=lambda repeat: repeat.saved, default=None)
        if best is None or best.saved <= 0:
            break
        found.append(best)
        free = [
            part
            for a, b in free
            for part in ((a, min(b, best.start)), (max(a, best.end), b))
            if part[0] < part[1]
        ]
    return sorted(found, key=lambda repeat: repeat.start)


def _may_pay(length: int, period: int) -> bool:
    """Whether a stretch of that length can be worth a cut at all, ignoring lost fusion."""
    return length >= 2 * period and NODE * (length - period) > 2 * BLOCK


def _periods(tokens: Sequence[int]) -> list[int]:
    """The most frequent distances at which sequences recur."""
    seen: dict[tuple[int, ...], int] = {}
    votes: dict[int, int] = {}
    for place in range(len(tokens) - SEED + 1):
        seed = tuple(tokens[place : place + SEED])
        if seed in seen:
            distance = place - seen[seed]
            votes[distance] = votes.get(distance, 0) + 1
        seen[seed] = place
    return sorted(votes, key=lambda distance: -votes[distance])[:PERIODS]


def _stretches(tokens: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """The maximal stretches in which every token recurs after `period`, last copy included."""
    start = None
    for place in range(len(tokens) - period + 1):
        if place < len(tokens) - period and tokens[place] == tokens[place + period]:
            start = place if start is None else start
        elif start is not None:
            if _may_pay(place + period - start, period):
                yield start, place + period
            start = None


def _best_cut(start: int, end: int, period: int, lost: Lost, costs: RunCosts) -> Repeat:
    """The best way to cut a stretch of equal copies: the length of a part, and the start."""
    copies = (end - start) // period
    # part length x number of calls is constant: the sum of their costs is least near the root
    ideal = (costs.runs * costs.call / NODE * copies * period) ** 0.5 / period
    sizes = {min(max(size, 1), copies // 2) for size in (int(ideal), int(ideal) + 1)}
    options = (
        _cut_at(begin, end, size * period, lost, costs)
        for size in sizes
        for begin in range(start, start + period)
        if end - begin >= 2 * size * period
    )
    return max(options, key=lambda repeat: repeat.saved)


def _cut_at(start: int, end: int, length: int, lost: Lost, costs: RunCosts) -> Repeat:
    count = (end - start) // length
    borders = range(start, start + length * count + 1, length)
    spent = costs.runs * (costs.call * (count + 1) + lost.by(borders))
    saved = NODE * length * (count - 1) - 2 * BLOCK - spent
    return Repeat(start, length, count, saved)


def _rest_together(nodes: list[Node], found: list[Repeat]) -> tuple[list[Node], list[Repeat]]:
    """Move items after the last repeat to before the first one: saves a block."""
    if not _are_items(nodes[found[-1].start :]):
        return nodes, found
    first = next(r for r in found if _are_items(nodes[r.start :]))
    repeated, rest = nodes[first.start : found[-1].end], nodes[found[-1].end :]
    made = {value for node in repeated for value in node.outputs}
    if not all(made.isdisjoint(node.operands) for node in rest):
        return nodes, found
    moved = [replace(r, start=r.start + len(rest)) if r.start >= first.start else r for r in found]
    return [*nodes[: first.start], *rest, *repeated], moved


def _are_items(nodes: Sequence[Node]) -> bool:
    return all(items_of(node) is not None for node in nodes)


# -- what is compared ------------------------------------------------------------------------------


def _tokens(nodes: Sequence[Node]) -> list[int]:
    """A number per node, equal for the same op, attributes and types."""
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault(
            (node.op, _frozen(node.args), *(value.type for value in node.outputs)), len(numbers)
        )
        for node in nodes
    ]


def _frozen(arg: Any) -> Any:
    """An argument as a hashable key: values by type, numbers by type and exact bits."""
    kind = type(arg)
    if kind is Value:
        return (Value, arg.type)
    if kind is tuple:
        return tuple([_frozen(item) for item in arg])
    return (kind, repr(arg) if kind in (float, complex) else arg)


# -- what a cut costs ------------------------------------------------------------------------------

UNFUSED: Final = ("convolution", "linear", "scaled_dot", "attention", "rnn", "dropout_mask")
"""Substrings of the names of ops with library kernels, which compilers do not fuse with others."""


def _lost(nodes: Sequence[Node], byte: float) -> Lost:
    """The run-time cost of cuts, with `byte` seconds per byte written and reread.

    A cut costs where a value's producer and consumer would have been fused: no op with a library
    kernel lies between them. Views count as their base. A value computed from forward values but
    needed only in backward belongs to the backward kernel that reads it, not to forward's.
    """
    base: dict[Value, Value] = {}  # view -> its base
    level: dict[Value, int] = {}  # value -> number of library kernels before it
    made: dict[Value, int] = {}  # value -> position of its node, if that is fusible
    ops: list[tuple[int, list[Value], bool]] = []  # position, operands, whether unfusible
    for place, node in enumerate(nodes):
        sources = list(dict.fromkeys([base.get(value, value) for value in node.operands]))
        if is_view(node):
            base.update(dict.fromkeys(node.outputs, *sources))
            continue
        alone = _is_unfused(node)
        here = max((level.get(value, 0) for value in sources), default=0)
        level.update(dict.fromkeys(node.outputs, here + alone))
        ops.append((place, sources, alone))
        if not alone:
            made.update(dict.fromkeys(node.outputs, place))
    needed: dict[Value, int] = {}  # value -> lowest level at which it is needed
    joining: list[tuple[Value, int, int]] = []  # value, position and level of a read
    for place, sources, alone in reversed(ops):
        outputs = nodes[place].outputs
        then = min((needed.get(v, level[v]) for v in outputs), default=0) - alone
        for value in sources:
            needed[value] = min(needed.get(value, then), then)
            if not alone and value in made:
                joining.append((value, place, then))
    read: dict[Value, int] = {}  # value -> its last read that could have been fused with it
    for value, place, then in joining:
        if needed[value] == then:
            read.setdefault(value, place)
    costs = ((made[v] + 1, last, byte * _bytes(v.type)) for v, last in read.items())
    return Lost((cost for cost in costs if cost[2]), len(nodes))


def _is_unfused(node: Node) -> bool:
    name = node.op.target._opname
    return name.endswith("mm") or any(part in name for part in UNFUSED)


def _bytes(type_: Any) -> int:
    return type_.numel * type_.dtype.itemsize if isinstance(type_, TensorType) else 0
