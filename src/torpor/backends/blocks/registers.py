"""Blocks as pieces: instructions to compile together, in terms of registers."""

from __future__ import annotations

from collections.abc import Sequence

from torpor.backends.blocks.program import PACKED, Piece, Program, is_number
from torpor.backends.reference.lowering import Instruction, registers_in
from torpor.ir.graph import Block, Donated, Graph
from torpor.ir.node import Derived, Node, Value, items_of
from torpor.ops.keys import private_node
from torpor.ops.spec import spec_of


class PartialInstruction(Instruction):
    """An op on lists, restricted to some of their items."""

    __slots__ = ("positions", "whole")

    def __init__(self, whole: Instruction, positions: Sequence[int]) -> None:
        self.whole = whole
        self.positions = list(positions)
        super().__init__(
            _some_of(whole.node, positions),
            whole.spec,
            [[arg[p] for p in positions] if type(arg) is list else arg for arg in whole.args],
            [whole.outputs[position] for position in positions],
        )
        self.sizes = whole.sizes


def _some_of(node: Node, positions: Sequence[int]) -> Node:
    """The node restricted to some of its items."""
    args = tuple(tuple(a[p] for p in positions) if type(a) is tuple else a for a in node.args)
    types = tuple(node.outputs[position].type for position in positions)
    return private_node(spec_of(node.op.target), args, types, node.site)


class Registers:
    """Maps nodes and values of the graph after passes to registers of the lowered program.

    A value has the register of the recorded value it derives from. If `packs`, pieces take tensors
    only, into which run-time numbers are packed.
    """

    def __init__(self, program: Program, packs: bool) -> None:
        self.types = program.types
        self.packs = packs
        self.instructions = {i.node: i.copy() for i in program.reference[0]}
        self.inputs = {value: place for place, value in enumerate(program.graph.inputs)}

    def instruction(self, node: Node) -> Instruction:
        """The instruction of a node."""
        origin = node.origin if type(node) is Derived else node
        whole = self.instructions[origin]
        items = items_of(node)
        return whole if items is None else PartialInstruction(whole, items.positions)

    def donated(self, donated: Donated) -> dict[int, int]:
        """Parameter registers -> registers of the results that overwrite them."""
        return {self.inputs[value]: self.register(output) for value, output in donated.items()}

    def copied(self, graph: Graph) -> dict[int, int]:
        """Donations that no block performs in place: copied at the end of the step."""
        written = {value for block in graph.blocks for value in block.donated}
        return self.donated({v: o for v, o in graph.donated.items() if v not in written})

    def register(self, value: Value) -> int:
        """The register of a value."""
        node = value.node
        if type(node) is Derived or node in self.instructions:
            return self.instruction(node).outputs[value.index]
        return self.inputs[value]

    def piece(self, block: Block) -> Piece:
        """A block in terms of registers."""
        instructions = [self.instruction(node) for node in block.nodes]
        made = {register for i in instructions for register in i.outputs}
        read = {r: None for i in instructions for r in registers_in(i.args) if r not in made}
        numbers = {r: self.types[r].kind for r in read if self.packs and is_number(self.types[r])}
        kinds = {kind: [r for r, own in numbers.items() if own is kind] for kind in PACKED}
        donated = self.donated(block.donated)
        inputs = [register for register in read if register not in numbers]
        return Piece(
            instructions=instructions,
            inputs=[*inputs, *(register for register in donated if register not in read)],
            numbers={kind: registers for kind, registers in kinds.items() if registers},
            outputs=sorted(map(self.register, block.outputs or ())),
            donated=donated,
        )
