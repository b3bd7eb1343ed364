"""Which sizes of a trace's leaves are symbols.

Graphs are remembered by structure: ops and edges, without sizes. When a structure recurs with other
sizes, the sizes that differ become symbols, equal ones the same symbol; from then on, a leaf in
that slot enters the trace with a symbolic type. Sizes 0 and 1 stay numbers, because ops treat them
specially.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

from torpor import config, metrics
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, Node, Value
from torpor.ir.types import ScalarType, SymbolicType, TensorType
from torpor.ops.spec import ArgKind, spec_of
from torpor.symbols.arguments import (
    Numbers,
    Sample,
    forget_places,
    numbers_at,
    place_of,
    size_positions,
)
from torpor.symbols.expressions import Expr, Size, Symbol, bound, present, symbol
from torpor.symbols.solve import solve_size, solve_strides, times
from torpor.symbols.symbolic_types import UNSOLVED, solve_type

MAX_STRUCTURES = 64
MAX_SAMPLES = 4
MAX_PATTERNS = 8
OFFSETS = -1
"""In place of a slot: the symbol is the offset of a view, not a size of a leaf."""


class Pattern:
    """A symbolic type that covers all types seen for a leaf."""

    __slots__ = ("type",)

    def __init__(self, type_: Any) -> None:
        self.type = type_

    def binding(self, type_: TensorType, epoch: int) -> dict[Symbol, int] | None:
        """The values of its symbols for a leaf of `type_`; None if the leaf does not match."""
        values: dict[Symbol, int] = {}
        if type(self.type) is not SymbolicType:
            return None
        for size, have in zip(self.type.sizes, type_.shape, strict=True):
            if type(size) is Expr and _is_symbol(size):
                (one,) = size.symbols
                known = one.value if one.epoch == epoch else values.setdefault(one, have)
                if known != have or have < 2:
                    return None
            elif type(size) is int and size != have:
                return None
        for one in self.type.symbols:
            if one not in values:
                if one.epoch != epoch:
                    return None
                values[one] = one.value
        return values if self.type.at(values) is type_ else None


def _is_symbol(size: Expr) -> bool:
    return size.divisor == 1 and len(size.terms) == 1 and size.terms[0] == (1, size.symbols)


class Sizes:
    """The patterns of leaves, and the structures from which they were learned."""

    def __init__(self) -> None:
        self.patterns: dict[Any, list[Pattern]] = {}
        self.structures: OrderedDict[bytes, Structure] = OrderedDict()
        self.marked: WeakKeyDictionary[Any, set[int]] = WeakKeyDictionary()  # by storage
        self.fixed: WeakSet[Any] = WeakSet()  # storages of parameters, whose sizes do not change
        self.active = config.dynamic == "on"  # recording has to check for symbols
        self.numbered: dict[tuple[int, int], int] = {}  # index of the symbol for (slot, dimension)
        self.at_once = AtOnce()
        self._sizes: dict[Symbol, int] = {}
        self._epoch = -1

    def of_trace(self, epoch: int) -> dict[Symbol, int]:
        """The sizes bound in the current trace; filled in while it is recorded."""
        if self._epoch != epoch:
            self._sizes, self._epoch = bound(epoch), epoch
        return self._sizes

    def bind(self, one: Symbol, value: int, epoch: int) -> None:
        """Bind `one` to `value` in this trace."""
        self.of_trace(epoch)[one] = value
        one.bind(value, epoch)

    def offset_symbol(self, place: int) -> Symbol:
        """The symbol of the `place`-th symbolic offset of a trace."""
        return _symbol_at(OFFSETS, place)

    def mark(self, storage: Any, dim: int) -> None:
        """Mark the size of `storage` in this dimension as dynamic, as the user requests."""
        self.marked.setdefault(storage, set()).add(dim)
        self.active = True

    def leaf_type(self, slot: int, storage: Any, epoch: int) -> TensorType:
        """The type with which a storage with data enters the trace."""
        type_: TensorType = storage.type
        if storage in self.fixed and storage not in self.marked:
            return type_
        if storage in self.marked:
            return self._bound(Pattern(_marked(slot, type_, self.marked[storage])), type_, epoch)
        if config.dynamic == "on":
            for learnt in self.at_once.met(slot, type_, epoch):
                self._add(slot, learnt)
        for pattern in self.patterns.get(_leaf_name(slot, type_), ()):
            found = self._bound(pattern, type_, epoch)
            if found is not type_:
                return found
        return type_

    def _bound(self, pattern: Pattern, type_: TensorType, epoch: int) -> TensorType:
        """The type of `pattern`, with its symbols bound, if it matches `type_`; else `type_`."""
        values = pattern.binding(type_, epoch)
        if values is None:
            return type_
        for one, value in values.items():
            if one.epoch != epoch:
                self.bind(one, value, epoch)
        found: TensorType = pattern.type
        return found

    def note(self, graph: Graph, record: Any) -> Structure:
        """Learn from a new graph which of its sizes change.

        `record.kept` are the slots of leaves that were the same tensor in the next step. If one of
        them, or a parameter, has another size, this is another model, or another tensor in a loop
        over all of them.
        """
        fixed = {slot for slot, storage in record.leaves.items() if storage() in self.fixed}
        name = _structure_name(graph)
        structure = self.structures.get(name)
        if structure is None:
            structure = self.structures[name] = Structure()
            if len(self.structures) > MAX_STRUCTURES:
                self.structures.popitem(last=False)
        self.structures.move_to_end(name)
        if structure.meet(Seen(graph, record, fixed), graph):
            self._learn(structure)
        return structure

    def _learn(self, structure: Structure) -> None:
        patterns, symbols = structure.patterns()
        for slot, type_ in patterns.items():
            self._add(slot, type_)
        if patterns:
            self.active = True
            structure.teach(symbols)

    def _add(self, slot: int, type_: SymbolicType) -> None:
        known = self.patterns.setdefault(_leaf_name(slot, type_), [])
        if all(pattern.type is not type_ for pattern in known):
            known.insert(0, Pattern(type_))
            known.sort(key=lambda pattern: len(pattern.type.symbols))
            metrics.count("SizesPromoted")
            del known[MAX_PATTERNS:]

    def clear(self) -> None:
        """Forget all patterns and structures: no size is symbolic."""
        forget_places()
        self.__init__()  # type: ignore[misc]  # as new


def _leaf_name(slot: int, type_: TensorType) -> tuple[Any, ...]:
    return (slot, type_.dtype, type_.device, len(type_.shape))


# -- structures ------------------------------------------------------------------------------------


def _structure_name(graph: Graph) -> bytes:
    digest = hashlib.blake2b(digest_size=16)
    numbers: dict[Value, int] = {}
    for value in graph.inputs:
        numbers[value] = len(numbers)
        digest.update(repr(_input_name(value)).encode())
    for node in graph.nodes:
        digest.update(repr(_node_name(node, numbers)).encode())
        for value in node.outputs:
            numbers[value] = len(numbers)
    digest.update(repr([numbers[value] for value in graph.outputs]).encode())
    return digest.digest()


def _input_name(value: Value) -> Any:
    type_ = value.type
    if type(type_) is ScalarType:
        return type_.kind.__name__
    slot = value.node.args[0] if value.node.op is LEAF else None
    return (slot, str(type_.dtype), str(type_.device), len(type_.shape))


def _node_name(node: Node, numbers: dict[Value, int]) -> Any:
    spec = spec_of(node.op.target)
    open_ = size_positions(spec.target)
    return (
        node.op.name,
        [
            _blank(arg) if i in open_ or _is_number(argument.kind, arg) else _name(arg, numbers)
            for i, (argument, arg) in enumerate(zip(spec.arguments, node.args, strict=True))
        ],
    )


_NUMBERS = (ArgKind.SCALAR, ArgKind.SCALARS, ArgKind.FLOAT, ArgKind.FLOATS)


def _is_number(kind: ArgKind, arg: Any) -> bool:
    """Whether it is a number used in computation, also one passed as a tensor (`x * 2`)."""
    return kind in _NUMBERS or (kind is ArgKind.TENSOR and type(arg) in (int, float, complex))


def _blank(arg: Any) -> Any:
    return None if arg is None else len(arg) if type(arg) is tuple else "number"


def _name(arg: Any, numbers: dict[Value, int]) -> Any:
    if type(arg) is Value:
        return numbers[arg]
    if type(arg) is tuple:
        return [_name(item, numbers) for item in arg]
    return repr(arg)


class Seen:
    """The sizes of one graph: the types of its values, and its numeric arguments."""

    __slots__ = ("fixed", "leaves", "numbers", "record", "types")

    def __init__(self, graph: Graph, record: Any, fixed: set[int]) -> None:
        self.record, self.fixed = record, fixed
        values = [*graph.inputs, *(output for node in graph.nodes for output in node.outputs)]
        self.types = [getattr(value.type, "concrete", value.type) for value in values]
        self.leaves = {
            value.node.args[0]: type_
            for value, type_ in zip(graph.inputs, self.types)
            if value.node.op is LEAF
        }
        self.numbers = [_numbers_of(node) for node in graph.nodes]

    def is_like(self, other: Seen) -> bool:
        """Whether they differ only in leaves that change with every step."""
        lasting = (self.record.kept | self.fixed | other.fixed) & self.leaves.keys()
        return all(other.leaves[slot] is self.leaves[slot] for slot in lasting)


def _numbers_of(node: Node) -> Numbers:
    positions = size_positions(node.op.target)
    return numbers_at([present(arg) for arg in node.args], positions) if positions else ()


class Structure:
    """Graphs that differ only in their sizes."""

    __slots__ = ("compiled", "graph", "seen")

    def __init__(self) -> None:
        self.compiled = 0  # how many of them were compiled
        self.graph: Graph | None = None  # the first one
        self.seen: list[Seen] = []

    def meet(self, seen: Seen, graph: Graph) -> bool:
        """Store the sizes of a graph; whether they are new, and not the first."""
        self.seen = [known for known in self.seen if known.is_like(seen)]
        if any(known.leaves == seen.leaves for known in self.seen):
            return False
        self.graph = self.graph or graph
        self.seen.append(seen)
        del self.seen[:-MAX_SAMPLES]
        return len(self.seen) > 1

    def patterns(self) -> tuple[dict[int, SymbolicType], dict[Symbol, list[int]]]:
        """Symbolic types by slot, and the values of the symbols in each graph."""
        sizes = LeafSizes()
        found: dict[int, SymbolicType] = {}
        for slot in self.seen[0].leaves:
            type_ = sizes.pattern(slot, [seen.leaves[slot] for seen in self.seen])
            if type(type_) is SymbolicType:
                found[slot] = type_
        return found, sizes.symbols

    def teach(self, symbols: dict[Symbol, list[int]]) -> None:
        """Store the numbers that ops were called with at their places, with the sizes then."""
        assert self.graph is not None, "something was met"
        kinds: dict[tuple[Any, ...], Any] = {}
        values = [*self.graph.inputs, *(v for node in self.graph.nodes for v in node.outputs)]
        there: dict[Value, Value | None] = {}
        for place, value in enumerate(values):
            types = tuple([seen.types[place] for seen in self.seen])
            if types not in kinds:
                kinds[types] = solve_type(types, symbols)
            known = kinds[types]
            there[value] = None if known is UNSOLVED else Value(value.node, value.index, known)
        steps = [{s: numbers[i] for s, numbers in symbols.items()} for i in range(len(self.seen))]
        for place, node in enumerate(self.graph.nodes):
            if any(type(n) is int and n > 1 for n in self.seen[0].numbers[place]):
                self._teach(place, node, there, steps)

    def _teach(
        self, number: int, node: Node, there: dict[Value, Any], steps: list[dict[Symbol, int]]
    ) -> None:
        key = _moved(node.key, there)
        if key is None:
            return
        spec = spec_of(node.op.target)
        place = place_of(spec, key, size_positions(spec.target))
        for seen, sizes in zip(self.seen, steps, strict=True):
            place.meet(Sample(seen.numbers[number], sizes))


def _moved(key: tuple[Any, ...], there: dict[Value, Any]) -> tuple[Any, ...] | None:
    """`key` with its values replaced; None if one has no replacement."""
    made: list[Any] = []
    for item in key:
        if type(item) is Value:
            item = there[item]
            if item is None:
                return None
        elif type(item) is tuple:
            item = _moved(item, there)
            if item is None:
                return None
        made.append(item)
    return tuple(made)


class AtOnce:
    """For `config.dynamic = "on"`: sizes that differ from the last trace's become symbols."""

    def __init__(self) -> None:
        self.epoch = -1
        self.before: dict[int, TensorType] = {}
        self.now: dict[int, TensorType] = {}
        self.sizes = LeafSizes()

    def met(self, slot: int, type_: TensorType, epoch: int) -> list[SymbolicType]:
        """A leaf enters the trace; the types to add as patterns."""
        if self.epoch != epoch:
            self.epoch, self.before, self.now, self.sizes = epoch, self.now, {}, LeafSizes()
        self.now[slot] = type_
        last = self.before.get(slot)
        if last is None or _leaf_name(slot, last) != _leaf_name(slot, type_):
            return []
        found = self.sizes.pattern(slot, [last, type_])
        return [found] if type(found) is SymbolicType else []


