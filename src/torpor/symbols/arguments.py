"""Symbolic size arguments: where sizes occur among the arguments of ops, and as which expressions.

A place is an op on operands of certain types. The numbers seen at a place are stored with the sizes
of their step; an expression that fits all of them goes into the node. A wrong guess is detected at
the next size, for which it does not give the number that is passed.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Mapping
from typing import Any

from torpor import _torch
from torpor.inference.infer import types_in
from torpor.ir.memo import Memo
from torpor.ir.node import Value
from torpor.ir.types import SymbolicType
from torpor.ops.spec import OpSpec
from torpor.symbols.expressions import Expr, Symbol, symbols_in
from torpor.symbols.solve import solve_size, times

MAX_SAMPLES = 6
MAX_CANDIDATES = 8
SURE_SAMPLES = 5
"""This many numbers that fit an expression are no coincidence."""

_BLANK = "size"
Numbers = tuple[Any, ...]  # the numbers at a place; may include None


@functools.cache
def size_positions(target: Any) -> tuple[int, ...]:
    """Which arguments of an op are sizes: by its schema's types, and the bounds of a range."""
    if target._opname == "arange":
        arguments = target._schema.arguments
        return tuple(i for i, a in enumerate(arguments) if a.name in ("start", "end", "step"))
    arguments = target._schema.arguments
    names = {a.name for a in arguments}
    fixed = _FIXED | {"stride"} if names & _FIXED else _FIXED  # a stride of a window, not a tensor
    return tuple(
        i for i, a in enumerate(arguments) if _torch.is_size(a.real_type) and a.name not in fixed
    )


_FIXED = {"padding", "dilation", "output_padding", "groups", "kernel_size", "step"}
"""Arguments that are not sizes, although their schemas have the type of sizes."""


def has_symbols(key: tuple[Any, ...]) -> bool:
    """Whether the type of an operand has symbols."""
    for item in key:
        if type(item) is Value:
            if type(item.type) is SymbolicType:
                return True
        elif type(item) is tuple and has_symbols(item):
            return True
    return False


def numbers_at(bound: list[Any], positions: tuple[int, ...]) -> Numbers:
    """The numbers at these positions, with lists flattened."""
    flat: list[Any] = []
    for position in positions:
        arg = bound[position]
        flat.extend(arg if type(arg) is tuple else (arg,))
    return tuple(flat)


def put(args: Any, positions: tuple[int, ...], sizes: tuple[Any, ...], as_key: bool) -> list[Any]:
    """`args` with `sizes` at these positions; the inverse of `numbers_at`."""
    made, rest = list(args), iter(sizes)
    for position in positions:
        arg = args[position]
        if type(arg) is tuple and not _is_tagged(arg):
            made[position] = tuple([next(rest) for _ in arg])
        else:
            size = next(rest)
            changed = type(size) is Expr or not as_key
            made[position] = size if changed else arg
    return made


def _is_tagged(arg: tuple[Any, ...]) -> bool:
    """Whether it is the key of a number, such as `("int", 3)`."""
    return len(arg) == 2 and arg[0] in ("int", "bool", "float")


class Sample:
    """Numbers seen in one step, with the sizes of that step."""

    __slots__ = ("numbers", "sizes")

    def __init__(self, numbers: Numbers, sizes: Mapping[Symbol, int]) -> None:
        self.numbers = numbers
        self.sizes = sizes  # filled in while the step is recorded


class SizePlace:
    """What was seen at one place: samples, and expressions that fitted."""

    __slots__ = ("candidates", "samples")

    def __init__(self) -> None:
        self.samples: list[Sample] = []
        self.candidates: list[tuple[Any, ...]] = []

    def meet(self, sample: Sample) -> None:
        """Store a sample, unless it is a duplicate."""
        for known in self.samples:
            if known.numbers == sample.numbers and known.sizes == sample.sizes:
                return
        self.samples.append(sample)
        del self.samples[:-MAX_SAMPLES]

    def sizes_of(self, numbers: Numbers, epoch: int) -> tuple[Any, ...] | None:
        """A previous solution that gives `numbers` in this trace, if there is one."""
        for candidate in self.candidates:
            for size, wanted in zip(candidate, numbers):
                if type(size) is Expr:
                    if size.value != wanted or not size.is_bound(epoch):
                        break
                elif size != wanted:
                    break
            else:
                return candidate
        return None

    def remember(self, sizes: tuple[Any, ...]) -> tuple[Any, ...]:
        """Make these expressions the first candidate."""
        if sizes in self.candidates:
            self.candidates.remove(sizes)
        self.candidates.insert(0, sizes)
        del self.candidates[MAX_CANDIDATES:]
        return sizes


_places: Memo[SizePlace] = Memo()


def forget_places() -> None:
    """Forget all places."""
    _places.clear()


