"""Shared by the passes: copies of nodes on replaced values, and graphs of such nodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torpor.ir.graph import Block, Donated, Graph
from torpor.ir.node import Derived, Node, Value, items_of
from torpor.ops.spec import Mode, ReturnKind, spec_of

Values = dict[Value, Value]
"""Replaced values -> their replacements."""


def mapped(arg: Any, values: Mapping[Value, Any]) -> Any:
    """`arg` with its values replaced."""
    if type(arg) is Value:
        return values.get(arg, arg)
    return tuple([mapped(item, values) for item in arg]) if type(arg) is tuple else arg


def on(node: Node, values: Values) -> Node:
    """`node` on replaced operands; adds the replacements of its outputs to `values`."""
    if values.keys().isdisjoint(node.operands):
        return node
    made = restored(node, tuple([mapped(arg, values) for arg in node.args]))
    values.update(zip(node.outputs, made.outputs, strict=True))
    return made


def restored(node: Node, args: tuple[Any, ...]) -> Node:
    """`node` on other arguments: its original, if those are the original's arguments."""
    made = Derived(node, args, items_of(node))
    whole = made.items is None and made.operands == made.origin.operands
    return made.origin if whole else made


def with_outputs(graph: Graph, blocks: Sequence[Block], values: Values) -> Graph:
    """`graph` in these `blocks`, with its outputs replaced as in `values`."""
    outputs = [values.get(value, value) for value in graph.outputs]
    donated: Donated = {value: values.get(out, out) for value, out in graph.donated.items()}
    nodes = [node for block in blocks for node in block.nodes]
    return Graph(graph.inputs, nodes, outputs, blocks, donated)


def is_view(node: Node) -> bool:
    """Whether the node only makes views of one tensor."""
    spec = spec_of(node.op.target)
    return (
        spec.mode is Mode.VIEW
        and not spec.mutated
        and all(returned.kind is ReturnKind.VIEW for returned in spec.returns)
        and len(set(node.operands)) == 1
    )
