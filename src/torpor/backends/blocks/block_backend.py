"""The base class of backends that compile graphs block by block: lower, cut, compile, run."""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torpor import config, metrics
from torpor.backend.data import BackendData, filled, tensors_of
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.backends.blocks.program import (
    Compiled,
    Piece,
    Program,
    ProgramRun,
    Step,
    corrected,
    note_writes,
    plan,
    run_steps,
)
from torpor.backends.blocks.registers import Registers
from torpor.backends.blocks.saved import dump_program, load_program
from torpor.backends.reference.lowering import Instruction, ReferenceLowering
from torpor.backends.reference.runtime import run as run_reference
from torpor.distributed.ops import ORDERED
from torpor.ir.graph import EAGER, Block, Graph
from torpor.ir.node import Node, Value
from torpor.passes import Pass, run_passes
from torpor.passes.limit import limit
from torpor.passes.outputs import OUTPUTS
from torpor.passes.schedule import split


class BlockLowering(ReferenceLowering):
    """The reference backend's lowering, keeping the graph and the type of every register."""

    program: type[Program] = Program

    def build(self) -> Computation:
        computation = super().build()
        graph = Graph(self.parameters, self.post_order, self.results, donated=self.donated())
        types = {register: value.type for value, register in self.emitted.items()}
        place, parameters = self.device.torch_device, len(self.parameters)
        program = self.program(self.name, graph, computation.program, types, place, parameters)
        program.donated = {self.emitted[v]: self.emitted[o] for v, o in graph.donated.items()}
        program.free_strides = frozenset(self.emitted[self.results[i]] for i in self.free_strides)
        program.sizes = self.sizes
        program.hints = {one: self.hints.get(one, one.value) for one in self.sizes}
        computation.program = program
        return computation

    def donated(self) -> dict[Value, Value]:
        """Parameters that steps overwrite: donated ones whose type equals that of their result."""
        pairs = [(self.parameters[p], self.results[r]) for p, r in self.aliases.items()]
        return {value: result for value, result in pairs if value.type is result.type}


class BlockBackend(Backend):
    """Cuts graphs into blocks and compiles those; eager's kernels run what cannot be compiled.

    A subclass says which nodes it does not compile, and compiles a block. If its buffers are not
    torch tensors, it overrides `buffers`, `handles` and `by_reference`.
    """

    host_devices = config.cpu_devices

    max_nodes: int
    """The most nodes to compile together."""

    packs_numbers = False
    """Pieces take run-time numbers in tensors (`program.PACKED`), not as numbers."""

    # -- to be implemented per compiler ------------------------------------------------------------

    @abc.abstractmethod
    def why_not(self, node: Node) -> str | None:
        """Why a node is not compiled; None if it is."""

    @abc.abstractmethod
    def compile_block(self, block: Block, registers: Registers, program: Program) -> Sequence[Step]:
        """The steps of a block that is not eager's."""

    # -- compiling ---------------------------------------------------------------------------------

    def runs_eagerly(self, node: Node) -> bool:
        """Whether the node must not be compiled."""
        return self.why_not(node) is not None

    def passes(self, device: BackendDevice) -> tuple[Pass, ...]:
        return (split(self.runs_eagerly), limit(self.max_nodes), OUTPUTS)

    def lowering_context(
        self, name: str, device: BackendDevice, post_order: Any = None, emitted: Any = None
    ) -> BlockLowering:
        return BlockLowering(name, device, post_order, emitted)

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        for computation in computations:
            self.compile_program(computation.program)
        return list(computations)

    def compile_program(self, program: Program) -> None:
        """Give a lowered program its steps."""
        graph = run_passes(self.passes(self.backend_device(program.device)), program.graph)
        registers = Registers(program, self.packs_numbers)
        program.copied = registers.copied(graph)
        program.steps = list(self.compile_blocks(graph, registers, program))
        self.complete(program)

    def compile_blocks(
        self, graph: Graph, registers: Registers, program: Program
    ) -> Iterator[Step]:
        """The steps of a graph that is cut into blocks."""
        for block in graph.blocks:
            if block.kind == EAGER:
                yield from self.by_eager(map(registers.instruction, block.nodes))
            else:
                yield from self.compile_block(block, registers, program)

    def by_eager(self, instructions: Iterable[Instruction]) -> list[Instruction]:
        """Instructions that are steps by themselves, counted as fallbacks."""
        alone = list(instructions)
        for instruction in alone:
            node = instruction.node
            if node.op.target not in ORDERED:  # run by the process group by design: no fallback
                metrics.count_line(f"fallback::{node.op.name}", str(node.site))
        return alone

    def complete(self, program: Program) -> None:
        """Called when all steps of a program are known, compiled here or loaded."""
        plan(program)

    # -- running -----------------------------------------------------------------------------------

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        program = computation.program
        types = computation.result_types_for(arguments)
        call = ProgramRun(program, arguments, types, device)
        given = None if program.broken is not None else self.buffers(call)
        if given is None:
            return self.by_reference(call)
        written = False
        try:
            made = run_steps(program, given)
            written = program.writes
            return self.handles(call, made)
        except BaseException as error:
            note_writes(error, written)
            if getattr(error, "inputs_written", False) or not isinstance(error, Exception):
                raise
            return self.run_again(call, error)

    def buffers(self, call: ProgramRun) -> list[Any] | None:
        """The arguments as buffers and numbers; None if one of them has failed."""
        return tensors_of(call.arguments)

    def handles(self, call: ProgramRun, made: list[Any]) -> list[BackendData]:
        """Handles for the results, which are `made`."""
        return filled(call.device, call.types, corrected(call, made))

    def run_again(self, call: ProgramRun, error: Exception) -> list[BackendData]:
        """Run a program whose compiled code failed, by the reference: it finds the op and line."""
        return self.by_reference(call)

    def by_reference(self, call: ProgramRun) -> list[BackendData]:
        """Run all of a program by eager's kernels: what depends on an op that fails, fails."""
        return run_reference(call.program.reference, call.arguments, call.types, call.device)

    def computation_text(self, computation: Computation) -> str:
        text: str = computation.program.text(self.why_not)
        return text

    # -- graphs in the disk cache ------------------------------------------------------------------

    def dump_code(self, code: Compiled) -> bytes | None:
        """Serialize the compiled code of a piece; None if that is impossible."""
        return None

    def load_code(
        self, saved: bytes, piece: Piece, program: Program
    ) -> tuple[Compiled, Callable[[], str]]:
        """Restore compiled code and its text, from the bytes of `dump_code`."""
        raise NotImplementedError(f"backend {self.name!r} keeps no compiled graphs")

    def dump(self, computation: Computation) -> bytes | None:
        """The serialized steps; None if compiling some failed, as it may succeed next time."""
        program = computation.program
        for step in program.steps:
            if isinstance(step, Instruction) and not self.runs_eagerly(step.node):
                return None
        return dump_program(program, self.dump_code)

    def load(self, computation: Computation, saved: bytes) -> Computation:
        self.load_program(computation.program, saved)
        return computation

    def load_program(self, program: Program, saved: bytes) -> None:
        """Give a lowered program the steps of a saved one."""
        load_program(program, saved, self.load_code)
        self.by_eager(step for step in program.steps if isinstance(step, Instruction))
        self.complete(program)
