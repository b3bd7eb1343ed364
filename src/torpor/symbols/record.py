"""Recording where sizes are symbols: the node that serves every size.

A key whose operands have symbols in their types holds expressions where the call has sizes. Only an
op that is called with sizes gets here: all others are found in the table as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from torpor import metrics
from torpor.execute.storage import TRACE
from torpor.inference.infer import Physical, infer
from torpor.ir.node import TABLE, Node, Value
from torpor.ir.types import SymbolicType, TensorType
from torpor.ops.spec import OpSpec, spec_of
from torpor.symbols.arguments import (
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
from torpor.symbols.expressions import Condition, Expr, Symbol, exactly, stands_while, symbols_in
from torpor.symbols.infer import concretely, infer_sizes, symbols_of
from torpor.symbols.leaves import SIZES

Where = Callable[[], tuple[Any, Any]]


class Call(NamedTuple):
    """An op that is being recorded, and was not met before as it is."""

    spec: OpSpec
    key: tuple[Any, ...]
    bound: list[Any]
    sample: dict[Value, Any]
    to: Physical
    where: Where
    again: bool = False  # of a view that is replayed: its numbers are of the step that made it

    def new_node(self, types: tuple[Any, ...], conditions: tuple[Condition, ...]) -> Node:
        """Its node, for sizes under these conditions."""
        metrics.count_node(self.spec.name)
        site, scope = self.where()
        args = tuple(self.bound)
        return add_node(self.spec.kind, self.key, args, types, site, scope, conditions)


def sized_node(call: Call) -> Node | None:
    """The node of an op with symbols in it, found or made; None if it has none."""
    spec, key, bound = call.spec, call.key, call.bound
    positions = size_positions(spec.target)
    symbolic = has_symbols(key)
    if symbols_in(bound):  # sizes already: a view that is replayed in the step that made it
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
    place: Place, numbers: Numbers, key: tuple[Any, ...], spec: OpSpec
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
        if not types and symbols_in(found):
            forget_numbers(spec, place)
        return place.remember(found)
    if types:
        return place.remember(guess(numbers, now, types, _sizes_alive()))
    return None


def _sizes_alive() -> list[Expr]:
    """Expressions that are sizes of tensors recorded in this trace, the first of them first."""
    storages = [reference() for reference in list(TRACE.pending)]
    types = [storage.type for storage in storages if storage is not None]
    sizes = [size for t in types if type(t) is SymbolicType for size in t.sizes]
    return list(dict.fromkeys(size for size in sizes if type(size) is Expr))


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
    """Types of operands with symbols in their sizes: where they begin says nothing of sizes."""
    found = []
    for item in key:
        for one in item if type(item) is tuple else (item,):
            type_ = one.type if type(one) is Value else None
            if type(type_) is SymbolicType and not type_.has_fixed_sizes:
                found.append(type_)
    return found


def _find_or_make(call: Call) -> Node:
    found = TABLE.find(call.spec.kind, call.key)
    if found is not None:
        return found
    answer = infer_sizes(call.spec, call.key, call.bound, call.sample, call.to)
    return _node_for_these(call) if answer is None else call.new_node(*answer)


def _node_for_these(call: Call) -> Node:
    """A node for the sizes of this trace alone: what it does depends on them."""
    key, bound = concretely(call.key), list(concretely(call.bound))
    types = infer(call.spec, key, bound, call.sample, call.to)
    return call.new_node(types, tuple(exactly(one) for one in symbols_of(call.key)))


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
    node.passing = _is_passing(node)
    return node


def _is_passing(node: Node) -> bool:
    """It looks at memory, and depends on sizes that are not the memory's own."""
    met = symbols_met(node)
    if not met:  # writes to one tensor are a chain as long as the trace
        return False
    root: Value | None = None
    spec = spec_of(node.op.target)
    looker = node
    while spec.views >= 0:
        root = looker.args[spec.views]
        looker = root.node
        if looker.op.target is None:
            break
        spec = spec_of(looker.op.target)
    return root is not None and not are_own(met, root.type)


def symbols_met(node: Node) -> set[Symbol]:
    """The symbols on which it depends what a node gives."""
    met = {*symbols_in(node.args), *(s for each in node.conditions for s in each.symbols)}
    for output in node.outputs:
        met.update(output.type.symbols if type(output.type) is SymbolicType else ())
    return met


def are_own(symbols: Iterable[Symbol], type_: TensorType) -> bool:
    """A tensor of this type has the same numbers for these symbols in every trace."""
    sizes = type_.sizes if type(type_) is SymbolicType else ()
    return all(symbol.expr in sizes for symbol in symbols)
