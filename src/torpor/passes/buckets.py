"""Combine consecutive collectives into one that takes all of their tensors (`config.bucket_bytes`).

    %2 = torpor.all_reduce.default([%1], None, "0", "sum")
    %3 = aten.sin.default(%0)                              %3 = aten.sin.default(%0)
    %4 = torpor.all_reduce.default([%3], %2, "0", "sum")   %2, %4 = torpor.all_reduce.default(
    %5 = torpor.wait.default(%2)                               [%1, %3], None, "0", "sum")
                                                           %5 = torpor.wait.default(%2)

Collectives are combined only if they have the same group, kind and dtype, and none depends on the
result of another. Their consumers move after the combined node. Fewer launches: many small
collectives are dominated by latency.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from torpor.distributed.ops import AllGather, AllReduce, ReduceScatter, collectives_in
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.ops.spec import spec_of
from torpor.passes.pipeline import Pass
from torpor.passes.rewrite import Values, mapped, on

_KINDS: Final = frozenset({AllReduce.target, AllGather.target, ReduceScatter.target})
"""Collectives that process groups can run on several tensors at once."""


def buckets(max_bytes: int) -> Pass:
    """The pass, combining up to `max_bytes` per collective."""

    def run(graph: Graph) -> Graph:
        groups = [group for group in _groups(graph, max_bytes) if len(group) > 1]
        draws = any(spec_of(node.op.target).draws(node.args) for node in graph.nodes)
        return _merged(graph, groups) if groups and not draws else graph

    return Pass("buckets", "collectives that follow each other, in one", run)


def _groups(graph: Graph, max_bytes: int) -> list[list[Node]]:
    """The collectives in order, grouped: each group can be combined into one."""
    groups: list[list[Node]] = []
    for node in collectives_in(graph):
        if groups and _joins(node, groups[-1], max_bytes):
            groups[-1].append(node)
        else:
            groups.append([node])
    return groups


def _joins(node: Node, group: Sequence[Node], max_bytes: int) -> bool:
    first, last = group[0], group[-1]
    inputs, after, *rest = node.args
    follows = type(after) is Value and after.node is last
    alike = node.op is first.op and tuple(rest) == first.args[2:] and node.op.target in _KINDS
    if not (follows and alike) or len({v.type.dtype for n in (node, first) for v in n.args[0]}) > 1:
        return False
    nbytes = sum(value.type.nbytes for one in (*group, node) for value in one.args[0])
    return nbytes <= max_bytes and not _needs(inputs, set(group))


def _needs(values: Sequence[Value], nodes: set[Node]) -> bool:
    """Whether any of `values` is, or depends on, an output of one of `nodes`."""
    found: set[Node] = set()
    todo = [value.node for value in values]
    while todo:
        node = todo.pop()
        if node in nodes:
            return True
        new = {value.node for value in node.operands} - found
        found |= new
        todo += new
    return False


def _merged(graph: Graph, groups: Sequence[Sequence[Node]]) -> Graph:
    """`graph` with each group replaced by one node, at the position of the group's last node."""
    group_of = {node: group for group in groups for node in group}
    values: Values = {}
    missing: set[Value] = set()  # not yet available: made by nodes that are delayed
    waiting: list[Node] = []
    made: list[Node] = []
    for node in graph.nodes:
        group = group_of.get(node)
        if group is None and missing.isdisjoint(node.operands):
            made.append(on(node, values))
        elif group is None or node is not group[-1]:
            missing.update(node.outputs)
            waiting += [node] if group is None else []
        else:
            made.append(_one(group, values))
            missing.clear()
            made += [on(late, values) for late in waiting]
            waiting = []
    outputs = [values.get(value, value) for value in graph.outputs]
    return Graph(graph.inputs, made, outputs)


def _one(group: Sequence[Node], values: Values) -> Node:
    first = group[0]
    inputs = tuple([value for node in group for value in node.args[0]])
    args = mapped((inputs, *first.args[1:]), values)
    outputs = [value for node in group for value in node.outputs]
    types = tuple([value.type for value in outputs])
    made = Node(first.op, args, args, types, group[-1].site, first.scope)
    values.update(zip(outputs, made.outputs, strict=True))
    return made
