"""Finds the first difference between two graphs, with the user's lines.

    before                                 after
    %1 = aten.mul.Tensor(%0, 2)            %1 = aten.mul.Tensor(%0, 3)     ->  constant: 2 -> 3

Leaves are numbered by first use, so the highest-numbered leaf that a node depends on indicates how
late in its step the node was recorded. The first difference is the one with the lowest such number.
Nodes are matched by structure: op and operands, without types or attributes. Types are compared at
the leaves, where they originate, and attributes at matching nodes.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, SIZE, Node, Value
from torpor.ir.types import SymbolicType, TensorType

SAME = "same"  # the same graph: its plan was dropped in between
SHAPE = "shape"  # an input has another size
SIZES = "sizes"  # a changing size has become symbolic
DTYPE = "dtype"  # an input or a result has another dtype
LAYOUT = "layout"  # an input has other strides, or is on another device
MODULE = "module"  # an input that was always the same tensor is now one of another type
CONSTANT = "constant"  # a number, a size, a flag of an op
INDEX = "index"  # where a view starts or ends
PROMOTED = "promoted"  # a number has become a run-time input
LIST = "list"  # an op takes more tensors, or fewer
BRANCH = "branch"  # other ops
READ = "read"  # a tensor was read earlier in the step, so the graph starts later
OPEN = "open"  # the earlier graph's trace was never cut, and continues
RESULTS = "results"  # the same nodes, but other results are live
ORDER = "order"  # equal except for the order in which inputs were first used
UNKNOWN = "unknown"  # the earlier graph is no longer kept


@dataclass(frozen=True, slots=True)
class Difference:
    """The first difference between two graphs."""

    kind: str
    op: str = ""  # the op at which they differ
    argument: str = ""  # and its argument
    before: str = ""
    after: str = ""
    dim: int | None = None  # of the sizes that differ
    slot: int | None = None  # of the leaf
    line: str = ""  # the user's line in the later graph
    line_before: str = ""  # the line in the earlier graph, if different
    then: Difference | None = None  # a structural difference besides that of a leaf

    @property
    def sentence(self) -> str:
        """The difference as a sentence."""
        return _WORDS[self.kind].format_map(_Words(self))

    @property
    def lines(self) -> list[str]:
        """The difference, and further lines involved besides `line`."""
        lines = [self.sentence]
        if self.line_before:
            lines.append(f"before: {self.line_before}")
        if self.then is not None:
            then = self.then.lines
            lines += [f"then {then[0]}", f"at: {self.then.line}", *then[1:]]
        return lines

    def __str__(self) -> str:
        first, *others = self.lines
        return "\n  ".join([first, *([f"at: {self.line}"] if self.line else []), *others])


_TENSOR = "the tensor that enters as `{argument}` of {op}"
_WORDS = {
    SAME: "it is a graph that was compiled before and dropped since",
    SHAPE: f"{_TENSOR} has another shape: {{dims}}{{before}} -> {{after}}",
    SIZES: f"{_TENSOR} has sizes that change, run-time inputs now: {{before}} -> {{after}}",
    DTYPE: "another dtype: {tensor}{before} -> {after}",
    LAYOUT: f"{_TENSOR} lies otherwise in memory: {{before}} -> {{after}}",
    MODULE: f"{_TENSOR} was the same one in every step and is another now: {{before}} -> {{after}}",
    CONSTANT: "a constant changed: `{argument}` of {op}, {before} -> {after}",
    INDEX: "the index changed: `{argument}` of {op}, {before} -> {after}",
    PROMOTED: "a number that changes is a run-time input now: `{argument}` of {op}, was {before}",
    LIST: "{op} takes {after} tensors where it took {before}",
    BRANCH: "Python took another way: {exchange}",
    READ: "results that are read in the middle of the step: {before} before, {after} now",
    OPEN: "it begins with what an earlier read at this line computed: nothing ends the trace",
    RESULTS: "another tensor is held at the end of the step: {before} results -> {after}",
    ORDER: "the tensors of the step were used in another order",
    UNKNOWN: "the earlier graph of this line is no longer known",
}


class _Words(dict[str, str]):
    """The placeholders of a sentence about a difference."""

    def __init__(self, found: Difference) -> None:
        dims = "" if found.dim is None else f"dim {found.dim} of "
        tensor = f"`{found.argument}` of {found.op}, " if found.argument else f"{found.op}, "
        exchange = f"{found.before or 'nothing'} -> {found.after or 'nothing'}"
        super().__init__(
            op=found.op,
            argument=found.argument,
            before=found.before or "no cast",
            after=found.after or "no cast",
            dims=dims,
            tensor=tensor,
            exchange=exchange,
        )


MOST_NODES = 10_000
"""The most nodes outside a graph that are visited to find what its inputs were computed from."""


def difference(before: Graph, after: Graph, replaced: Collection[int] = ()) -> Difference:
    """The first difference; `replaced` are leaves that were the same tensor until now."""
    wholes = _whole(before), _whole(after)
    if wholes[0] is None or wholes[1] is None:
        return difference_of_parts(before, after)
    signatures: dict[tuple[Any, ...], int] = {}
    old = _ComparedGraph(before, wholes[0], _numbers_by_slot(wholes[0]), signatures)
    new = _ComparedGraph(after, wholes[1], _numbers_by_slot(wholes[1]), signatures)
    structure = _structure(old, new)
    if structure is not None and _same_ops(old.whole, new.whole):
        uses: Uses = {}
        by_use = [_numbers_by_use(whole, uses) for whole in (old.whole, new.whole)]
        alike = (
            _ComparedGraph(before, old.whole, by_use[0], signatures),
            _ComparedGraph(after, new.whole, by_use[1], signatures),
        )
        if _structure(*alike) is None:
            return _first(*alike, (), None) or Difference(ORDER)
    return _first(old, new, replaced, structure) or _ends(old, new)


def _same_ops(one: Graph, other: Graph) -> bool:
    """Whether they have the same ops equally often, so that only their order may differ."""
    if len(one) != len(other):
        return False
    return Counter(node.op.name for node in one.nodes) == Counter(n.op.name for n in other.nodes)


def difference_of_parts(before: Graph, after: Graph) -> Difference:
    """The first difference, ignoring what the graphs' inputs were computed from."""
    signatures: dict[tuple[Any, ...], int] = {}
    old = _ComparedGraph(before, before, _numbers_by_place(before), signatures)
    new = _ComparedGraph(after, after, _numbers_by_place(after), signatures)
    return _first(old, new, (), _structure(old, new)) or _ends(old, new)


