"""Lowering for the reference backend: one instruction per node, on numbered registers.

An op that writes gets a copy of its argument with the same strides, so that the same kernel runs as
in eager. The copy is elided where the old contents are dead.
"""

from __future__ import annotations

from typing import Any

import torch

from torpor.backend.device import BackendDevice
from torpor.backend.lowering import Computation, LoweringContext
from torpor.ir.node import SIZE, Node, Value
from torpor.ir.types import type_at
from torpor.ops.spec import OpSpec, ReturnKind, spec_of
from torpor.symbols.expressions import Expr, Symbol


class Register(int):
    """A register number, distinguishable from a plain int among arguments."""

    __slots__ = ()


class Sized:
    """An argument computed from sizes at run time."""

    __slots__ = ("expr", "registers")

    def __init__(self, expr: Expr, registers: dict[Symbol, int]) -> None:
        self.expr = expr
        self.registers = registers  # of the sizes

    def value(self, env: Any) -> Any:
        """The number, given the contents of registers."""
        return self.expr.at({s: env[self.registers[s]] for s in self.expr.symbols})

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sized) and self.expr is other.expr

    def __hash__(self) -> int:
        return hash(self.expr)

    def __repr__(self) -> str:
        return repr(self.expr)


class Instruction:
    """A node: the op to call, the registers to call it with, and those that die after it."""

    __slots__ = (
        "args", "checked", "checked_for", "dead", "node", "outputs", "resized", "reuse", "sizes",
        "spec",
    )  # fmt: skip

    def __init__(self, node: Node, spec: OpSpec, args: list[Any], outputs: list[int]) -> None:
        self.node = node
        self.spec = spec
        self.args = args  # with registers for values
        self.outputs = outputs
        self.reuse: set[int] = set()  # written arguments whose old contents are dead
        self.resized = _resized(node, spec)
        self.dead: list[int] = []
        self.checked: list[int] | None = None  # outputs that need new strides; set by the first run
        self.checked_for: list[int] = []  # the sizes for which that holds
        self.sizes: dict[Symbol, int] = {}  # registers of sizes, if the graph has any

    def copy(self) -> Instruction:
        """A copy without the results of checks."""
        made = Instruction(self.node, self.spec, self.args, self.outputs)
        made.sizes = self.sizes
        return made

    @property
    def read(self) -> list[int]:
        """The registers it reads."""
        return registers_in(self.args)

    @property
    def instructions(self) -> list[Instruction]:
        """Itself: a step of one instruction."""
        return [self]

    def output_types(self, env: Any) -> list[Any]:
        """The types of its outputs in a run, given the contents of registers."""
        types = [value.type for value in self.node.outputs]
        if not self.sizes:
            return types
        sizes = {symbol: env[register] for symbol, register in self.sizes.items()}
        return [type_at(type_, sizes) for type_ in types]


def _resized(node: Node, spec: OpSpec) -> set[int]:
    """`out=` arguments that the op resizes; eager's warning was issued when recording."""
    if not node.op.name.endswith("out"):
        return set()
    written = node.outputs[-len(spec.mutated) :]
    return {
        position
        for position, output in zip(spec.mutated, written, strict=False)
        if type(node.args[position]) is Value
        and node.args[position].type.shape != output.type.shape
    }


class ReferenceLowering(LoweringContext):
    """Numbers registers and lists instructions."""

    def __init__(self, name: str, device: BackendDevice, *args: Any) -> None:
        super().__init__(name, device, *args)
        self.instructions: list[Instruction] = []
        self.registers = 0
        self.sizes: dict[Symbol, int] = {}

    def _register(self) -> Register:
        self.registers += 1
        return Register(self.registers - 1)

    def emit_parameter(self, value: Value, position: int) -> Register:
        register = self._register()
        if value.node.op is SIZE:
            self.sizes[value.node.args[0]] = register
        return register

    def lower(self, node: Node) -> None:
        spec = spec_of(node.op.target)
        args = [self._argument(arg) for arg in node.args]
        outputs: list[int] = []
        for output in node.outputs:
            self.emitted[output] = register = self._register()
            outputs.append(register)
        instruction = Instruction(node, spec, args, outputs)
        instruction.sizes = self.sizes
        self.instructions.append(instruction)

    def _argument(self, arg: Any) -> Any:
        if type(arg) is Value:
            return self.emitted[arg]
        if type(arg) is tuple:
            return [self._argument(item) for item in arg]
        if type(arg) is Expr:
            return Sized(arg, self.sizes)
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
    # ops whose schema declares a fresh result that may still alias an argument
    {"lift", "contiguous", "resolve_conj", "resolve_neg", "positive", "reshape", "flatten", "to",
     "wait"}
)  # fmt: skip


def plan_memory(instructions: list[Instruction], parameters: int, results: list[int]) -> None:
    """Find where each register dies, and which writes may happen in place."""
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
    """The registers among the arguments of an instruction, including those in lists."""
    found: list[int] = []
    for arg in args:
        if type(arg) is Register:
            found.append(arg)
        elif type(arg) is list:
            found.extend(item for item in arg if type(item) is Register)
    return found
