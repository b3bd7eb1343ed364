"""Promoting Python numbers that change from step to step to run-time inputs.

At first, a number is a constant of its node. If the same place (same op, same operands) has another
number in a later step, the number is promoted: it becomes a run-time scalar, numbered in the order
of occurrence in a step, and one node serves all numbers from then on.

An op that follows a promoted node in the same step has new operands, so it is a new place. Whether
its numbers change too is inferred from places with the same types: one step promotes a whole chain.
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
    """The keys seen at a place, in this step and the one before, and which numbers are promoted."""

    __slots__ = ("before", "epoch", "keys", "promoted", "slots", "slots_epoch")

    def __init__(self) -> None:
        self.epoch = TRACE.epoch
        self.keys: list[tuple[Any, ...]] = []  # of the step `epoch`
        self.before: list[tuple[Any, ...]] = []  # of the last step before it
        self.promoted: set[int] = set()
        self.slots: dict[Any, Value] = {}  # run-time scalars of this step, by number
        self.slots_epoch = -1

    def meet(self, key: tuple[Any, ...], positions: list[int]) -> set[int]:
        """Store `key`; the positions with numbers that this place did not have in the last step."""
        if self.epoch != TRACE.epoch:
            self.before, self.keys, self.epoch = self.keys, [], TRACE.epoch
        if len(self.keys) < MAX_KEYS:
            self.keys.append(key)
        if not self.before:
            return set()
        return {p for p in positions if all(key[p] != known[p] for known in self.before)}

    def enter(self, number: Any) -> Value:
        """The run-time scalar for `number`; equal numbers share one within a step."""
        if self.slots_epoch != TRACE.epoch:
            self.slots, self.slots_epoch = {}, TRACE.epoch
        name = number_key(number)
        value = self.slots.get(name)
        if value is None:
            value = self.slots[name] = TRACE.scalar_value(number)
        return value


_promotions: dict[str, int] = {}  # "epoch": the latest step that used a promoted place


def promotable_positions(spec: OpSpec, bound: list[Any]) -> list[int]:
    """Which arguments are numbers that may be promoted."""
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
    """The node of an op with numbers, for a key that is not in its young table."""
    found = TABLE.find(spec.kind, key)
    if found is not None:
        return found
    blank = _blanked(key, {position: bound[position] for position in positions})
    place = _place((spec.kind, *blank))
    if len(place.promoted) == len(positions):  # everything is promoted already
        _promotions["epoch"] = TRACE.epoch
        return _promoted_node(spec, bound, place)
    like = _place((spec.kind, *types_in(blank)))
    is_new = not place.keys
    changed = place.meet(key, positions)
    likely = like.meet(key, positions)
    if is_new and _promotions.get("epoch") == TRACE.epoch:
        place.promoted |= likely  # it follows a promoted node, and similar places change, too
    if not changed <= place.promoted:
        _promote(spec, place, changed)
    if not place.promoted:
        return make_node(spec, key, bound)
    _promotions["epoch"] = TRACE.epoch
    return _promoted_node(spec, bound, place)


Numbers = dict[int, Any]
"""A number or a tuple of numbers, by argument position."""


def _blanked(key: tuple[Any, ...], numbers: Numbers) -> tuple[Any, ...]:
    """`key` with numbers replaced by their types."""
    blank = list(key)
    for position, number in numbers.items():
        blank[position] = tuple(map(type, number)) if type(number) is tuple else type(number)
    return tuple(blank)


_places: Memo[ScalarPlace] = Memo()


def _place(name: tuple[Any, ...]) -> ScalarPlace:
    """The place with this name, made on first use."""
    return _places.find(name) or _places.add(name, ScalarPlace())


def _promote(spec: OpSpec, place: ScalarPlace, changed: set[int]) -> None:
    """Promote the numbers at `changed`, and drop the nodes with constant ones."""
    metrics.count("ScalarsPromoted", len(changed - place.promoted))
    place.promoted |= changed
    for key in (*place.before, *place.keys):
        spec.kind.nodes.pop(key, None)
        spec.kind.old_nodes.pop(key, None)


def _are_one(numbers: tuple[Any, ...]) -> bool:
    """Whether all are the same number, as for an optimizer with one step size for all."""
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


# -- the same for the native recorder, which has only the key of a call ----------------------------

Finder = Callable[[tuple[Any, ...]], Node | None]


def promoted_finder(spec: OpSpec) -> Finder | None:
    """A function that finds the node of a call whose key is not in the op's young table.

    It succeeds if `node_with_numbers` would neither learn nor make anything, and returns None
    otherwise. The result is None for an op without promotable numbers.
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
    """The numbers at these positions of a key; None if one is special: zero, NaN, a bool."""
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
    """The number whose key is `part`."""
    if type(part) is float:
        return part
    return part[1] if type(part) is tuple and part[0] == "int" else None


def _entered(place: ScalarPlace, numbers: Any) -> Any:
    """Run-time scalars in place of numbers."""
    if type(numbers) is not tuple:
        return place.enter(numbers)
    if _are_one(numbers):
        return (place.enter(numbers[0]),) * len(numbers)
    return tuple(map(place.enter, numbers))