def _whole(graph: Graph) -> Graph | None:
    """`graph` extended back to its leaves; None if that is too large."""
    stack = _computed(graph)
    if not stack:
        return graph
    seen = {value.node for value in stack}
    while stack:
        if len(seen) > MOST_NODES:
            return None
        operands = stack.pop().node.operands
        stack += [value for value in operands if value.node not in seen]
        seen.update(value.node for value in operands)
    return Graph.of(graph.outputs)


def _computed(graph: Graph) -> list[Value]:
    """The inputs of `graph` that were computed earlier."""
    return [v for v in graph.inputs if v.node.op is not LEAF and v.node.op is not SCALAR]


def _first(
    old: _ComparedGraph, new: _ComparedGraph, replaced: Collection[int], structure: Found | None
) -> Difference | None:
    """The first difference in leaves, attributes or structure."""
    leaf = _leaf(old, new, replaced, structure)
    if leaf is not None:
        return leaf
    attribute = _attribute(old, new)
    found = [place for place in (attribute, structure) if place is not None]
    return min(found, key=lambda place: place[0])[1] if found else None


Order = tuple[int, int]  # highest leaf number, position
Found = tuple[Order, Difference]
Uses = dict[tuple[Any, ...], int]
"""Uses of leaves -> their numbers."""


