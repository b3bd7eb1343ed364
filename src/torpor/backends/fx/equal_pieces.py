"""When two pieces are equal up to renaming of registers, and the compiled code they then share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

import torch

from torpor.backends.blocks.program import Compiled, Piece
from torpor.backends.reference.lowering import Register
from torpor.ir.node import Key
from torpor.ir.types import TensorType
from torpor.symbols.expressions import Condition


@dataclass(frozen=True, slots=True)
class Shared:
    """Code compiled for a piece, reused for all equal ones."""

    run: Compiled
    text: Callable[[], str]
    checked: bool
    layouts: dict[int, TensorType]  # by position among the outputs
    conditions: tuple[Condition, ...]  # on sizes


class SharedPieces(OrderedDict[Key, Shared]):
    """The most recently compiled pieces, by key."""

    KEPT: Final = 256

    def __setitem__(self, key: Key, shared: Shared) -> None:
        super().__setitem__(key, shared)
        while len(self) > self.KEPT:
            self.popitem(last=False)


def key_of(piece: Piece, types: dict[int, Any], device: torch.device) -> Key:
    """The key of a piece: everything compilation depends on, registers renumbered by first use."""
    names: dict[int, int] = {}

    def name(register: int) -> int:
        return names.setdefault(register, len(names))

    def named(registers: Iterable[int]) -> tuple[int, ...]:
        return tuple(map(name, registers))

    inputs = named(piece.inputs)
    numbers = tuple((kind, named(registers)) for kind, registers in piece.numbers.items())
    read = tuple(map(types.__getitem__, piece.inputs))
    steps = tuple(
        (
            instruction.node.op,
            frozen(instruction.args, name),
            tuple(_type(arg) for arg in instruction.node.args),
            tuple(value.type for value in instruction.node.outputs),
            named(instruction.outputs),
        )
        for instruction in piece.instructions
    )
    outputs = tuple((name(r), types[r], r in piece.free) for r in piece.outputs)
    donated = tuple((name(r), name(output)) for r, output in piece.donated.items())
    return (device, inputs, read, numbers, steps, outputs, donated, tuple(piece.sizes))


def _type(arg: Any) -> Any:
    return getattr(arg, "type", None)


def frozen(args: Iterable[Any], name: Callable[[int], Any]) -> tuple[Any, ...]:
    """Arguments as a hashable key: registers via `name`, numbers by type and exact bits."""
    return tuple([_frozen(arg, name) for arg in args])


def _frozen(arg: Any, name: Callable[[int], Any]) -> Any:
    kind = type(arg)
    if kind is Register:
        return (Register, name(arg))
    if kind is list:
        return tuple([_frozen(item, name) for item in arg])
    if kind is float:
        return (float, arg.hex())
    if kind is complex:
        return (complex, arg.real.hex(), arg.imag.hex())
    return (kind, arg)
