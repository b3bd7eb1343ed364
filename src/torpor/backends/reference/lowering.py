"""Lowering for the reference backend: one instruction per node, on numbered registers.

An op that writes to its arguments writes to a copy with the same strides, so that it runs the
very kernel eager would run. The copy is saved where nobody will look at the old contents again.
"""

from __future__ import annotations

from typing import Any

import torch

from torpor.backend.device import BackendDevice
from torpor.backend.lowering import Computation, LoweringContext
from torpor.ir.node import Node, Value
from torpor.ops.spec import OpSpec, ReturnKind, spec_of


class Register(int):
    """The number of a register, told apart from a plain number among arguments."""

    __slots__ = ()


class Instruction:
    """One node: what to call, with which registers, and which registers die after it."""

    __slots__ = ("args", "checked", "dead", "node", "outputs", "reuse", "spec")

    def __init__(self, node: Node, spec: OpSpec, args: list[Any], outputs: list[int]) -> None:
        self.node = node
        self.spec = spec
        self.args = args  # registers in the place of values
        self.outputs = outputs
        self.reuse: set[int] = set()  # written arguments whose old contents nobody needs
        self.dead: list[int] = []
        self.checked: list[int] | None = None  # outputs that need new strides, once known


class ReferenceLowering(LoweringContext):
    """Numbers registers and lists instructions."""

    def __init__(self, name: str, device: BackendDevice, *args: Any) -> None:
        super().__init__(name, device, *args)
        self.instructions: list[Instruction] = []
        self.registers = 0

    def _register(self) -> Register:
        self.registers += 1
        return Register(self.registers - 1)

    def emit_parameter(self, value: Value, position: int) -> Register:
        return self._register()

    def lower(self, node: Node) -> None:
        spec = spec_of(node.op.target)
        args = [self._argument(arg) for arg in node.args]
        outputs: list[int] = []
        for output in node.outputs:
            self.emitted[output] = register = self._register()
            outputs.append(register)
        self.instructions.append(Instruction(node, spec, args, outputs))

    def _argument(self, arg: Any) -> Any:
        if type(arg) is Value:
            return self.emitted[arg]
        if type(arg) is tuple:
            return [self._argument(item) for item in arg]
        if type(arg) is torch.device and arg.type == "lazy":
            return self.device.torch_device
        return arg

    def build(self) -> Computation:
        computation = super().build()
        results = [self.emitted[value] for value in self.results]
        plan_memory(self.instructions, len(self.parameters), results)
        computation.program = (self.instructions, self.registers, results)
        return computation


ALIASING = frozenset(
    # ops whose result is declared fresh and shares memory all the same
    {"lift", "contiguous", "resolve_conj", "resolve_neg", "positive", "reshape", "flatten", "to"}
)  # fmt: skip


def plan_memory(instructions: list[Instruction], parameters: int, results: list[int]) -> None:
    """Find where each register dies, and which writes may go into the old memory."""
    buffer_of: dict[int, int] = {register: register for register in range(parameters)}
    owned: set[int] = set()
    for instruction in instructions:
        _assign_buffers(instruction, buffer_of, owned)
    last_use: dict[int, int] = {}
    buffer_last_use: dict[int, int] = {}
    for position, instruction in enumerate(instructions):
        for register in registers_in(instruction.args):
            last_use[register] = position
            buffer_last_use[buffer_of[register]] = position
    for register in results:
        last_use[register] = buffer_last_use[buffer_of[register]] = len(instructions)
    for position, instruction in enumerate(instructions):
        used = {*registers_in(instruction.args), *instruction.outputs}
        instruction.dead = [r for r in used if last_use.get(r, position) == position]
        for argument in instruction.spec.mutated:
            written = instruction.args[argument]
            if type(written) is Register and _may_reuse(
                written, instruction, position, buffer_of, owned, buffer_last_use
            ):
                instruction.reuse.add(argument)


def _may_reuse(
    written: int,
    instruction: Instruction,
    position: int,
    buffer_of: dict[int, int],
    owned: set[int],
    buffer_last_use: dict[int, int],
) -> bool:
    buffer = buffer_of[written]
    sharing = [r for r in registers_in(instruction.args) if buffer_of[r] == buffer]
    return buffer in owned and len(sharing) == 1 and buffer_last_use[buffer] == position


def _assign_buffers(instruction: Instruction, buffer_of: dict[int, int], owned: set[int]) -> None:
    spec = instruction.spec
    views = [r.argument for r in spec.returns if r.kind is ReturnKind.VIEW]
    if spec.target._opname in ALIASING:
        views = [0]
    for register in instruction.outputs:
        if views and type(instruction.args[views[0]]) is Register:
            buffer_of[register] = buffer_of[instruction.args[views[0]]]
        else:
            buffer_of[register] = register
            owned.add(register)


def registers_in(args: list[Any]) -> list[int]:
    """The registers among the arguments of an instruction, lists looked into."""
    found: list[int] = []
    for arg in args:
        if type(arg) is Register:
            found.append(arg)
        elif type(arg) is list:
            found.extend(item for item in arg if type(item) is Register)
    return found
