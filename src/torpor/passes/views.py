"""Lets blocks compute for themselves the views they read of what other blocks make.

    compiled 0:                          compiled 0:
      %1 = aten.t.default(%0)              %1 = aten.t.default(%0)
      %2 = aten.mm.default(%0, %1)         %2 = aten.mm.default(%0, %1)
    compiled 0:                          compiled 0:
      %3 = aten.mm.default(%2, %1)         %3 = aten.t.default(%0)
                                           %4 = aten.mm.default(%2, %3)

A view that leaves a block would be copied: compiled code returns nobody else's memory. Blocks of
one stage take over views of each other, those that commit also views of the stages before.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from torpor.ir.graph import COMMIT, EAGER, Block, Graph
from torpor.ir.node import Derived, Node, Value
from torpor.passes.pipeline import Pass
from torpor.passes.rewrite import Values, is_view, mapped, on, with_outputs

Makers = dict[Value, Node]


def _copy_views(graph: Graph) -> Graph:
    stages: dict[tuple[str, int], Makers] = {}  # the views of each
    earlier: Makers = {}  # those of all stages before the commit
    values: Values = {}
    blocks: list[Block] = []
    for block in graph.blocks:
        taken: list[Node] = []
        if block.kind != EAGER:
            views = stages.setdefault((block.kind, block.stage), {})
            taken = _read(block.nodes, views)
            if block.kind == COMMIT:
                taken = [*_read((*taken, *block.nodes), earlier), *taken]
            found = {v: node for node in block.nodes if is_view(node) for v in node.outputs}
            views.update(found)
            if block.kind != COMMIT:
                earlier.update(found)
        blocks.append(_with_copies(block, taken, values))
    unchanged = len(graph.nodes) == sum(len(block.nodes) for block in blocks)
    return graph if unchanged else with_outputs(graph, blocks, values)


def _read(nodes: Iterable[Node], views: Makers) -> list[Node]:
    """Those of `views` that nodes read, and the views these are views of before them."""
    made = {value for node in nodes for value in node.outputs}
    found: Makers = {}
    for node in nodes:
        for value in node.operands:
            chain: list[Node] = []
            while value in views and value not in made and value not in found:
                chain.append(views[value])
                value = chain[-1].operands[0]
            for view in reversed(chain):
                found.update(dict.fromkeys(view.outputs, view))
    return list(dict.fromkeys(found.values()))


def _with_copies(block: Block, views: Sequence[Node], values: Values) -> Block:
    """`block` with views of its own before its nodes; its results replace the earlier ones."""
    before = {value: values.get(value) for view in views for value in view.outputs}
    copies: list[Node] = []
    for view in views:
        copies.append(Derived(view, tuple([mapped(arg, values) for arg in view.args])))
        values.update(zip(view.outputs, copies[-1].outputs, strict=True))
    nodes = [on(node, values) for node in block.nodes]
    for value, known in before.items():  # other blocks do not see them
        if known is None:
            del values[value]
        else:
            values[value] = known
    return replace(block, nodes=(*copies, *nodes))


VIEWS = Pass("views", "blocks compute for themselves the views that they read", _copy_views)
