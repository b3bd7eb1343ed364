"""Runs TorchScript programs: graphs by TorchScript's executor, the rest like the reference.

The first run also queries the output types of ops. If they differ from the recorded ones, or if an
op fails, the reference interpreter reruns the whole program: the arguments are unmodified, and it
reports which outputs failed, at which line, and computes the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from torpor import _torch, metrics
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backends.layout import own_memory, storages_of
from torpor.backends.reference import runtime as reference
from torpor.backends.reference.lowering import Instruction, Register
from torpor.backends.torchscript.lowering import ScriptPiece, ScriptProgram, remember_check
from torpor.ir.types import ScalarType, TensorType

COUNTERS = ("TorchScriptGraph", "TorchScriptOps", "TorchScriptFallback", "TorchScriptRerun")
"""Graphs compiled, ops run by TorchScript, ops run by eager's kernels, programs rerun."""


class TSData(BackendData):
    """A tensor or a number, as an input or output of a TorchScript graph."""

    __slots__ = ("scalar",)

    def __init__(
        self,
        device: BackendDevice,
        type_: TensorType,
        tensor: torch.Tensor | None = None,
        scalar: Any = None,
    ) -> None:
        super().__init__(device, type_, tensor)
        self.scalar = scalar  # a Python number, if made from one

    def filled(self) -> bool:
        return self.tensor is not None or self.scalar is not None

    def assign(self, other: BackendData) -> None:
        super().assign(other)
        self.scalar = other.scalar if isinstance(other, TSData) else None


class Unexpected(Exception):
    """An op's output type differs from the recorded one."""


def run(
    program: ScriptProgram,
    arguments: Sequence[Any],
    parameters: Sequence[Any],
    results: Sequence[TensorType],
    device: BackendDevice,
) -> list[BackendData]:
    """Run a program; returns one handle per result, with an error where it failed."""
    given = [_number_or_data(*pair) for pair in zip(arguments, parameters, strict=True)]
    if not any(isinstance(a, BackendData) and a.error is not None for a in given):
        try:
            return _run(program, given, results, device)
        except Exception:  # the reference finds the op, and computes the rest
            metrics.count("TorchScriptRerun")
    return _run_again(program, given, results, device)


def _run_again(
    program: ScriptProgram, arguments: list[Any], types: Sequence[TensorType], device: BackendDevice
) -> list[BackendData]:
    """Rerun a program with the reference, and memoize its checks."""
    results = reference.run(program.reference, arguments, types, device)
    for piece in program.pieces:
        for instruction in piece.asked:
            remember_check(instruction)
        if piece.asked:
            piece.function = None
    return results


def _number_or_data(argument: Any, type_: Any) -> Any:
    """A graph's argument: data made from a number become that number where it takes one."""
    if type(type_) is ScalarType and isinstance(argument, TSData):
        return argument.scalar
    return argument


def _run(
    program: ScriptProgram, arguments: list[Any], types: Sequence[TensorType], device: BackendDevice
) -> list[BackendData]:
    _, registers, results = program.reference
    env: list[Any] = [a.tensor if isinstance(a, BackendData) else a for a in arguments]
    env += [None] * (registers - len(env))
    with _torch.kernels(), _torch.script_as_drawn():
        for part in program.parts:
            if isinstance(part, ScriptPiece):
                _run_piece(part, env)
            else:
                _fall_back(part, env)
            for register in part.dead:
                env[register] = None
    taken = storages_of(arguments)
    pairs = zip(results, types, strict=True)
    return [TSData(device, t, own_memory(env[r], t, taken)) for r, t in pairs]


def _run_piece(piece: ScriptPiece, env: list[Any]) -> None:
    """Run a graph; after a successful first run, discard the version with type queries."""
    if piece.function is None:
        piece.load()
    assert piece.function is not None, "it was loaded"
    made = piece.function(*[_given(env, *pair) for pair in piece.inputs])
    if piece.asked:
        made, layouts, dtypes = made
        _check(piece, layouts, dtypes)
        piece.function = None
    for register, value in zip(piece.outputs, made, strict=True):
        env[register] = value
    metrics.count("TorchScriptOps", len(piece.instructions))


def _given(env: list[Any], source: Any, is_tensor: bool) -> Any:
    value = env[source] if type(source) is Register else source
    if not is_tensor or value is None or isinstance(value, torch.Tensor):
        return value
    return _torch.wrapped_number(value)


def _check(piece: ScriptPiece, layouts: list[list[int]], dtypes: list[int]) -> None:
    """Compare queried output types with the recorded ones."""
    answers = iter(zip(layouts[::2], layouts[1::2], dtypes, strict=True))
    for instruction in piece.asked:
        for type_ in _promises(instruction):
            size, stride, dtype = next(answers)
            if tuple(size) != type_.shape or dtype != _torch.script_dtype(type_.dtype):
                raise Unexpected(instruction.node.op.name)
            if tuple(stride) != type_.stride and type_.numel > 1:
                raise Unexpected(instruction.node.op.name)
        instruction.checked = []
        remember_check(instruction)


def _promises(instruction: Instruction) -> Iterator[TensorType]:
    return (v.type for v in instruction.node.outputs if type(v.type) is TensorType)


def _fall_back(instruction: Instruction, env: list[Any]) -> None:
    """Run an op that TorchScript cannot express with eager's kernel, and count it."""
    metrics.count("TorchScriptFallback")
    reference.step(instruction, env)
