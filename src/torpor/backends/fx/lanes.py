"""Instructions on lists of tensors, taken apart into lanes and put together again.

before:  a' b' = _foreach_mul_([a, b], s)        after:  a'  = _foreach_mul_([a], s)
         a" b" = _foreach_add_([a', b'], 1)              a"  = _foreach_add_([a'], 1)
                                                         b'  = _foreach_mul_([b], s)
                                                         b"  = _foreach_add_([b'], 1)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from torpor.backends.reference.lowering import Instruction, registers_in
from torpor.ir.node import Node


class Lanes(Instruction):
    """Some positions of the lists that an instruction works on."""

    __slots__ = ("lanes", "whole")

    def __init__(self, whole: Instruction, lanes: Sequence[int]) -> None:
        self.whole = whole
        self.lanes = list(lanes)
        super().__init__(
            _part_of(whole.node, lanes),
            whole.spec,
            [[arg[lane] for lane in lanes] if type(arg) is list else arg for arg in whole.args],
            [whole.outputs[lane] for lane in lanes],
        )
        self.sizes = whole.sizes


def _part_of(node: Node, lanes: Sequence[int]) -> Node:
    """A node for some of the lanes, which no table knows."""
    args = tuple(
        tuple(arg[lane] for lane in lanes) if type(arg) is tuple else arg for arg in node.args
    )
    types = tuple(node.outputs[lane].type for lane in lanes)
    return Node(node.op, args, args, types, node.site)


@dataclass(slots=True)
class Unit:
    """An instruction, or one lane of it."""

    place: int  # of the instruction
    instruction: Instruction
    lane: int | None
    args: list[Any]
    outputs: list[int]


def in_lanes(instructions: Sequence[Instruction]) -> list[Unit]:
    """Instructions with lists taken apart, and what belongs to one lane put together."""
    ordered: list[Unit] = []
    strands = _Strands()
    for place, instruction in enumerate(instructions):
        lanes = _lanes_of(instruction)
        if lanes:
            for lane in range(lanes):
                strands.add(_lane(place, instruction, lane))
            continue
        unit = Unit(place, instruction, None, instruction.args, instruction.outputs)
        if strands.made.keys() & set(registers_in(unit.args)):
            ordered += strands.taken()
        ordered.append(unit)
    return ordered + strands.taken()


def _lanes_of(instruction: Instruction) -> int:
    """How many lanes an instruction has; 0 if it cannot be taken apart."""
    if not instruction.spec.target._opname.startswith("_foreach_"):
        return 0
    lengths = {len(arg) for arg in instruction.args if type(arg) is list}
    length = len(instruction.outputs)
    return length if length > 1 and lengths == {length} else 0


def _lane(place: int, instruction: Instruction, lane: int) -> Unit:
    args = [[arg[lane]] if type(arg) is list else arg for arg in instruction.args]
    return Unit(place, instruction, lane, args, [instruction.outputs[lane]])


class _Strands:
    """Lanes that wait; those that read what others made are of one strand with them."""

    def __init__(self) -> None:
        self.made: dict[int, int] = {}  # register -> its strand, or one that was joined to it
        self.joined: list[int] = []  # strand -> itself, or the strand it was joined to
        self.units: list[list[Unit]] = []

    def add(self, unit: Unit) -> None:
        found = {self._strand(self.made[r]) for r in registers_in(unit.args) if r in self.made}
        strand = min(found, default=len(self.units))
        if not found:
            self.joined.append(strand)
            self.units.append([])
        for other in found - {strand}:
            self.joined[other] = strand
            self.units[strand] += self.units[other]
            self.units[other] = []
        self.units[strand].append(unit)
        self.made[unit.outputs[0]] = strand

    def _strand(self, strand: int) -> int:
        while self.joined[strand] != strand:
            self.joined[strand] = strand = self.joined[self.joined[strand]]
        return strand

    def taken(self) -> list[Unit]:
        """All that waited, strand by strand, each in the order of its instructions."""
        units = [u for strand in self.units for u in sorted(strand, key=lambda unit: unit.place)]
        self.__init__()  # type: ignore[misc]  # empty again
        return units


def whole_again(units: Sequence[Unit]) -> list[Instruction]:
    """Instructions for the units: lanes of one instruction are one instruction again."""
    return list(_whole_again(units))


def _whole_again(units: Sequence[Unit]) -> Iterator[Instruction]:
    waiting: list[Unit] = []
    for unit in units:
        if unit.lane is None:
            yield from _joined(waiting)
            waiting = []
            yield unit.instruction
        else:
            waiting.append(unit)
    yield from _joined(waiting)


def _joined(units: Sequence[Unit]) -> Iterator[Instruction]:
    lanes: dict[int, list[int]] = {}
    instructions: dict[int, Instruction] = {}
    for unit in units:
        assert unit.lane is not None
        lanes.setdefault(unit.place, []).append(unit.lane)
        instructions[unit.place] = unit.instruction
    for place in sorted(lanes):
        whole = instructions[place]
        chosen = sorted(lanes[place])
        yield whole if len(chosen) == len(whole.outputs) else Lanes(whole, chosen)
