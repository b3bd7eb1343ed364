"""Recording with symbolic sizes: one node that serves every size.

If operands have symbolic types, a key has expressions where the call has sizes. Only ops that are
called with sizes need this module; for all others, the key of the call is found in the table.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torpor import metrics
from torpor.execute.storage import TRACE
from torpor.inference.infer import Physical, infer
from torpor.ir.node import Node, OpKind, Value, intern
from torpor.ir.types import SymbolicType, TensorType
from torpor.ops.spec import OpSpec, spec_of
from torpor.symbols.arguments import (
    Numbers,
    Sample,
    SizePlace,
    forget_numbers,
    guess,
    has_symbols,
    numbers_at,
    place_of,
    put,
    size_positions,
    solved,
)
from torpor.symbols.expressions import Condition, Expr, Symbol, exactly, symbols_in
from torpor.symbols.leaves import SIZES
from torpor.symbols.symbolic_types import concretely, infer_sizes, symbols_of

Where = Callable[[], tuple[Any, Any]]


class Call(NamedTuple):
    """A call of an op that is being recorded, and whose key is not in the table."""

    spec: OpSpec
    key: tuple[Any, ...]
    bound: list[Any]
    sample: dict[Value, Any]
    to: Physical
    where: Where
    again: bool = False  # a view that is replayed: its numbers belong to the step that made it

    def contents(self) -> tuple[Any, ...]:
        """The contents of its node, with conditions on sizes."""
        answer = infer_sizes(self.spec, self.key, self.bound, self.sample, self.to)
        types, conditions = _for_these(self) if answer is None else answer
        metrics.count_node(self.spec.name)
        return contents(self.spec.kind, tuple(self.bound), types, *self.where(), conditions)


def sized_node(call: Call) -> Node | None:
    """The node of an op with symbols, found or made; None if the call has no symbols."""
    spec, key, bound = call.spec, call.key, call.bound
    positions = size_positions(spec.target)
    symbolic = has_symbols(key)
    if symbols_in(bound):  # symbolic already: a view that is replayed in the step that made it
        return _find_or_make(call)
    numbers = numbers_at(bound, positions) if positions and not call.again else ()
    if any(type(n) is int and n > 1 for n in numbers):
        place = place_of(spec, key, positions)
        sizes = _sizes_at(place, numbers, key, spec)
        if sizes is not None:
            key = tuple(put(key, positions, sizes, as_key=True))
            bound = put(bound, positions, sizes, as_key=False)
            symbolic = symbolic or bool(symbols_in(bound))
    if not symbolic:
        return None
    return _find_or_make(call._replace(key=key, bound=bound))


def _sizes_at(
    place: SizePlace, numbers: Numbers, key: tuple[Any, ...], spec: OpSpec
) -> tuple[Any, ...] | None:
    """The expressions for `numbers`; None if they are constants so far."""
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
    found = solved(place, types)
    if found is not None and _gives(found, numbers, len(place.samples) > 2):
        if not types and symbols_in(found):
            forget_numbers(spec, place)
        return place.remember(found)
    if types:
        return place.remember(guess(numbers, now, types, _sizes_alive()))
    return None


def _sizes_alive() -> list[Expr]:
    """Symbolic sizes of tensors that were recorded in this trace, in order."""
    storages = [reference() for reference in list(TRACE.pending)]
    types = [storage.type for storage in storages if storage is not None]
    sizes = [size for t in types if type(t) is SymbolicType for size in t.sizes]
    return list(dict.fromkeys(size for size in sizes if type(size) is Expr))


def _gives(sizes: tuple[Any, ...], numbers: Numbers, sure: bool) -> bool:
    """Bind unbound symbols where possible; whether the expressions give these numbers."""
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
    """Types of operands with symbolic sizes; an offset alone says nothing about sizes."""
    found = []
    for item in key:
        for one in item if type(item) is tuple else (item,):
            type_ = one.type if type(one) is Value else None
            if type(type_) is SymbolicType and not type_.has_fixed_sizes:
                found.append(type_)
    return found


def _find_or_make(call: Call) -> Node:
    return intern(call.spec.kind, call.key, call.contents)


def _for_these(call: Call) -> tuple[tuple[Any, ...], tuple[Condition, ...]]:
    """Types for the sizes of this trace only, since the op's behavior depends on them."""
    key, bound = concretely(call.key), list(concretely(call.bound))
    types = infer(call.spec, key, bound, call.sample, call.to)
    return types, tuple(exactly(one) for one in symbols_of(call.key))


def contents(
    kind: OpKind,
    args: tuple[Any, ...],
    types: tuple[Any, ...],
    site: Any,
    scope: Any,
    conditions: tuple[Condition, ...],
) -> tuple[Any, ...]:
    """The contents of a node that is in the table while `conditions` hold."""
    transient = _is_transient(kind, args, symbols_met(args, types, conditions))
    return args, types, site, scope, conditions, transient


def _is_transient(kind: OpKind, args: tuple[Any, ...], met: set[Symbol]) -> bool:
    """Whether the node is a view that depends on sizes other than those of the viewed memory."""
    if not met:  # fast path: writes to one tensor make a chain as long as the trace
        return False
    root: Value | None = None
    while kind.target is not None and (viewed := spec_of(kind.target).views) >= 0:
        root = args[viewed]
        kind, args = root.node.op, root.node.args
    return root is not None and not are_own(met, root.type)


def symbols_met(
    args: tuple[Any, ...], types: Iterable[Any], conditions: Iterable[Condition]
) -> set[Symbol]:
    """The symbols that a node's result depends on."""
    met = {*symbols_in(args), *(s for each in conditions for s in each.symbols)}
    for type_ in types:
        met.update(type_.symbols if type(type_) is SymbolicType else ())
    return met


def are_own(symbols: Iterable[Symbol], type_: TensorType) -> bool:
    """Whether these symbols are, in every trace, sizes of a tensor of this type."""
    sizes = type_.sizes if type(type_) is SymbolicType else ()
    return all(symbol.expr in sizes for symbol in symbols)
