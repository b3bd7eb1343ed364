"""Graphs of nodes outside the intern table: parsed from files, extracted from others, moved.

They are private, so that a file with wrong types cannot affect recording.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from torpor.ir.graph import Graph
from torpor.ir.node import Key, Node, Value
from torpor.ir.types import TensorType
from torpor.ops.keys import key_of
from torpor.ops.spec import spec_of
from torpor.passes.interpreter import Copier

Move = Callable[[torch.device], torch.device]


def moved(graph: Graph, move: Move, sites: Sequence[Any]) -> Graph:
    """The graph on other devices, with these source lines."""
    copier = _Moved(move)
    for value in graph.inputs:
        copier.value(value)
    copier.run(graph.nodes)
    for node, site in zip(copier.nodes, sites, strict=True):
        node.site = site
    return copier.graph(graph.outputs)


def cut_out(nodes: Iterable[Node], outputs: Sequence[Value]) -> tuple[Graph, list[Value]]:
    """The graph of `nodes` alone, and the values that its inputs stand for, in order."""
    copier = _Moved(lambda device: device)
    copier.run(nodes)
    return copier.graph(outputs), copier.read


class _Moved(Copier):
    """Copies nodes to other devices."""

    def __init__(self, move: Move) -> None:
        super().__init__()
        self.move = move

    def type(self, type_: Any) -> Any:
        return type_.on(self.move(type_.device)) if isinstance(type_, TensorType) else type_

    def constant(self, constant: Any) -> Any:
        return self.move(constant) if type(constant) is torch.device else constant

    def key(self, node: Node, args: tuple[Any, ...]) -> Key:
        return key_of(spec_of(node.op.target), args)


def ancestors(graph: Graph, node: Node, depth: int) -> list[Node]:
    """`node` and its ancestors up to a distance of `depth`, in the order of the graph."""
    inside = {node}
    border = {node}
    own = set(graph.nodes)
    for _ in range(depth):
        border = {v.node for n in border for v in n.operands if v.node in own} - inside
        if not border:
            break
        inside |= border
    inputs = set(graph.inputs)  # an input may also be an output of a node in the graph
    return [n for n in graph.nodes if n in inside and not inputs.issuperset(n.outputs)]
