"""Python numbers that change from step to step become run-time inputs.

A number starts as a constant of its node. When the same place (same op, same operands, other
number) is met in a later step, the number is promoted: it enters as a run-time scalar, numbered in
the order in which a step meets them, and the node is the same for every number to come.

What follows a promoted node in the same step has new operands, and so is a new place. Whether its
numbers change too is read off places of the same types: one step promotes a whole chain.
"""

from __future__ import annotations

from typing import Any

from torpor import config, metrics
from torpor.execute.storage import TRACE
from torpor.ir.memo import Memo
from torpor.ir.node import TABLE, Node, Value
from torpor.ops.infer import types_in
from torpor.ops.keys import key_of, number_key
from torpor.ops.rules import PROMOTABLE_FLOATS
from torpor.ops.spec import ArgKind, OpSpec
from torpor.trace.values import make_node

_NUMBERS = (float, int)
MAX_KEYS = 64


class Place:
    """Where numbers are met: under which keys, this step and before, and which are promoted."""

    __slots__ = ("before", "epoch", "keys", "promoted", "slots", "slots_epoch")

    def __init__(self) -> None:
        self.epoch = TRACE.epoch
        self.keys: list[tuple[Any, ...]] = []  # of the step `epoch`
        self.before: list[tuple[Any, ...]] = []  # of the last step before that
        self.promoted: set[int] = set()
        self.slots: dict[Any, Value] = {}  # numbers of this step that have a slot already
        self.slots_epoch = -1

    def meet(self, key: tuple[Any, ...], positions: list[int]) -> set[int]:
        """Remember `key`; the positions whose numbers the last step did not have here."""
        if self.epoch != TRACE.epoch:
            self.before, self.keys, self.epoch = self.keys, [], TRACE.epoch
        if len(self.keys) < MAX_KEYS:
            self.keys.append(key)
        if not self.before:
            return set()
        return {p for p in positions if all(key[p] != known[p] for known in self.before)}

    def enter(self, number: Any) -> Value:
        """The run-time scalar of `number`; the same for the same number in the same step."""
        if self.slots_epoch != TRACE.epoch:
            self.slots, self.slots_epoch = {}, TRACE.epoch
        name = number_key(number)
        value = self.slots.get(name)
        if value is None:
            value = self.slots[name] = TRACE.scalar_value(number)
        return value


_promotions: dict[str, int] = {}  # the step in which a promoted place was last met


def promotable_positions(spec: OpSpec, bound: list[Any]) -> list[int]:
    """Which arguments hold numbers that may become run-time inputs."""
    if not spec.promotable or not config.promote_scalars:
        return []
    found = []
    for position, (argument, value) in enumerate(zip(spec.arguments, bound, strict=True)):
        if argument.kind is ArgKind.SCALAR or argument.kind is ArgKind.TENSOR:
            if type(value) in _NUMBERS:
                found.append(position)
        elif argument.kind is ArgKind.FLOAT and argument.name in PROMOTABLE_FLOATS:
            if type(value) is float:
                found.append(position)
        elif (
            argument.kind is ArgKind.SCALARS
            and type(value) is tuple
            and value
            and all(type(item) in _NUMBERS for item in value)
        ):
            found.append(position)
    return found


def node_with_numbers(
    spec: OpSpec, key: tuple[Any, ...], bound: list[Any], positions: list[int]
) -> Node:
    """The node of an op that takes numbers, met under a key that is not in its young table."""
    found = TABLE.find(spec.kind, key)
    if found is not None:
        return found
    blank = _blanked(key, bound, positions)
    place = _place((spec.kind, *blank))
    if len(place.promoted) == len(positions):  # nothing is left to learn here
        _promotions["epoch"] = TRACE.epoch
        return _promoted_node(spec, bound, place)
    like = _place((spec.kind, *types_in(blank)))
    is_new = not place.keys
    changed = place.meet(key, positions)
    likely = like.meet(key, positions)
    if is_new and _promotions.get("epoch") == TRACE.epoch:
        place.promoted |= likely  # it follows a promoted node, and places like it change too
    if not changed <= place.promoted:
        _promote(spec, place, changed)
    if not place.promoted:
        return make_node(spec, key, bound)
    _promotions["epoch"] = TRACE.epoch
    return _promoted_node(spec, bound, place)


def _blanked(key: tuple[Any, ...], bound: list[Any], positions: list[int]) -> tuple[Any, ...]:
    """`key` with the kinds of its numbers in the place of the numbers."""
    blank = list(key)
    for position in positions:
        number = bound[position]
        blank[position] = tuple(map(type, number)) if type(number) is tuple else type(number)
    return tuple(blank)


_places: Memo[Place] = Memo()


def _place(name: tuple[Any, ...]) -> Place:
    """The place of that name, made on first use."""
    return _places.find(name) or _places.add(name, Place())


def _promote(spec: OpSpec, place: Place, changed: set[int]) -> None:
    """From now on the numbers at `changed` are inputs; their constants must not be met again."""
    metrics.count("ScalarsPromoted", len(changed - place.promoted))
    place.promoted |= changed
    for key in (*place.before, *place.keys):
        spec.kind.nodes.pop(key, None)
        spec.kind.old_nodes.pop(key, None)


def _are_one(numbers: tuple[Any, ...]) -> bool:
    """All are the same number, as those of an optimizer are that takes all steps alike."""
    first = numbers[0]
    return first != 0 and numbers.count(first) == len(numbers) == [*map(type, numbers)].count(
        type(first)
    )


def _promoted_node(spec: OpSpec, bound: list[Any], place: Place) -> Node:
    sample: dict[Value, Any] = {}

    def enter(number: Any) -> Value:
        value = place.enter(number)
        sample[value] = number
        return value

    inputs = list(bound)
    for position in sorted(place.promoted):
        number = bound[position]
        if type(number) is not tuple:
            inputs[position] = enter(number)
        elif _are_one(number):
            inputs[position] = (enter(number[0]),) * len(number)
        else:
            inputs[position] = tuple(map(enter, number))
    key = key_of(spec, inputs)
    return spec.kind.nodes.get(key) or make_node(spec, key, inputs, sample)
