"""A block that was not compiled, as a graph by itself."""

from __future__ import annotations

from typing import Any

from torpor.backend.failures import CompileFailure
from torpor.backend.interface import Backend
from torpor.backends.fx.pieces import Registers
from torpor.backends.fx.program import Program
from torpor.ir.graph import Block
from torpor.ir.node import Value
from torpor.passes.interpreter import AtSizes


class _FailedBlock(AtSizes):
    """Copies a block, on inputs that lie in memory as compiled code left them."""

    def __init__(self, program: Program, registers: Registers) -> None:
        super().__init__(program.hints)
        self.program = program
        self.registers = registers

    def input_type(self, value: Value) -> Any:
        return self.type(self.program.types[self.registers.register(value)])


def failure_of(
    block: Block, program: Program, registers: Registers, backend: Backend, error: BaseException
) -> CompileFailure:
    """What is known of a block that was not compiled: its graph, for the sizes it failed at."""
    outputs = block.outputs or ()
    copier = _FailedBlock(program, registers)
    copier.run(block.nodes)
    graph = copier.graph(outputs)
    places = {value: place for place, value in enumerate(copier.read)}
    donated = {places[v]: outputs.index(o) for v, o in block.donated.items() if v in places}
    return CompileFailure(graph, backend, error, donated, program.hints)
