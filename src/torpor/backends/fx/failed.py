"""A piece that was not compiled, as a graph by itself."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torpor.backend.failures import Failure
from torpor.backend.interface import Backend
from torpor.backends.fx.program import Program
from torpor.backends.fx.trace import Piece
from torpor.backends.reference.lowering import Instruction, registers_in
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, SCALAR, Node, Value, values_in
from torpor.ir.sizes import Symbol, number
from torpor.ir.types import ScalarType, type_at


def failure_of(piece: Piece, program: Program, backend: Backend, error: BaseException) -> Failure:
    """What is known of a piece that was not compiled: its graph, for the sizes it failed at."""
    cutting = _Cutting(program.hints)
    for instruction in piece.instructions:
        cutting.add(instruction, program.types)
    made = cutting.made
    graph = Graph(cutting.inputs, cutting.nodes, [made[register] for register in piece.outputs])
    places = {register: place for place, register in enumerate(cutting.read)}
    donated = {places[r]: piece.outputs.index(o) for r, o in piece.donated.items() if r in places}
    return Failure(graph, backend, error, donated, program.hints)


class _Cutting:
    """The graph of some instructions while it grows, of nodes that nobody else knows."""

    def __init__(self, sizes: Mapping[Symbol, int]) -> None:
        self.sizes = sizes
        self.made: dict[int, Value] = {}  # by register
        self.read: list[int] = []  # registers of the inputs
        self.inputs: list[Value] = []
        self.nodes: list[Node] = []

    def add(self, instruction: Instruction, types: dict[int, Any]) -> None:
        """Add one instruction, and what it reads and nobody before it made."""
        node = instruction.node
        registers = registers_in(instruction.args)
        for register in registers:
            if register not in self.made:
                self._add_input(register, type_at(types[register], self.sizes))
        pairs = zip(values_in(node.args), registers, strict=True)
        known = {value: self.made[register] for value, register in pairs}
        args = tuple([self._argument(arg, known) for arg in node.args])
        promised = tuple([type_at(output.type, self.sizes) for output in node.outputs])
        rebuilt = Node(node.op, args, args, promised, node.site, node.scope)
        self.nodes.append(rebuilt)
        self.made.update(zip(instruction.outputs, rebuilt.outputs, strict=True))

    def _add_input(self, register: int, type_: Any) -> None:
        kind = SCALAR if isinstance(type_, ScalarType) else LEAF
        place = len(self.inputs)
        value = Node(kind, (place, type_), (place,), (type_,)).outputs[0]
        self.made[register] = value
        self.read.append(register)
        self.inputs.append(value)

    def _argument(self, arg: Any, known: dict[Value, Value]) -> Any:
        if type(arg) is Value:
            return known[arg]
        if type(arg) is tuple:
            return tuple([self._argument(item, known) for item in arg])
        return number(arg, self.sizes)
