"""Recompute views in the blocks that read them, instead of passing them between blocks.

    compiled 0:                          compiled 0:
      %1 = aten.t.default(%0)              %1 = aten.t.default(%0)
      %2 = aten.mm.default(%0, %1)         %2 = aten.mm.default(%0, %1)
    compiled 0:                          compiled 0:
      %3 = aten.mm.default(%2, %1)         %3 = aten.t.default(%0)
                                           %4 = aten.mm.default(%2, %3)

A view that leaves a compiled block would be copied, since compiled code returns only fresh memory.
Blocks of one stage recompute each other's views; commit blocks also those of all earlier stages.
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
    stages: dict[tuple[str, int], Makers] = {}  # the views made in each
    earlier: Makers = {}  # views made in all stages before the commit
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
    """The nodes of `views` that `nodes` read, each preceded by the views it derives from."""
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
    """`block` with copies of these views prepended, its results replacing the earlier ones."""
    before = {value: values.get(value) for view in views for value in view.outputs}
    copies: list[Node] = []
    for view in views:
        copies.append(Derived(view, tuple([mapped(arg, values) for arg in view.args])))
        values.update(zip(view.outputs, copies[-1].outputs, strict=True))
    nodes = [on(node, values) for node in block.nodes]
    for value, known in before.items():  # the copies are local to this block
        if known is None:
            del values[value]
        else:
            values[value] = known
    return replace(block, nodes=(*copies, *nodes))


VIEWS = Pass("views", "blocks compute for themselves the views that they read", _copy_views)