def place_of(spec: OpSpec, key: tuple[Any, ...], positions: tuple[int, ...]) -> SizePlace:
    """The place of a call with this key."""
    blank = list(types_in(key))
    for position in positions:
        arg = key[position]
        if type(arg) is tuple and not _is_tagged(arg):
            blank[position] = (_BLANK, len(arg))
        elif arg is not None:
            blank[position] = _BLANK
    name = (spec.kind, *blank)
    return _places.find(name) or _places.add(name, SizePlace())


def forget_numbers(spec: OpSpec, place: SizePlace) -> None:
    """Drop nodes that were recorded at a place before its sizes were known, so they are not hit."""
    positions = size_positions(spec.target)
    for nodes in (spec.kind.nodes, spec.kind.old_nodes):
        for key in list(nodes):
            if not symbols_in(key) and place_of(spec, key, positions) is place:
                del nodes[key]


def guess(
    numbers: Numbers, sizes: Mapping[Symbol, int], types: list[Any], others: list[Expr]
) -> tuple[Any, ...]:
    """Expressions for numbers seen once: sizes of this step, or products of them.

    `types` are the operands' types, `others` the sizes of other tensors of the step.
    """
    return tuple([_guess(n, sizes, types, others) for n in numbers])


def _is_plausible(size: Any, samples: int) -> bool:
    """Whether to accept a fit: with few samples only simple forms, as calls may share a place."""
    if type(size) is not Expr or samples >= SURE_SAMPLES:
        return True
    return size.divisor == 1 and (len(size.terms) == 1 or size.terms[0][0] == 1)


def _is_shift(size: Expr) -> bool:
    """Whether it has the form `s + c`."""
    return size.divisor == 1 and len(size.terms) == 2 and size.terms[0][0] == 1 == len(
        size.terms[0][1]
    ) and not size.terms[1][1]  # fmt: skip


def _sums(types: list[Any]) -> list[Expr]:
    """Sizes of operands that are not products of symbols: results may be expressions of them."""
    found: dict[Expr, None] = {}
    for type_ in types:
        for size in type_.sizes:
            if type(size) is Expr and (size.divisor != 1 or len(size.terms) > 1):
                found[size] = None
    return list(found)


def _flattened(number: int, type_: Any) -> Any:
    """The product of adjacent sizes that equals `number`, if there is one with symbols."""
    for first in range(len(type_.sizes)):
        product: Any = type_.sizes[first]
        for size in type_.sizes[first + 1 :]:
            product = times(product, size)
            if type(product) is Expr and product.value == number:
                return product
    return None


def _guess(number: Any, sizes: Mapping[Symbol, int], types: list[Any], others: list[Expr]) -> Any:
    if type(number) is not int or number < 2:
        return number
    for type_ in types:  # a size or a stride of an operand
        for size in (*type_.sizes, *type_.steps, type_.at_offset_size):
            if type(size) is Expr and size.value == number:
                return size
    if any(size == number for type_ in types for size in type_.sizes if type(size) is int):
        return number  # equal to a fixed size, so probably fixed, too
    for symbol, value in sizes.items():
        if value == number:
            return symbol.expr
    for size in others:
        if sizes.keys() >= set(size.symbols) and size.value == number and _is_shift(size):
            return size
    for type_ in types:
        product = _flattened(number, type_)
        if product is not None:
            return product
    listed = list(sizes)
    for i, one in enumerate(listed):
        for other in listed[i:]:
            product = sizes[one] * sizes[other]
            factors = tuple(sorted((one, other)))
            if product == number:
                return Expr.of(((1, factors),))
            for type_ in types:
                for size in type_.sizes:
                    if type(size) is int and product * size == number:
                        return Expr.of(((size, factors),))
    for type_ in types:
        for size in type_.sizes:
            for symbol, value in sizes.items():
                if type(size) is int and size > 1 and value * size == number:
                    return Expr.of(((size, (symbol,)),))
    return number


def solved(place: SizePlace, types: list[Any]) -> tuple[Any, ...] | None:
    """Expressions that give all numbers seen at a place; None if there are none.

    They may have symbols that are not bound in this step.
    """
    kinds = Counter(frozenset(s.sizes) for s in place.samples if s.sizes)
    for symbols, _ in kinds.most_common():
        found = _solved(place, symbols, types)
        if found is not None:
            return found
    return None


def _solved(
    place: SizePlace, symbols: frozenset[Symbol], types: list[Any]
) -> tuple[Any, ...] | None:
    """Expressions of `symbols` that give the numbers seen in steps in which those were bound."""
    seen = [s for s in place.samples if symbols <= set(s.sizes)]
    if len(seen) < 2:
        return None
    known: dict[Any, list[int]] = {s: [sample.sizes[s] for sample in seen] for s in symbols}
    for size in _sums(types):
        if symbols >= set(size.symbols):
            known[size] = [size.at(sample.sizes) for sample in seen]
    rows = [sample.numbers for sample in seen]
    made = []
    for column in zip(*rows):
        if any(type(n) is not int for n in column):
            if any(n != column[0] for n in column):
                return None
            made.append(column[0])
            continue
        found = solve_size(column, known)
        if found is None or not _is_plausible(found, len(seen)):
            return None
        made.append(found)
    return tuple(made)