def _marked(slot: int, type_: TensorType, dims: set[int]) -> TensorType:
    """`type_`, which is contiguous, with symbols for the sizes in these dimensions."""
    sizes: list[Size] = list(type_.shape)
    for dim in dims:
        if dim < len(sizes) and type_.shape[dim] > 1:  # it may have been resized
            sizes[dim] = _symbol_at(slot, dim).expr
    steps: list[Size] = []
    step: Size = 1
    for size in reversed(sizes):
        steps.insert(0, step)
        step = times(step, size)
    return SymbolicType.with_sizes(tuple(sizes), tuple(steps), 0, type_)


class LeafSizes:
    """Symbols for the leaf sizes of several graphs: sizes that change alike share one."""

    def __init__(self) -> None:
        self.symbols: dict[Symbol, list[int]] = {}
        self.by_numbers: dict[tuple[int, ...], Symbol] = {}

    def pattern(self, slot: int, types: list[TensorType]) -> TensorType | None:
        """A type that covers all of `types`; None if there is none."""
        first = types[0]
        if all(type_ is first for type_ in types):
            return first
        sizes: list[Size] = []
        for dim, numbers in enumerate(zip(*(type_.shape for type_ in types))):
            size = self._size(numbers, (slot, dim))
            if size is None:
                return None
            sizes.append(size)
        shapes, strides = [t.shape for t in types], [t.stride for t in types]
        steps = solve_strides(shapes, strides, sizes, self.symbols)
        offset = solve_size([type_.offset for type_ in types], self.symbols)
        if steps is None or offset is None:
            return None
        return SymbolicType.with_sizes(tuple(sizes), tuple(steps), offset, first)

    def _size(self, numbers: tuple[int, ...], where: tuple[int, int]) -> Size | None:
        if all(n == numbers[0] for n in numbers):
            return numbers[0]
        if min(numbers) < 2:
            return None
        known = self.by_numbers.get(numbers)
        if known is not None:
            return known.expr
        derived = solve_size(numbers, self.symbols) if self.symbols else None
        if type(derived) is Expr and _is_plausible(derived, len(numbers)):
            return derived
        made = _symbol_at(*where)
        if made in self.symbols:
            return None
        self.by_numbers[numbers] = made
        self.symbols[made] = list(numbers)
        return made.expr


def _symbol_at(slot: int, dim: int) -> Symbol:
    """The symbol for a size that occurs first in that dimension of that slot."""
    numbered = SIZES.numbered
    found = symbol(numbered.setdefault((slot, dim), len(numbered)))
    found.is_size = slot != OFFSETS
    return found


def _is_plausible(size: Expr, samples: int) -> bool:
    """Whether to accept a fit: with only two samples, just `s + c` and products."""
    return samples > 2 or (size.divisor == 1 and size.terms[0][0] == 1)


def is_on(backend: Any) -> bool:
    """Whether dynamic shapes are enabled, and this backend supports them."""
    return config.dynamic != "off" and bool(backend.dynamic)


SIZES = Sizes()
