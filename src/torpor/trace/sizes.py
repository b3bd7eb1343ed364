"""Recording where sizes are symbols: the node that serves every size.

A key whose operands have symbols in their types holds expressions where the call has sizes. Only an
op that is called with sizes gets here: all others are found in the table as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor import metrics
from torpor.execute.sizes import SIZES
from torpor.execute.storage import TRACE
from torpor.ir.node import TABLE, Node, Value
from torpor.ir.sizes import Condition, Expr, Symbol, exactly, stands_while, symbols_in
from torpor.ir.types import SymbolicType
from torpor.ops.infer import Physical, infer
from torpor.ops.infer_sizes import concretely, infer_sizes, symbols_of
from torpor.ops.size_places import (
    Numbers,
    Place,
    Sample,
    fitted,
    forget_numbers,
    guess,
    has_symbols,
    numbers_at,
    place_of,
    put,
    size_positions,
)
from torpor.ops.spec import OpSpec

Where = Callable[[], tuple[Any, Any]]


def sized_node(
    spec: OpSpec,
    key: tuple[Any, ...],
    bound: list[Any],
    sample: dict[Value, Any],
    to: Physical,
    where: Where,
) -> Node | None:
    """The node of an op with symbols in it, found or made; None if it has none."""
    positions = size_positions(spec.target)
    symbolic = has_symbols(key)
    if symbols_in(bound):  # sizes already: a view that is replayed
        return _find_or_make(spec, key, bound, sample, to, where)
    numbers = numbers_at(bound, positions) if positions else ()
    if any(type(n) is int and n > 1 for n in numbers):
        place = place_of(spec, key, positions)
        sizes = _sizes_at(place, numbers, key, symbolic, spec)
        if sizes is not None:
            key = tuple(put(key, positions, sizes, as_key=True))
            bound = put(bound, positions, sizes, as_key=False)
            symbolic = symbolic or bool(symbols_in(bound))
    if not symbolic:
        return None
    return _find_or_make(spec, key, bound, sample, to, where)


def _sizes_at(
    place: Place, numbers: Numbers, key: tuple[Any, ...], symbolic: bool, spec: OpSpec
) -> tuple[Any, ...] | None:
    """The expressions for `numbers`; None if they are numbers, as far as is known."""
    epoch = TRACE.epoch
    known = place.sizes_of(numbers, epoch)
    if known is not None:
        return known
    now = SIZES.of_trace(epoch)
    place.meet(Sample(numbers, now))
    for candidate in place.candidates:
        if _gives(candidate, numbers, True):
            return candidate
    types = _symbolic_types(key)
    found = fitted(place, types)
    if found is not None and _gives(found, numbers, len(place.samples) > 2):
        if not symbolic and symbols_in(found):
            forget_numbers(spec, place)
        return place.remember(found)
    if symbolic:
        return place.remember(guess(numbers, now, types))
    return None


def _gives(sizes: tuple[Any, ...], numbers: Numbers, sure: bool) -> bool:
    """The expressions give the numbers; a symbol that has no number yet takes it from here."""
    epoch = TRACE.epoch
    taken: dict[Symbol, int] = {}
    for size, wanted in zip(sizes, numbers, strict=True):
        if type(size) is Expr and type(wanted) is int:
            for one in size.symbols:
                if one.epoch != epoch and size is one.expr and wanted > 1 and sure:
                    taken.setdefault(one, wanted)
        elif size != wanted:
            return False
    values = SIZES.of_trace(epoch) | taken
    for size, wanted in zip(sizes, numbers, strict=True):
        if type(size) is Expr and (
            not values.keys() >= set(size.symbols) or size.at(values) != wanted
        ):
            return False
    for one, value in taken.items():
        SIZES.bind(one, value, epoch)
    return True


def _symbolic_types(key: tuple[Any, ...]) -> list[SymbolicType]:
    found = []
    for item in key:
        for one in item if type(item) is tuple else (item,):
            if type(one) is Value and type(one.type) is SymbolicType:
                found.append(one.type)
    return found


def _find_or_make(
    spec: OpSpec,
    key: tuple[Any, ...],
    bound: list[Any],
    sample: dict[Value, Any],
    to: Physical,
    where: Where,
) -> Node:
    found = TABLE.find(spec.kind, key)
    if found is not None:
        return found
    answer = infer_sizes(spec, key, bound, sample, to)
    if answer is None:
        return _node_for_these(spec, key, bound, sample, to, where)
    types, conditions = answer
    metrics.count_node(spec.name)
    return add_node(spec.kind, key, tuple(bound), types, *where(), conditions)


def _node_for_these(
    spec: OpSpec,
    key: tuple[Any, ...],
    bound: list[Any],
    sample: dict[Value, Any],
    to: Physical,
    where: Where,
) -> Node:
    """A node for the sizes of this trace alone: what it does depends on them."""
    there = concretely(bound)
    types = infer(spec, concretely(key), list(there), sample, to)
    metrics.count_node(spec.name)
    conditions = tuple(exactly(one) for one in symbols_of(key))
    return add_node(spec.kind, key, tuple(bound), types, *where(), conditions)


def add_node(
    kind: Any,
    key: tuple[Any, ...],
    args: tuple[Any, ...],
    types: tuple[Any, ...],
    site: Any,
    scope: Any,
    conditions: tuple[Condition, ...],
) -> Node:
    """A new node, which stands in the table while `conditions` hold."""
    node = TABLE.add(kind, key, args, types, site, scope)
    if conditions:
        node.conditions = conditions
        stands_while(conditions, kind.nodes, key, node)
    return node
