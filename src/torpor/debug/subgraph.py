"""Graphs of nodes that are in no intern table: read from files, cut out of others, moved.

What is made here is nobody else's: a file that lies about a type cannot teach it to recorders.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, Node, Value
from torpor.ir.types import SCALAR_TYPES, ScalarType, TensorType
from torpor.ops.keys import key_of
from torpor.ops.spec import OpSpec, spec_of

Move = Callable[[torch.device], torch.device]


def private_node(
    spec: OpSpec, bound: Sequence[Any], types: Sequence[TensorType | None], site: Any = None
) -> Node:
    """A node that the intern table does not know."""
    args = tuple(tuple(a) if isinstance(a, list) else a for a in bound)
    return Node(spec.kind, key_of(spec, args), args, tuple(types), site)  # type: ignore[arg-type]  # None: no tensor


def new_input(position: int, type_: TensorType | ScalarType) -> Value:
    """The `position`-th input of a graph."""
    if isinstance(type_, ScalarType):
        kind = SCALAR_TYPES[type_.kind]
        return Node(SCALAR, (position, type_.kind), (position,), (kind,)).outputs[0]
    return Node(LEAF, (position, type_), (position,), (type_,)).outputs[0]


def moved(graph: Graph, move: Move, sites: Sequence[Any]) -> Graph:
    """The same graph on other devices, its nodes with these lines."""
    known = {
        value: new_input(position, _moved_type(value.type, move))
        for position, value in enumerate(graph.inputs)
    }
    inputs = tuple(known.values())
    nodes = [_rebuilt(n, known, move, site) for n, site in zip(graph.nodes, sites, strict=True)]
    return Graph(inputs, nodes, [known[value] for value in graph.outputs])


def cut_out(nodes: Iterable[Node], outputs: Sequence[Value]) -> tuple[Graph, list[Value]]:
    """The graph of `nodes` alone; and the values that it takes as its inputs, in order."""
    known: dict[Value, Value] = {}
    needed: list[Value] = []
    inputs: list[Value] = []
    rebuilt: list[Node] = []
    for node in nodes:
        for operand in node.operands:
            if operand not in known:
                known[operand] = new_input(len(needed), operand.type)
                needed.append(operand)
                inputs.append(known[operand])
        rebuilt.append(_rebuilt(node, known, _stay, node.site))
    return Graph(inputs, rebuilt, [known[value] for value in outputs]), needed


def _rebuilt(node: Node, known: dict[Value, Value], move: Move, site: Any) -> Node:
    args = [_moved_argument(arg, known, move) for arg in node.args]
    types = [_moved_type(output.type, move) for output in node.outputs]
    made = private_node(spec_of(node.op.target), args, types, site)
    known.update(zip(node.outputs, made.outputs, strict=True))
    return made


def _moved_argument(arg: Any, known: dict[Value, Value], move: Move) -> Any:
    if type(arg) is Value:
        return known[arg]
    if type(arg) is tuple:
        return tuple(_moved_argument(item, known, move) for item in arg)
    return move(arg) if type(arg) is torch.device else arg


def _moved_type(type_: Any, move: Move) -> Any:
    return type_.on(move(type_.device)) if isinstance(type_, TensorType) else type_


def _stay(device: torch.device) -> torch.device:
    return device


def ancestors(graph: Graph, node: Node, depth: int) -> list[Node]:
    """`node` and what it needs, as many steps back as `depth`, in the order of the graph."""
    inside = {node}
    border = {node}
    own = set(graph.nodes)
    for _ in range(depth):
        border = {v.node for n in border for v in n.operands if v.node in own} - inside
        if not border:
            break
        inside |= border
    inputs = set(graph.inputs)  # an input may be an output of a node that stands in the graph too
    return [n for n in graph.nodes if n in inside and not inputs.issuperset(n.outputs)]