class _ComparedGraph:
    """A graph's nodes by structure, and approximately in recording order."""

    def __init__(
        self,
        graph: Graph,
        whole: Graph,
        number: dict[Value, int],
        signatures: dict[tuple[Any, ...], int],
    ) -> None:
        self.graph = graph
        self.whole = whole  # the graph to compare: from the leaves on
        self.number = number  # of its leaves
        self.computed = _computed(graph)
        self.leaves = {number: value for value, number in number.items()}
        self.signature: dict[Node, int] = {}
        self.order: dict[Node, Order] = {}
        self.groups: dict[int, list[Node]] = {}
        for position, node in enumerate(whole.nodes):
            self._add(node, position, signatures)

    def _add(self, node: Node, position: int, signatures: dict[tuple[Any, ...], int]) -> None:
        parts: list[Any] = [node.op.name]
        rank = -1
        for operand in node.operands:
            number = self.number.get(operand)
            if number is not None:
                parts.append(("leaf", number))
                rank = max(rank, number)
            elif operand.node.op is not SCALAR:
                parts.append((self.signature[operand.node], operand.index))
                rank = max(rank, self.order[operand.node][0])
        signature = signatures.setdefault(tuple(parts), len(signatures))
        self.signature[node] = signature
        self.order[node] = rank, position
        self.groups.setdefault(signature, []).append(node)

    @cached_property
    def in_order(self) -> list[Node]:
        """Its nodes, sorted by the highest leaf they depend on."""
        return sorted(self.order, key=self.order.__getitem__)

    def first_use(self, slot: int) -> tuple[Node, int] | None:
        """The first node that takes the leaf, and the position of the argument."""
        value = self.leaves[slot]
        for node in self.in_order:
            for position, argument in enumerate(node.args):
                if argument is value or (type(argument) is tuple and value in argument):
                    return node, position
        return None


def _numbers_by_slot(graph: Graph) -> dict[Value, int]:
    return {value: value.node.args[0] for value in graph.inputs if value.node.op is LEAF}


def _numbers_by_place(graph: Graph) -> dict[Value, int]:
    """Inputs numbered by position: equal in equal graphs, as nodes are in post-order."""
    return {v: place for place, v in enumerate(graph.inputs) if v.node.op not in (SCALAR, SIZE)}


def _numbers_by_use(graph: Graph, uses: Uses) -> dict[Value, int]:
    """Leaves numbered by the nodes that take them, independent of recording order."""
    shape: dict[Node, int] = {}
    leaves = [value for value in graph.inputs if value.node.op is LEAF]
    users: dict[Value, set[tuple[int, int]]] = {value: set() for value in leaves}
    for node in graph.nodes:
        parts = (node.op.name, *[shape.get(operand.node, -1) for operand in node.operands])
        shape[node] = uses.setdefault(parts, len(uses))
        for position, operand in enumerate(node.operands):
            if operand in users:
                users[operand].add((shape[node], position))
    met: Counter[frozenset[tuple[int, int]]] = Counter()
    numbers: dict[Value, int] = {}
    for leaf, found in users.items():
        use = frozenset(found)
        met[use] += 1
        numbers[leaf] = uses.setdefault((use, met[use]), len(uses))
    return numbers


# -- leaves ------------------------------------------------------------------------------------


def _leaf(
    old: _ComparedGraph, new: _ComparedGraph, replaced: Collection[int], structure: Found | None
) -> Difference | None:
    """The earliest leaf that both graphs use alike, but whose type differs."""
    limit = structure[0][0] if structure else None
    for slot in sorted(new.leaves.keys() & old.leaves.keys()):
        one, other = old.leaves[slot].type, new.leaves[slot].type
        if one is other or (limit is not None and slot > limit):
            continue
        used = new.first_use(slot)
        if used is None or new.signature[used[0]] not in old.groups:
            continue
        kind = _type_kind(one, other)
        kind = MODULE if slot in replaced and kind != DTYPE else kind
        return _leaf_difference(kind, slot, one, other, used, structure)
    return None


def _type_kind(one: TensorType, other: TensorType) -> str:
    if one.dtype != other.dtype:
        return DTYPE
    if type(other) is SymbolicType:
        return SIZES
    return SHAPE if one.shape != other.shape else LAYOUT


