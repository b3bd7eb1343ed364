"""Promoting view offsets that change from step to step to run-time inputs.

`data[i : i + n]` and `x[i]` view another part of the same memory in every step. At first, the
offset is a constant of the node, like numbers (`symbols/scalars.py`). If the same place (same op on
the same value, same length) has another offset in a later step, the offset becomes a symbol, like
sizes (`symbols/symbolic_nodes.py`): the k-th such offset of a trace is the k-th symbol. Sizes and
strides of the view are unchanged; its type has the symbol in its offset.

A symbol's value is the offset plus two, because compilers specialize on sizes below two.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from torpor import metrics
from torpor.backend.registry import get_backend
from torpor.execute.storage import TRACE
from torpor.ir.memo import Memo
from torpor.ir.node import Node
from torpor.ir.types import SymbolicType, TensorType
from torpor.ops.keys import key_of
from torpor.ops.spec import OpSpec
from torpor.symbols.expressions import Expr, Symbol
from torpor.symbols.leaves import SIZES, is_on

aten = torch.ops.aten

Make = Callable[[OpSpec, tuple[Any, ...], list[Any]], Node]

SHIFT = 2
MAX_OFFSETS = 64


class Look(NamedTuple):
    """A call of a view op, as its place (everything but the offset) and its offset."""

    place: tuple[Any, ...]
    offset: int
    at: tuple[int, ...]  # positions of the arguments that change with the offset


def _select(bound: list[Any]) -> Look | None:
    value, dim, index = bound
    if type(index) is not int or not 0 <= index < value.type.shape[dim]:
        return None
    return Look((value, dim), index, (2,))


def _slice(bound: list[Any]) -> Look | None:
    value, dim, start, end, step = bound
    if type(start) is not int or type(end) is not int:
        return None
    if not 0 <= start < end <= value.type.shape[dim]:
        return None  # negative, clamped or empty
    return Look((value, dim, end - start, step), start, (2, 3))


def _as_strided(bound: list[Any]) -> Look | None:
    value, size, stride, offset = bound
    if type(offset) is not int or offset < 0:
        return None
    return Look((value, size, stride), offset, (3,))


LOOKS = {
    aten.select.int: _select,
    aten.slice.Tensor: _slice,
    aten.as_strided.default: _as_strided,
}
"""View ops with an offset, and how to find it in a call."""


class OffsetPlace:
    """Offsets seen at one place, in this step and the one before, and whether they are promoted."""

    __slots__ = ("before", "epoch", "met", "promoted")

    def __init__(self) -> None:
        self.epoch = TRACE.epoch
        self.met: dict[int, tuple[Any, ...]] = {}  # in the step `epoch`; with their keys
        self.before: dict[int, tuple[Any, ...]] = {}  # in the last step before it
        self.promoted = False

    def changes(self, offset: int, key: tuple[Any, ...]) -> bool:
        """Store `offset`; whether it differs from all offsets of the last step."""
        if self.epoch != TRACE.epoch:
            self.before, self.met, self.epoch = self.met, {}, TRACE.epoch
        is_new = bool(self.before) and offset not in self.before and not self._goes_on(offset)
        if len(self.met) < MAX_OFFSETS:
            self.met[offset] = key
        return is_new

    def _goes_on(self, offset: int) -> bool:
        """Whether it continues a loop over all offsets (`x[t]` for all `t`), now longer."""
        count = len(self.before)
        whole = count > 1 and all(number in self.before for number in range(count))
        return whole and offset == count + len(self.met)


_places: Memo[OffsetPlace] = Memo()


class _Entered:
    """How many offsets have become symbols in this trace."""

    epoch = -1
    count = 0

    def next(self, offset: int) -> Symbol:
        """The next symbol, bound to `offset`."""
        if self.epoch != TRACE.epoch:
            self.epoch, self.count = TRACE.epoch, 0
        found = SIZES.offset_symbol(self.count)
        self.count += 1
        found.bind(offset + SHIFT, TRACE.epoch)
        return found


_entered = _Entered()


def node_at_offset(spec: OpSpec, key: tuple[Any, ...], bound: list[Any], make: Make) -> Node | None:
    """The node of a view with a promoted offset; None if the offset is a constant so far."""
    look = LOOKS[spec.target](bound) if _has_fixed_sizes(bound[0].type) else None
    if look is None or not is_on(get_backend()):
        return None
    place = _place((spec.kind, *look.place))
    if not place.promoted:
        if key in spec.kind.old_nodes or not _is_due(spec, place, key, look):
            return None
        _promote(spec, place)
    return _moving_node(spec, bound, look, make)


def _place(name: tuple[Any, ...]) -> OffsetPlace:
    """The place with this name, made on first use."""
    return _places.find(name) or _places.add(name, OffsetPlace())


def _is_due(spec: OpSpec, place: OffsetPlace, key: tuple[Any, ...], look: Look) -> bool:
    """Whether to promote: it has changed, or it follows one that has, and similar ones change.

    What follows a promoted node has a new operand, so its place is new: one step promotes a chain.
    """
    value, *rest = look.place
    like = _place((spec.kind, value.type.concrete, *rest))
    follows = not (place.met or place.before) and _entered.epoch == TRACE.epoch
    changed, likely = place.changes(look.offset, key), like.changes(look.offset, key)
    return changed or (follows and likely)


def _has_fixed_sizes(type_: TensorType) -> bool:
    return type(type_) is not SymbolicType or type_.has_fixed_sizes


def _promote(spec: OpSpec, place: OffsetPlace) -> None:
    """Promote the offsets at a place, and drop the nodes with constant ones."""
    metrics.count("OffsetsPromoted")
    place.promoted = True
    for key in (*place.before.values(), *place.met.values()):
        spec.kind.nodes.pop(key, None)
        spec.kind.old_nodes.pop(key, None)


def _moving_node(spec: OpSpec, bound: list[Any], look: Look, make: Make) -> Node:
    SIZES.active = True
    entered = _entered.next(look.offset)
    inputs = list(bound)
    for position in look.at:
        more = bound[position] - look.offset - SHIFT
        inputs[position] = _plus(entered, more)
    key = key_of(spec, inputs)
    return spec.kind.nodes.get(key) or make(spec, key, inputs)


def _plus(one: Symbol, number: int) -> Expr:
    terms = ((1, (one,)), (number, ())) if number else ((1, (one,)),)
    return Expr.of(terms)
