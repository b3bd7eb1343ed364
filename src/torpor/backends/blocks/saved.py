"""Serializes compiled graphs: the partition, and the code of the pieces.

Instructions are not stored: lowering the same graph makes the same ones in the same order, so they
are referred to by index. Code that several pieces share is stored once. For a graph with symbols,
the guards on its sizes are stored too (`torpor.symbols.serialize`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

from torpor.backend.pack import pack, unpack
from torpor.backends.blocks.program import (
    PACKED,
    Compiled,
    Piece,
    Program,
    Step,
)
from torpor.backends.blocks.registers import PartialInstruction
from torpor.backends.reference.lowering import Instruction
from torpor.ir.types import SymbolicType, TensorType
from torpor.symbols.expressions import Size
from torpor.symbols.serialize import (
    assumption,
    common_names,
    condition_text,
    deserialize_size,
    serialize_size,
)

VERSION: Final = 3
_KINDS: Final = {kind.__name__: kind for kind in PACKED}

DumpCode = Callable[[Compiled], bytes | None]
LoadCode = Callable[[bytes, Piece, Program], tuple[Compiled, Callable[[], str]]]


class NotSaved(Exception):
    """The saved bytes do not fit this graph."""


def dump_program(program: Program, dump_code: DumpCode) -> bytes | None:
    """Serialize a compiled program; None if some of its code cannot be."""
    places = {id(i.outputs): place for place, i in enumerate(program.reference[0])}
    codes: dict[int, int] = {}
    parts: dict[str, bytes] = {"steps": b""}
    steps: list[Any] = []
    for step in program.steps:
        if isinstance(step, Instruction):
            steps.append(_known_as(step, places))
            continue
        number = codes.setdefault(id(step.run), len(codes))
        if f"code {number}" not in parts:
            code = dump_code(step.run)
            if code is None:
                return None
            parts[f"code {number}"] = code
        steps.append(_piece_facts(step, places, number))
    facts = {
        "version": VERSION,
        "steps": steps,
        "donated": list(program.donated.items()),
        "copied": list(program.copied.items()),
        "layouts": list(_layouts(program)),
        "conditions": [condition_text(one, program.sizes) for one in program.conditions],
    }
    parts["steps"] = json.dumps(facts).encode()
    return pack(parts)


def _layouts(program: Program) -> Iterator[tuple[int, list[Any]]]:
    """Registers whose strides differ from their type's, with those strides."""
    for instruction in program.reference[0]:
        for register, value in zip(instruction.outputs, instruction.node.outputs, strict=True):
            type_ = program.types[register]
            if type_ is not value.type:
                steps = type_.steps if type(type_) is SymbolicType else type_.stride
                yield register, [serialize_size(step, program.sizes) for step in steps]


def _piece_facts(piece: Piece, places: dict[int, int], code: int) -> dict[str, Any]:
    return {
        "code": code,
        "instructions": [_known_as(i, places) for i in piece.instructions],
        "inputs": piece.inputs,
        "numbers": [[kind.__name__, registers] for kind, registers in piece.numbers.items()],
        "outputs": piece.outputs,
        "donated": list(piece.donated.items()),
        "checked": piece.checked,
    }


def _known_as(instruction: Instruction, places: dict[int, int]) -> int | list[Any]:
    """The index of an instruction, or the index and items of a part of one."""
    if isinstance(instruction, PartialInstruction):
        return [places[id(instruction.whole.outputs)], instruction.positions]
    return places[id(instruction.outputs)]


def _known(name: int | list[Any], instructions: Sequence[Instruction]) -> Instruction:
    """The instruction that `_known_as` refers to."""
    if isinstance(name, int):
        return instructions[name]
    place, positions = name
    return PartialInstruction(instructions[place], positions)


def load_program(program: Program, saved: bytes, load_code: LoadCode) -> None:
    """Give a lowered program the steps of a saved one."""
    parts = unpack(saved)
    facts = json.loads(parts["steps"])
    if facts["version"] != VERSION:
        raise NotSaved(f"version {facts['version']}, not {VERSION}")
    if dict(facts["donated"]) != program.donated:
        raise NotSaved("other buffers are written over")
    symbols = common_names(program.sizes)
    program.conditions = [assumption(text, symbols) for text in facts["conditions"]]
    instructions = [i.copy() for i in program.reference[0]]
    for register, written in facts["layouts"]:
        stride = tuple([deserialize_size(step, symbols) for step in written])
        program.types[register] = _with_strides(program.types[register], stride)
    codes: dict[int, tuple[Compiled, Callable[[], str]]] = {}
    steps: list[Step] = []
    for step in facts["steps"]:
        if not isinstance(step, dict):
            steps.append(_known(step, instructions))
            continue
        piece = _piece(step, instructions)
        piece.sizes = program.sizes
        number = step["code"]
        if number not in codes:
            codes[number] = load_code(parts[f"code {number}"], piece, program)
        piece.run, piece.text = codes[number]
        steps.append(piece)
    program.steps = steps
    program.copied = dict(facts["copied"])


def _with_strides(type_: Any, stride: tuple[Size, ...]) -> TensorType:
    """The type with these strides, and offset 0."""
    plain = TensorType.of((), (), type_.dtype, type_.device)
    sizes = type_.sizes if type(type_) is SymbolicType else type_.shape
    return SymbolicType.with_sizes(sizes, stride, 0, plain)


def _piece(facts: dict[str, Any], instructions: Sequence[Instruction]) -> Piece:
    return Piece(
        instructions=[_known(name, instructions) for name in facts["instructions"]],
        inputs=facts["inputs"],
        numbers={_KINDS[kind]: registers for kind, registers in facts["numbers"]},
        outputs=facts["outputs"],
        donated=dict(facts["donated"]),
        checked=facts["checked"],
    )