def _leaf_difference(
    kind: str,
    slot: int,
    one: TensorType,
    other: TensorType,
    used: tuple[Node, int],
    structure: Found | None,
) -> Difference:
    node, position = used
    before, after = _type_texts(kind, one, other)
    return Difference(
        kind,
        node.op.name,
        _name(node, position),
        before,
        after,
        _changed_dim(one.shape, other.shape),
        slot,
        _line(node),
        then=structure[1] if structure else None,
    )


def _type_texts(kind: str, one: TensorType, other: TensorType) -> tuple[str, str]:
    if kind == SHAPE:
        return str(list(one.shape)), str(list(other.shape))
    if kind == SIZES:
        return _sizes(one), _sizes(other)
    if kind == DTYPE:
        return _plain(one.dtype), _plain(other.dtype)
    return repr(one), repr(other)


def _sizes(type_: TensorType) -> str:
    sizes = type_.sizes if type(type_) is SymbolicType else type_.shape
    return str(list(sizes))


def _changed_dim(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The dimension that differs, if there is exactly one."""
    if len(one) != len(other):
        return None
    changed = [dim for dim, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return changed[0] if len(changed) == 1 else None


# -- attributes of matching nodes --------------------------------------------------------------


def _attribute(old: _ComparedGraph, new: _ComparedGraph) -> Found | None:
    """The first pair of structurally equal nodes whose attributes differ."""
    for node in new.in_order:
        signature = new.signature[node]
        theirs, ours = old.groups.get(signature), new.groups[signature]
        if theirs is None or len(theirs) != len(ours):
            continue
        match = theirs[ours.index(node)]
        found = None if match is node else _attribute_difference(match, node)
        if found is not None:
            return new.order[node], found
    return None


def _attribute_difference(match: Node, node: Node) -> Difference | None:
    for position, (one, other) in enumerate(zip(match.args, node.args, strict=True)):
        if _is_tensor(one) or _is_tensor(other) or _same(one, other):
            continue
        lines = _line(node), _line(match)
        kind = _attribute_kind(one, other, lines)
        before = lines[1] if lines[1] != lines[0] else ""
        name = _name(node, position)
        if kind == CONSTANT and name in _INDICES and node.op.name.startswith(_VIEWS):
            kind = INDEX
        return Difference(
            kind, node.op.name, name, _plain(one), _plain(other), line=lines[0], line_before=before
        )
    return None


_VIEWS = ("aten.select", "aten.slice", "aten.narrow")  # including their scatter variants
_INDICES = ("index", "start", "end")


def _attribute_kind(one: Any, other: Any, lines: tuple[str, str]) -> str:
    if _holds_scalar(other) and not _holds_scalar(one):
        return PROMOTED
    if isinstance(other, torch.dtype) or isinstance(one, torch.dtype):
        return DTYPE
    return CONSTANT if lines[0] == lines[1] else BRANCH


def _holds_scalar(argument: Any) -> bool:
    items = argument if type(argument) is tuple else (argument,)
    return any(type(item) is Value and item.node.op is SCALAR for item in items)


def _is_tensor(argument: Any) -> bool:
    items = argument if type(argument) is tuple else (argument,)
    return any(type(item) is Value and item.node.op is not SCALAR for item in items)


def _same(one: Any, other: Any) -> bool:
    """Equal and of the same type: `1` is not `True`, and NaN equals NaN."""
    if type(one) is not type(other):
        return False
    if type(one) is tuple:
        return len(one) == len(other) and all(map(_same, one, other))
    if type(one) is Value:  # parsed graphs share no nodes
        return one.node.args == other.node.args and one.type is other.type
    return one is other or repr(one) == repr(other)


# -- structure ---------------------------------------------------------------------------------


def _structure(old: _ComparedGraph, new: _ComparedGraph) -> Found | None:
    """The first node that only one graph has, and the other's in its place."""
    added, removed = _surplus(new, old), _surplus(old, new)
    if not added and not removed:
        return None
    node, gone = next(iter(added), None), next(iter(removed), None)
    if node and gone and node.op is not gone.op:  # the later one may have merely moved up
        ranks = old.order[gone][0], new.order[node][0]
        node, gone = node if ranks[1] <= ranks[0] else None, gone if ranks[0] <= ranks[1] else None
    orders = [new.order[node]] if node else []
    orders += [old.order[gone]] if gone else []
    return min(orders), _exchange(gone, node)


def _surplus(one: _ComparedGraph, other: _ComparedGraph) -> list[Node]:
    """Nodes of `one` that `other` lacks, or has fewer of; in order."""
    left = Counter({signature: len(nodes) for signature, nodes in other.groups.items()})
    found = []
    for node in one.in_order:
        signature = one.signature[node]
        left[signature] -= 1
        if left[signature] < 0:
            found.append(node)
    return found


def _exchange(gone: Node | None, node: Node | None) -> Difference:
    """The difference that `node` replaces `gone`; either may be None."""
    at = node or gone
    assert at is not None, "one graph has a node that the other has not"
    texts = gone.op.name if gone else "", node.op.name if node else ""
    lines = _line(at), _line(gone) if gone and _line(gone) != _line(at) else ""
    kind = BRANCH
    if gone and node and gone.op is node.op and _tensors(gone) != _tensors(node):
        kind, texts = LIST, (str(_tensors(gone)), str(_tensors(node)))
    elif (cast := _cast(gone, node)) is not None:
        kind, texts = DTYPE, cast
    return Difference(kind, at.op.name, "", *texts, line=lines[0], line_before=lines[1])


def _cast(gone: Node | None, node: Node | None) -> tuple[str, str] | None:
    """The dtypes before and after, if only one graph has a cast here."""
    casts = [n for n in (gone, node) if n and n.op.name == "aten._to_copy.default"]
    if len(casts) != 1:
        return None
    source, result = casts[0].operands[0].type.dtype, casts[0].outputs[0].type.dtype
    if source == result:
        return None
    pair = _plain(source), _plain(result)
    return pair if casts[0] is node else pair[::-1]


def _tensors(node: Node) -> int:
    """The total length of its lists of tensors."""
    return sum(len(arg) for arg in node.args if type(arg) is tuple and _is_tensor(arg))


# -- inputs and outputs of graphs --------------------------------------------------------------


def _ends(old: _ComparedGraph, new: _ComparedGraph) -> Difference:
    """The difference if all nodes are equal: other values were computed earlier, or are live."""
    if len(old.computed) != len(new.computed):
        longer = new if len(new.computed) > len(old.computed) else old
        node = longer.computed[0].node
        counts = str(len(old.computed)), str(len(new.computed))
        return Difference(READ, node.op.name, "", *counts, line=_line(node))
    ours, theirs = _results(new), _results(old)
    for value in _only_in(ours, theirs):
        counts = str(len(old.graph.outputs)), str(len(new.graph.outputs))
        return Difference(RESULTS, value.node.op.name, "", *counts, line=_line(value.node))
    return Difference(SAME)


def _results(outline: _ComparedGraph) -> dict[tuple[int, int], Value]:
    return {
        (outline.signature[value.node], value.index): value
        for value in outline.graph.outputs
        if value.node in outline.signature
    }


def _only_in(
    ours: dict[tuple[int, int], Value], theirs: dict[tuple[int, int], Value]
) -> Iterator[Value]:
    yield from (value for key, value in ours.items() if key not in theirs)
    yield from (value for key, value in theirs.items() if key not in ours)


# -- formatting --------------------------------------------------------------------------------


_LONG = 60  # the most characters of a constant to show


def _line(node: Node) -> str:
    return "" if node.site is None else str(node.site)


def _name(node: Node, position: int) -> str:
    parameter = node.op.parameters[position] if position < len(node.op.parameters) else position
    return str(getattr(parameter, "name", parameter))


def _plain(argument: Any) -> str:
    if _holds_scalar(argument):
        return "a run-time input"
    text = str(argument).removeprefix("torch.")
    return text if len(text) <= _LONG else f"{text[:_LONG]}..."
