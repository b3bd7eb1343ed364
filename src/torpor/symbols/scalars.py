"""Python numbers that change from step to step become run-time inputs.

A number starts as a constant of its node. When the same place (same op, same operands, other
number) is met in a later step, the number is promoted: it enters as a run-time scalar, numbered in
the order in which a step meets them, and the node is the same for every number to come.

What follows a promoted node in the same step has new operands, and so is a new place. Whether its
numbers change too is read off places of the same types: one step promotes a whole chain.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor import config, metrics
from torpor.execute.storage import TRACE
from torpor.inference.infer import types_in
from torpor.ir.memo import Memo
from torpor.ir.node import TABLE, Node, Value
from torpor.ops.keys import key_of, number_key
from torpor.ops.rules import PROMOTABLE_FLOATS
from torpor.ops.spec import ArgKind, Argument, OpSpec
from torpor.trace.values import make_node

_NUMBERS = (float, int)
MAX_KEYS = 64


class ScalarPlace:
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
    blank = _blanked(key, {position: bound[position] for position in positions})
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


Numbers = dict[int, Any]
"""By position: a number, or a tuple of numbers."""


def _blanked(key: tuple[Any, ...], numbers: Numbers) -> tuple[Any, ...]:
    """`key` with the kinds of its numbers in the place of the numbers."""
    blank = list(key)
    for position, number in numbers.items():
        blank[position] = tuple(map(type, number)) if type(number) is tuple else type(number)
    return tuple(blank)


_places: Memo[ScalarPlace] = Memo()


def _place(name: tuple[Any, ...]) -> ScalarPlace:
    """The place of that name, made on first use."""
    return _places.find(name) or _places.add(name, ScalarPlace())


def _promote(spec: OpSpec, place: ScalarPlace, changed: set[int]) -> None:
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


def _promoted_node(spec: OpSpec, bound: list[Any], place: ScalarPlace) -> Node:
    sample: dict[Value, Any] = {}
    inputs = list(bound)
    for position in sorted(place.promoted):
        number = bound[position]
        inputs[position] = entered = _entered(place, number)
        if type(number) is tuple:
            sample |= zip(entered, number, strict=True)
        else:
            sample[entered] = number
    key = key_of(spec, inputs)
    return spec.kind.nodes.get(key) or make_node(spec, key, inputs, sample)


# -- the same for the native recorder, which has no more of a call than its key --------------------

Finder = Callable[[tuple[Any, ...]], Node | None]


def promoted_finder(spec: OpSpec) -> Finder | None:
    """A function that finds the node of a call by a key that is not in the op's young table.

    It does so where `node_with_numbers` has nothing to learn and nothing to make, and gives None
    elsewhere. There is none for an op without numbers that may be promoted.
    """
    places = [(i, a.kind) for i, a in enumerate(spec.arguments) if _may_hold_numbers(a)]
    if not spec.promotable or not places:
        return None

    def find(key: tuple[Any, ...]) -> Node | None:
        if not config.promote_scalars or key in spec.kind.old_nodes:
            return None
        found = _numbers_in(key, places)
        place = _places.find((spec.kind, *_blanked(key, found))) if found else None
        if not found or place is None or place.promoted != found.keys():
            return None
        _promotions["epoch"] = TRACE.epoch
        inputs = list(key)
        for position, numbers in sorted(found.items()):
            inputs[position] = _entered(place, numbers)
        return spec.kind.nodes.get(tuple(inputs))

    return find


def _may_hold_numbers(argument: Argument) -> bool:
    if argument.kind is ArgKind.FLOAT:
        return argument.name in PROMOTABLE_FLOATS
    return argument.kind in (ArgKind.SCALAR, ArgKind.SCALARS, ArgKind.TENSOR)


def _numbers_in(key: tuple[Any, ...], places: list[tuple[int, ArgKind]]) -> Numbers | None:
    """The numbers at those places of a key; None if one is a rare one: zero, NaN, a bool."""
    found: Numbers = {}
    for position, kind in places:
        part = key[position]
        if part is None or type(part) is Value or part == ():
            continue
        numbers = tuple(map(_number, part)) if kind is ArgKind.SCALARS else _number(part)
        if numbers is None or (type(numbers) is tuple and None in numbers):
            return None
        found[position] = numbers
    return found


def _number(part: Any) -> Any:
    """The number that stands in a key as `part`."""
    if type(part) is float:
        return part
    return part[1] if type(part) is tuple and part[0] == "int" else None


def _entered(place: ScalarPlace, numbers: Any) -> Any:
    """Values of run-time inputs in the place of numbers."""
    if type(numbers) is not tuple:
        return place.enter(numbers)
    if _are_one(numbers):
        return (place.enter(numbers[0]),) * len(numbers)
    return tuple(map(place.enter, numbers))
