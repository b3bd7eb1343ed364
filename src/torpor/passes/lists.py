"""Split ops on lists of tensors into one node per item (before blocks are cut), and rejoin them.

    %2, %3 = aten._foreach_exp([%0, %1])       %2 = aten._foreach_exp([%0]) items [0] of 2 op 0
                                               %3 = aten._foreach_exp([%1]) items [1] of 2 op 0

Blocks may be cut through such an op between the two passes; items are then rejoined only where they
are adjacent within one block.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from torpor.ir.graph import EAGER, Graph
from torpor.ir.node import Derived, Items, Node, items_of
from torpor.passes.pipeline import Pass
from torpor.passes.rewrite import Values, mapped, on, restored, with_outputs


def _split(graph: Graph) -> Graph:
    values: Values = {}
    blocks = []
    ops = 0
    for block in graph.blocks:
        nodes: list[Node] = []
        for node in block.nodes:
            length = 0 if block.kind == EAGER else _length(node)
            if not length:
                nodes.append(on(node, values))
                continue
            for place, output in enumerate(node.outputs):
                nodes.append(_item(node, Items((place,), length, ops), values))
                values[output] = nodes[-1].outputs[0]
            ops += 1
        blocks.append(replace(block, nodes=tuple(nodes)))
    return with_outputs(graph, blocks, values) if ops else graph


def _length(node: Node) -> int:
    """The number of items in the lists of a node; 0 if it cannot be split."""
    if not node.op.target._opname.startswith("_foreach_"):
        return 0
    lengths = {len(arg) for arg in node.args if type(arg) is tuple}
    length = len(node.outputs)
    return length if length > 1 and lengths == {length} else 0


def _item(node: Node, items: Items, values: Values) -> Node:
    (place,) = items.positions
    args = tuple([arg[place : place + 1] if type(arg) is tuple else arg for arg in node.args])
    types = (node.outputs[place].type,)
    return Derived(node, tuple([mapped(arg, values) for arg in args]), items, types)


def _join(graph: Graph) -> Graph:
    if all(items_of(node) is None for node in graph.nodes):
        return graph
    values: Values = {}
    blocks = [replace(b, nodes=tuple(_joined(b.nodes, values))) for b in graph.blocks]
    return with_outputs(graph, blocks, values)


def _joined(nodes: Iterable[Node], values: Values) -> Iterator[Node]:
    waiting: list[Node] = []
    for node in nodes:
        if items_of(node) is None:
            yield from _together(waiting, values)
            waiting = []
            yield on(node, values)
        else:
            waiting.append(node)
    yield from _together(waiting, values)


def _together(nodes: Sequence[Node], values: Values) -> Iterator[Node]:
    """Rejoin items: one node per op, in the order of the ops."""
    ops: dict[int, list[tuple[Items, Node]]] = {}
    for node in nodes:
        items = items_of(node)
        assert items is not None, "only items wait"
        ops.setdefault(items.op, []).append((items, node))
    for _, parts in sorted(ops.items()):
        parts.sort(key=lambda part: part[0].positions)
        yield _whole([items for items, _ in parts], [node for _, node in parts], values)


def _whole(items: Sequence[Items], parts: Sequence[Node], values: Values) -> Node:
    """One node for several items of an op; the original node if they are all of its items."""
    first, length = parts[0], items[0].length
    args = tuple(
        [
            tuple([mapped(item, values) for part in parts for item in part.args[place]])
            if type(arg) is tuple
            else mapped(arg, values)
            for place, arg in enumerate(first.args)
        ]
    )
    positions = tuple([position for each in items for position in each.positions])
    outputs = [value for part in parts for value in part.outputs]
    types = tuple([value.type for value in outputs])
    if len(positions) < length:
        made: Node = Derived(first, args, Items(positions, length, items[0].op), types)
    else:
        made = restored(Derived(first, args, None, types), args)
    values.update(zip(outputs, made.outputs, strict=True))
    return made


SPLIT_LISTS = Pass("split-lists", "ops on lists, a node for each item", _split)
JOIN_LISTS = Pass("join-lists", "items of an op that stand in one block, as one node again", _join)
