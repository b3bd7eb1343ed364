"""Split blocks that are too long for the compiler into parts of nearly equal length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from torpor.ir.graph import EAGER, Block, Graph
from torpor.passes.pipeline import Pass


def limit(max_nodes: int) -> Pass:
    """The pass, for a compiler that takes at most `max_nodes` nodes at a time."""

    def run(graph: Graph) -> Graph:
        blocks = [part for block in graph.blocks for part in _parts(block, max_nodes)]
        return graph.in_blocks(blocks) if len(blocks) > len(graph.blocks) else graph

    return Pass("limit", f"no block to compile has more than {max_nodes} nodes", run)


def _parts(block: Block, max_nodes: int) -> Iterator[Block]:
    """`block` in parts of nearly equal length, which are no longer marked as repeats."""
    nodes = block.nodes
    if block.kind == EAGER or len(nodes) <= max_nodes:
        yield block
        return
    parts = -(-len(nodes) // max_nodes)
    length = -(-len(nodes) // parts)
    for start in range(0, len(nodes), length):
        yield replace(block, nodes=nodes[start : start + length], repeat=None)
