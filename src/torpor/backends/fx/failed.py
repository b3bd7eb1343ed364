"""Extracts a block that failed to compile, as a graph of its own."""

from __future__ import annotations

from typing import Any

from torpor.backend.failures import CompileFailure
from torpor.backend.interface import Backend
from torpor.backends.blocks.program import Program
from torpor.backends.blocks.registers import Registers
from torpor.ir.graph import Block
from torpor.ir.node import Value
from torpor.passes.interpreter import AtSizes


class _FailedBlock(AtSizes):
    """Copies a block; its inputs get the strides that compiled code gave them."""

    def __init__(self, program: Program, registers: Registers) -> None:
        super().__init__(program.hints)
        self.program = program
        self.registers = registers

    def input_type(self, value: Value) -> Any:
        return self.type(self.program.types[self.registers.register(value)])


def failure_of(
    block: Block, program: Program, registers: Registers, backend: Backend, error: BaseException
) -> CompileFailure:
    """A report of a block that failed to compile: its graph, at the sizes it failed for."""
    outputs = block.outputs or ()
    copier = _FailedBlock(program, registers)
    copier.run(block.nodes)
    graph = copier.graph(outputs)
    places = {value: place for place, value in enumerate(copier.read)}
    donated = {places[v]: outputs.index(o) for v, o in block.donated.items() if v in places}
    return CompileFailure(graph, backend, error, donated, program.hints)
