"""Runs reference programs: eager kernels, op by op, in recorded order.

A failing op does not stop the program: ops that depend on it fail with its error, all others are
computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torpor import _torch
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backends.kernels import copies, outputs_of
from torpor.backends.layout import own_memory, storages_of, with_layout
from torpor.backends.reference.lowering import Instruction, Register, Sized
from torpor.errors import StepError, annotate
from torpor.ir.types import ScalarType, TensorType
from torpor.observe.lines import line_of
from torpor.text.printer import print_node


class FailedRegister:
    """The content of a register whose op failed."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


def run(
    program: tuple[list[Instruction], int, list[int]],
    arguments: Sequence[Any],
    types: Sequence[TensorType],
    device: BackendDevice,
) -> list[BackendData]:
    """Run a program; returns one handle per result, with an error where it failed."""
    instructions, registers, results = program
    env: list[Any] = [_load(argument) for argument in arguments]
    failed = any(type(value) is FailedRegister for value in env)
    env += [None] * (registers - len(env))
    with _torch.kernels():
        for instruction in instructions:
            failure = _failed_operand(instruction, env) if failed else None
            try:
                if failure is None:
                    step(instruction, env)
            except Exception as error:
                failure = FailedRegister(_explain(error, instruction))
            if failure is not None:
                failed = True
                for register in instruction.outputs:
                    env[register] = failure
            for register in instruction.dead:
                env[register] = None
    taken = storages_of(arguments)
    return [_store(env[r], t, device, taken) for r, t in zip(results, types, strict=True)]


def _load(argument: Any) -> Any:
    if not isinstance(argument, BackendData):
        return argument
    if argument.error is not None:
        return FailedRegister(argument.error)
    return argument.tensor


def _store(value: Any, type_: TensorType, device: BackendDevice, taken: set[int]) -> BackendData:
    """A handle for a result: no result shares memory with another or with an input."""
    if type(value) is FailedRegister:
        data = BackendData(device, type_)
        data.error = value.error
        return data
    if value is None:  # an undefined tensor that type inference did not predict
        raise StepError(f"eager made no tensor where {type_!r} was promised")
    return BackendData(device, type_, own_memory(value, type_, taken))


def _failed_operand(instruction: Instruction, env: list[Any]) -> FailedRegister | None:
    for arg in instruction.args:
        for item in arg if type(arg) is list else (arg,):
            if type(item) is Register and type(env[item]) is FailedRegister:
                return env[item]  # type: ignore[no-any-return]  # registers hold anything
    return None


def _explain(error: Exception, instruction: Instruction) -> BaseException:
    node = instruction.node
    annotated = annotate(error, node.op.name, line_of(node), print_node(node))
    annotated._torpor_node = node  # type: ignore[attr-defined]  # marks a foreign exception
    return annotated


def step(instruction: Instruction, env: list[Any]) -> None:
    """Run one instruction on the registers in `env`."""
    spec = instruction.spec
    args: list[Any] = [
        env[a] if type(a) is Register
        else [
            env[i] if type(i) is Register else i.value(env) if type(i) is Sized else i for i in a
        ] if type(a) is list
        else a.value(env) if type(a) is Sized
        else a
        for a in instruction.args
    ]  # fmt: skip
    for position in spec.mutated:
        if position in instruction.resized:
            args[position] = args[position].new_empty(0)
        elif position not in instruction.reuse:
            args[position] = copies(args[position])
    positional, keywords = spec.call_arguments(args)
    result = spec.target(*positional, **keywords)
    outputs = outputs_of(spec, result, args)
    sizes = [env[register] for register in instruction.sizes.values()]
    if instruction.checked is None or instruction.checked_for != sizes:
        instruction.checked, instruction.checked_for = _check(instruction, outputs, env), sizes
    if instruction.checked:
        types = instruction.output_types(env)
        for position in instruction.checked:
            outputs[position] = with_layout(outputs[position], types[position])
    for register, output in zip(instruction.outputs, outputs, strict=True):
        env[register] = output


def _check(instruction: Instruction, outputs: list[Any], env: list[Any]) -> list[int]:
    """Check outputs against their recorded types; returns those that need other strides."""
    wrong = []
    types = instruction.output_types(env)
    for position, (type_, tensor) in enumerate(zip(types, outputs, strict=True)):
        if type_ is None or tensor is None or type(type_) is ScalarType:
            continue
        if tuple(tensor.shape) != type_.shape or tensor.dtype != type_.dtype:
            raise StepError(
                f"type rule of {instruction.node.op.name} promised {type_!r}, "
                f"eager made {tensor.dtype} {tuple(tensor.shape)}"
            )
        if tensor.stride() != type_.stride and tensor.numel() > 1:
            wrong.append(position)
    return wrong
