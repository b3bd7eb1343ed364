"""Find the outputs of each block: the values that later blocks or the graph's results need."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from torpor.ir.graph import EAGER, Block, Graph
from torpor.ir.node import Value
from torpor.passes.pipeline import Pass


def _outputs(graph: Graph) -> Graph:
    needed = set(graph.outputs)
    blocks: list[Block] = []
    for block in reversed(graph.blocks):
        if block.kind != EAGER:
            block = replace(block, outputs=tuple([v for v in block.made if v in needed]))
        blocks.append(block)
        needed.update(block.read)
    blocks.reverse()
    repeats: dict[tuple[str, int, int], list[int]] = {}
    for place, block in enumerate(blocks):
        if block.repeat is not None:
            repeats.setdefault((block.kind, block.stage, block.repeat), []).append(place)
    for places in repeats.values():
        copies = _leaving_the_same([blocks[place] for place in places])
        for place, block in zip(places, copies, strict=True):
            blocks[place] = block
    return graph.in_blocks(blocks)


def _leaving_the_same(copies: Sequence[Block]) -> Sequence[Block]:
    """Copies, each with the outputs that at least half have; one with more is not shared."""
    if len({len(block.made) for block in copies}) > 1:
        return copies
    left = [set(block.outputs or ()) for block in copies]
    times = Counter(
        place
        for block, outputs in zip(copies, left, strict=True)
        for place, value in enumerate(block.made)
        if value in outputs
    )
    common = {place for place, count in times.items() if 2 * count >= len(copies)}

    def kept(block: Block, outputs: set[Value]) -> tuple[Value, ...]:
        made = enumerate(block.made)
        return tuple([value for place, value in made if place in common or value in outputs])

    return [
        replace(block, outputs=kept(block, outputs))
        for block, outputs in zip(copies, left, strict=True)
    ]


OUTPUTS = Pass("outputs", "what each block leaves behind; copies leave the same", _outputs)
