"""Cuts a graph into pieces to compile, with the instructions between them that run alone.

An instruction that cannot be compiled splits the graph. Instructions are put in an order that makes
few pieces: all that can be computed before the first lone instruction is one piece, all that can be
computed after it and before the next another. Where parts of a piece repeat, each copy is a piece
of its own (`torpor.backends.fx.repeats`). A piece larger than `max_nodes` is cut. What updates
donated parameters comes last (`torpor.backends.fx.commit`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, Final

import torch

from torpor.backends.fx.commit import updates
from torpor.backends.fx.overwriting import unsafe
from torpor.backends.fx.repeats import Part, is_view, parts, with_views
from torpor.backends.fx.trace import PACKED, Piece, is_number
from torpor.backends.reference.lowering import Instruction, registers_in

Step = Piece | Instruction
Alone = Callable[[Instruction], bool]
NOTHING_DONATED: Final[Mapping[int, int]] = MappingProxyType({})


def cut(
    instructions: Sequence[Instruction],
    results: Iterable[int],
    types: dict[int, Any],
    max_nodes: int,
    alone: Alone,
    repeats_on: torch.device | None = None,
    donated: Mapping[int, int] = NOTHING_DONATED,
) -> list[Step]:
    """The steps that compute `results`: pieces, and instructions that run alone.

    Given the device `repeats_on`, what repeats is cut so that it may be compiled once for it.
    `donated` are parameters that results are written over, when all that may fail has run.
    """
    results = list(results)
    late = updates(instructions, results, donated, alone)
    early = [instruction for instruction in instructions if instruction not in late]

    def parts_of(group: Sequence[Instruction]) -> list[Part]:
        found = [Part(list(group))] if repeats_on is None else parts(group, types, repeats_on)
        return [chunk for part in found for chunk in _chunks(part, max_nodes)]

    runs: list[Instruction | Part] = []
    for lone, group in _ordered(early, alone):
        runs += group if lone else parts_of(group)
    computing = len(runs)
    if late:
        views = [i for i in early if is_view(i) and not alone(i)]
        found = parts_of([instruction for instruction in instructions if instruction in late])
        runs += [_with_views_of(part, views) for part in found]
    return _steps(runs, computing, set(results), types)


def _with_views_of(part: Part, views: list[Instruction]) -> Part:
    """`part`, which computes for itself those of `views` that it reads."""
    *_, found = with_views([views, [*part.borrowed, *part.instructions]])
    return replace(part, borrowed=[*found.borrowed, *part.borrowed])


def _steps(
    runs: Sequence[Instruction | Part], computing: int, needed: set[int], types: dict[int, Any]
) -> list[Step]:
    """Parts as pieces; those after the first `computing` ones may write over parameters."""
    steps: list[Step] = []
    copies: dict[tuple[bool, int], list[Piece]] = {}
    for number, run in reversed(list(enumerate(runs))):
        if isinstance(run, Instruction):
            steps.append(run)
        else:
            piece = _piece(run, needed, types)
            piece.commits = number >= computing
            steps.append(piece)
            if run.repeat is not None:
                copies.setdefault((piece.commits, run.repeat), []).append(piece)
        needed.update(read_by(steps[-1]))
    for pieces in copies.values():
        _leave_the_same(pieces)
    return steps[::-1]


def _leave_the_same(copies: list[Piece]) -> None:
    """Let all copies leave behind what most of them do: one that differs is compiled by itself."""
    made = [[r for i in piece.instructions for r in i.outputs] for piece in copies]
    if len({len(registers) for registers in made}) > 1:
        return
    left = Counter(
        place
        for piece, registers in zip(copies, made, strict=True)
        for place, register in enumerate(registers)
        if register in piece.outputs
    )
    common = [place for place, times in left.items() if 2 * times >= len(copies)]
    for piece, registers in zip(copies, made, strict=True):
        piece.outputs = sorted({*piece.outputs, *(registers[place] for place in common)})


def _ordered(
    instructions: Sequence[Instruction], alone: Alone
) -> list[tuple[bool, list[Instruction]]]:
    """Groups in an order that can be run: `(False, to compile together)`, `(True, alone)`, ..."""
    levels: dict[int, tuple[list[Instruction], list[Instruction]]] = {}
    made_alone: dict[int, int] = {}  # register -> the level after which a piece may read it
    made: dict[int, int] = {}  # register -> its level
    drawn = 0  # the level of the last draw: random numbers are drawn in the program's order
    for instruction in instructions:
        read, lone = registers_in(instruction.args), alone(instruction)
        level = max((made.get(r, 0) for r in read), default=0)
        if not lone:
            level = max((level, *(made_alone[r] + 1 for r in read if r in made_alone)))
        elif instruction.spec.draws(instruction.args):
            drawn = level = max(level, drawn)
        levels.setdefault(level, ([], []))[lone].append(instruction)
        made.update(dict.fromkeys(instruction.outputs, level))
        if lone:
            made_alone.update(dict.fromkeys(instruction.outputs, level))
    groups = [(bool(lone), levels[n][lone]) for n in sorted(levels) for lone in (0, 1)]
    return [(lone, group) for lone, group in groups if group]


def _chunks(part: Part, max_nodes: int) -> Iterable[Part]:
    """`part` in parts of nearly equal length, none longer than `max_nodes`."""
    whole = part.instructions
    if len(whole) <= max_nodes:
        return [part]
    chunks = -(-len(whole) // max_nodes)
    length = -(-len(whole) // chunks)
    pieces = (whole[start : start + length] for start in range(0, len(whole), length))
    return list(with_views([part.borrowed, *pieces]))[1:]


def _piece(part: Part, needed: set[int], types: dict[int, Any]) -> Piece:
    instructions = [*part.borrowed, *part.instructions]
    made = {register for instruction in instructions for register in instruction.outputs}
    read = {r: None for i in instructions for r in registers_in(i.args) if r not in made}
    kinds = {kind: [r for r in read if _kind(types[r]) is kind] for kind in PACKED}
    left = {register for instruction in part.instructions for register in instruction.outputs}
    return Piece(
        instructions=instructions,
        inputs=[register for register in read if not is_number(types[register])],
        numbers={kind: registers for kind, registers in kinds.items() if registers},
        outputs=sorted(left & needed),
        donated={},
    )


def _kind(type_: Any) -> type | None:
    return type_.kind if is_number(type_) else None


def donate(steps: Sequence[Step], aliases: dict[int, int]) -> dict[int, int]:
    """Let pieces write results over donated parameters; the rest is copied when all has run.

    A piece may do so if nothing fails after it (`Piece.commits`), it makes the result, and no step
    after it reads the parameter.
    """
    rest, copied = dict(aliases), dict[int, int]()
    read_later: set[int] = set()
    for step in reversed(steps):
        if isinstance(step, Piece) and step.commits:
            made = set(step.outputs)
            for parameter, result in list(rest.items()):
                if result in made and parameter not in read_later:
                    step.donated[parameter] = rest.pop(parameter)
                    if parameter not in step.inputs:
                        step.inputs.append(parameter)
            copied |= {parameter: step.donated.pop(parameter) for parameter in unsafe(step)}
        read_later.update(read_by(step))
    return rest | copied


def read_by(step: Step) -> list[int]:
    """The registers a step reads."""
    if isinstance(step, Instruction):
        return registers_in(step.args)
    return [*step.inputs, *(r for registers in step.numbers.values() for r in registers)]


def made_by(step: Step) -> list[int]:
    """The registers a step leaves behind."""
    return step.outputs
