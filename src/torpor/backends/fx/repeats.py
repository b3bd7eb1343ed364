"""Finds what repeats in a graph, such as the layers of a network, to have it compiled once.

Instructions are compared by op, attributes and types, not by the registers they use. Where the same
sequence of them stands several times in a row, forward, backward or in the optimizer, the graph is
cut so that each copy is a part of its own; `torpor.backends.fx.sharing` tells which parts are equal
once registers are renamed, and only that decides what is compiled.

Instructions on lists of tensors (`_foreach_add_` and its like) are first taken apart into lanes,
one for each position of the lists, and all that happens to one position is put together: an
optimizer's work on one layer then repeats as the layer itself does. Within a part, lanes become
lists again.

What a cut costs is weighed against what it saves, in seconds of compiling. A node takes a while to
compile; a part takes a while by itself; a call of a part takes some time in every run, and so does
a value that would not have been written to memory had the code not been cut there, however often it
is cut. How often a graph will run is a guess.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch

from torpor.backends.fx.lanes import Unit, in_lanes, whole_again
from torpor.backends.fx.sharing import frozen
from torpor.backends.reference.lowering import Instruction, registers_in
from torpor.ir.types import TensorType
from torpor.ops.spec import Mode, ReturnKind

NODE: Final = 0.03  # seconds to compile a node
PART: Final = 0.4  # seconds to compile a part, however small


@dataclass(frozen=True, slots=True)
class Costs:
    """What running a graph takes."""

    runs: int  # of a graph
    call: float  # seconds to call a part
    byte: float  # seconds to write it and read it again


COSTS: Final = {
    "cpu": Costs(10_000, 20e-6, 2 / 100e9),
    "cuda": Costs(50_000, 2e-6, 2 / 3e12),  # calls of a CUDA graph cost little
}

SEED: Final = 6  # nodes in a row that must be equal for a period to be looked at
PERIODS: Final = 24  # periods that are looked at


@dataclass(frozen=True, slots=True)
class Part:
    """Instructions to compile together."""

    instructions: list[Instruction]
    borrowed: list[Instruction] = field(default_factory=list)  # views other parts compute too
    repeat: int | None = None  # the repeat it is a copy of


@dataclass(frozen=True, slots=True)
class Repeat:
    """`count` copies of `length` units each, from `start` on."""

    start: int
    length: int
    count: int
    saved: float  # seconds

    @property
    def end(self) -> int:
        return self.start + self.length * self.count

    @property
    def borders(self) -> range:
        return range(self.start, self.end + 1, self.length)


def parts(
    instructions: Sequence[Instruction], types: dict[int, Any], device: torch.device
) -> list[Part]:
    """`instructions`, which are in an order that can be run, in parts, some of them equal."""
    units = _late(in_lanes(instructions))
    costs = COSTS.get(device.type, COSTS["cpu"])
    found = find_repeats(_tokens(units, types), _lost(units, types, costs.byte), costs)
    if not found:
        return [Part(list(instructions))]
    units, found = _rest_together(units, found)
    borders = sorted({0, len(units), *(b for repeat in found for b in repeat.borders)})
    spans = list(itertools.pairwise(borders))
    pieces = with_views(whole_again(units[a:b]) for a, b in spans)
    return [
        replace(part, repeat=next((r.start for r in found if r.start <= a < r.end), None))
        for part, (a, _) in zip(pieces, spans, strict=True)
    ]


def _late(units: Sequence[Unit]) -> list[Unit]:
    """The same units, with what is computed from parameters alone where it is first read.

    A dropout's mask then stands in its layer, wherever it was recorded, and fuses with the layer.
    """
    makers: dict[int, Unit] = {}  # of registers, which wait
    known: set[int] = set()  # registers that are made and do not wait
    ordered: list[Unit] = []

    def emit(unit: Unit) -> None:
        stack = [unit]
        while stack:
            waiting = next((makers[r] for r in registers_in(stack[-1].args) if r in makers), None)
            if waiting is not None:
                stack.append(waiting)
                continue
            ordered.append(stack.pop())
            for register in ordered[-1].outputs:
                makers.pop(register, None)

    for unit in units:
        read = registers_in(unit.args)
        if unit.lane is None and read and known.isdisjoint(read) and _can_wait(unit):
            makers.update(dict.fromkeys(unit.outputs, unit))
        else:
            known.update(unit.outputs)
            emit(unit)
    for unit in units:
        if any(register in makers for register in unit.outputs):
            emit(unit)
    return ordered


def _can_wait(unit: Unit) -> bool:
    return not _is_unfused(unit.instruction.spec.target._opname)


# -- repeats in a sequence of tokens ---------------------------------------------------------------


class Lost:
    """What cuts cost in each run, in seconds.

    `values` are those that cost if they are cut: `(first, last, cost)` for one that is cut by any
    border from `first` to `last`; a border stands before the unit of that number.
    """

    def __init__(self, values: Iterable[tuple[int, int, float]], units: int) -> None:
        self.values = list(values)
        self.units = units
        self.at = functools.cache(self._at)

    def _at(self, length: int) -> list[float]:
        """What each border costs where there is one `length` units before it, or none with 0."""
        steps = [0.0] * (self.units + 2)
        for first, last, cost in self.values:
            steps[first] += cost
            steps[(min(last, first + length - 1) if length else last) + 1] -= cost
        return list(itertools.accumulate(steps))[: self.units + 1]

    def by(self, borders: range) -> float:
        """What borders at equal distances cost together."""
        return self.at(0)[borders.start] + sum(self.at(borders.step)[b] for b in borders[1:])


def find_repeats(tokens: Sequence[int], lost: Lost, costs: Costs) -> list[Repeat]:
    """Repeats that are worth a cut, none overlapping, in order."""
    stretches = [
        (start, end, period)
        for period in _periods(tokens)
        for start, end in _stretches(tokens, period)
    ]
    best_cut = functools.cache(functools.partial(_best_cut, lost=lost, costs=costs))
    found: list[Repeat] = []
    free = [(0, len(tokens))]
    while free:
        options = (
            best_cut(max(start, a), min(end, b), period)
            for start, end, period in stretches
            for a, b in free
            if _may_pay(min(end, b) - max(start, a), period)
        )
        best = max(options, key=lambda repeat: repeat.saved, default=None)
        if best is None or best.saved <= 0:
            break
        found.append(best)
        free = [
            part
            for a, b in free
            for part in ((a, min(b, best.start)), (max(a, best.end), b))
            if part[0] < part[1]
        ]
    return sorted(found, key=lambda repeat: repeat.start)


def _may_pay(length: int, period: int) -> bool:
    """A stretch of that length can be worth a cut, where no values are lost by it."""
    return length >= 2 * period and NODE * (length - period) > 2 * PART


def _periods(tokens: Sequence[int]) -> list[int]:
    """Distances at which sequences come back, the most frequent ones."""
    seen: dict[tuple[int, ...], int] = {}
    votes: dict[int, int] = {}
    for place in range(len(tokens) - SEED + 1):
        seed = tuple(tokens[place : place + SEED])
        if seed in seen:
            distance = place - seen[seed]
            votes[distance] = votes.get(distance, 0) + 1
        seen[seed] = place
    return sorted(votes, key=lambda distance: -votes[distance])[:PERIODS]


def _stretches(tokens: Sequence[int], period: int) -> Iterator[tuple[int, int]]:
    """The longest stretches in which every token comes back after `period`, copies included."""
    start = None
    for place in range(len(tokens) - period + 1):
        if place < len(tokens) - period and tokens[place] == tokens[place + period]:
            start = place if start is None else start
        elif start is not None:
            if _may_pay(place + period - start, period):
                yield start, place + period
            start = None


def _best_cut(start: int, end: int, period: int, lost: Lost, costs: Costs) -> Repeat:
    """The best way to cut a stretch of equal copies: how long a part is, and where it begins."""
    copies = (end - start) // period
    # nodes of a part times calls is constant: their sum is least near the root
    ideal = (costs.runs * costs.call / NODE * copies * period) ** 0.5 / period
    sizes = {min(max(size, 1), copies // 2) for size in (int(ideal), int(ideal) + 1)}
    options = (
        _cut_at(begin, end, size * period, lost, costs)
        for size in sizes
        for begin in range(start, start + period)
        if end - begin >= 2 * size * period
    )
    return max(options, key=lambda repeat: repeat.saved)


def _cut_at(start: int, end: int, length: int, lost: Lost, costs: Costs) -> Repeat:
    count = (end - start) // length
    borders = range(start, start + length * count + 1, length)
    spent = costs.runs * (costs.call * (count + 1) + lost.by(borders))
    saved = NODE * length * (count - 1) - 2 * PART - spent
    return Repeat(start, length, count, saved)


def _rest_together(units: list[Unit], found: list[Repeat]) -> tuple[list[Unit], list[Repeat]]:
    """Put lanes that stand after the last repeat before the first: one part fewer."""
    if not _are_lanes(units[found[-1].start :]):
        return units, found
    first = next(r for r in found if _are_lanes(units[r.start :]))
    repeated, rest = units[first.start : found[-1].end], units[found[-1].end :]
    made = {register for unit in repeated for register in unit.outputs}
    if any(made & set(registers_in(unit.args)) for unit in rest):
        return units, found
    moved = [replace(r, start=r.start + len(rest)) if r.start >= first.start else r for r in found]
    return [*units[: first.start], *rest, *repeated], moved


def _are_lanes(units: Sequence[Unit]) -> bool:
    return all(unit.lane is not None for unit in units)


# -- what is compared ------------------------------------------------------------------------------


def _tokens(units: Sequence[Unit], types: dict[int, Any]) -> list[int]:
    """A number for each unit: the same for the same op with the same attributes and types."""
    numbers: dict[Any, int] = {}
    return [
        numbers.setdefault(
            (
                unit.instruction.node.op,
                frozen(unit.args, types.__getitem__),
                *map(types.__getitem__, unit.outputs),
            ),
            len(numbers),
        )
        for unit in units
    ]


# -- what a cut costs ------------------------------------------------------------------------------

UNFUSED: Final = ("convolution", "linear", "scaled_dot", "attention", "rnn", "dropout_mask")
"""In the names of ops whose kernels no compiler makes, so that they are not part of others."""


def _lost(units: Sequence[Unit], types: dict[int, Any], byte: float) -> Lost:
    """What cuts cost, where a byte that is written and read again takes so many seconds.

    A value costs if it is made and read by what would have been one kernel: no op with a kernel of
    its own stands between. A view is nothing but what it is a view of. What can wait is computed by
    the kernel that needs it: what backward computes from a value of forward alone is no part of
    forward's kernels.
    """
    base: dict[int, int] = {}  # what a register is a view of
    level: dict[int, int] = {}  # kernels of their own on the way to a register
    made: dict[int, int] = {}  # where a register is made, if by a kernel that others may join
    ops: list[tuple[int, list[int], bool]] = []  # place, what is read, whether it joins no others
    for place, unit in enumerate(units):
        sources = list({base.get(register, register) for register in registers_in(unit.args)})
        if is_view(unit.instruction):
            base.update(dict.fromkeys(unit.outputs, *sources))
            continue
        alone = _is_unfused(unit.instruction.spec.target._opname)
        here = max((level.get(register, 0) for register in sources), default=0)
        level.update(dict.fromkeys(unit.outputs, here + alone))
        ops.append((place, sources, alone))
        if not alone:
            made.update(dict.fromkeys(unit.outputs, place))
    needed: dict[int, int] = {}  # the level at which a register is needed first
    joining: list[tuple[int, int, int]] = []  # register, where it is read, at which level
    for place, sources, alone in reversed(ops):
        outputs = units[place].outputs
        then = min((needed.get(r, level[r]) for r in outputs), default=0) - alone
        for register in sources:
            needed[register] = min(needed.get(register, then), then)
            if not alone and register in made:
                joining.append((register, place, then))
    read: dict[int, int] = {}  # where a register is last read by a kernel that could have joined
    for register, place, then in joining:
        if needed[register] == then:
            read.setdefault(register, place)
    values = ((made[r] + 1, last, byte * _bytes(types[r])) for r, last in read.items())
    return Lost((value for value in values if value[2]), len(units))


def _is_unfused(name: str) -> bool:
    return name.endswith("mm") or any(part in name for part in UNFUSED)


def _bytes(type_: Any) -> int:
    return type_.numel * type_.dtype.itemsize if isinstance(type_, TensorType) else 0


# -- views -----------------------------------------------------------------------------------------


def is_view(instruction: Instruction) -> bool:
    """It makes nothing but views of one tensor."""
    spec = instruction.spec
    return (
        spec.mode is Mode.VIEW
        and not spec.mutated
        and all(returned.kind is ReturnKind.VIEW for returned in spec.returns)
        and len(set(registers_in(instruction.args))) == 1
    )


def with_views(pieces: Iterable[list[Instruction]]) -> Iterator[Part]:
    """Parts that compute for themselves the views they read of what other parts made.

    A view that leaves a part would be copied: compiled code returns nobody else's memory.
    """
    views: dict[int, Instruction] = {}
    for piece in pieces:
        borrowed: dict[int, Instruction] = {}
        made = {register for i in piece for register in i.outputs}
        for instruction in piece:
            for register in registers_in(instruction.args):
                if register not in made:
                    _borrow(register, views, borrowed)
        yield Part(piece, list(dict.fromkeys(borrowed.values())))
        views.update((r, i) for i in piece if is_view(i) for r in i.outputs)


def _borrow(register: int, views: dict[int, Instruction], borrowed: dict[int, Instruction]) -> None:
    """Take over the views on the way to `register`, the first one first."""
    chain: list[Instruction] = []
    while register in views and register not in borrowed:
        chain.append(views[register])
        (register,) = set(registers_in(chain[-1].args))
    for instruction in reversed(chain):
        borrowed.update(dict.fromkeys(instruction.outputs, instruction))
