"""Finding the expression of symbols that gives the observed numbers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from fractions import Fraction
from itertools import combinations_with_replacement
from math import prod
from typing import Any

from torpor.symbols.expressions import Expr, Size, Symbol, named

_DIVISORS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 64)


def solve_size(numbers: Sequence[int], symbols: Mapping[Any, Sequence[int]]) -> Size | None:
    """The simplest size that equals `numbers[i]` if each symbol has the i-th of its numbers.

    The keys of `symbols` may be expressions, too.

    Tried in order: a constant, a product of up to three symbols times a constant, such a product
    plus a constant, a symbol divided and rounded down, a polynomial. None if none of them fits.
    """
    first = numbers[0]
    if all(n == first for n in numbers):
        return first
    changing = {s: seen for s, seen in symbols.items() if any(v != seen[0] for v in seen)}
    products = list(_products(changing))
    for factors, values in products:
        if all(v and n % v == 0 and n // v == first // values[0] for n, v in zip(numbers, values)):
            return Expr.of(((first // values[0], factors),))
    for factors, values in products:
        size = _line(numbers, factors, values)
        if size is not None:
            return size
    return _rounded(numbers, [p for p in products if len(p[0]) == 1]) or _sum(numbers, products)


def size_of(formula: Any) -> Size | None:
    """The size for a formula of symbol names (`_torch.OpenSizes.formula`)."""
    if formula is None or type(formula) is int:
        return formula
    terms, divisor = formula
    made: list[tuple[int, tuple[Any, ...]]] = []
    constant = 0
    for number, factors in terms:
        parts = [named(f) if type(f) is str else size_of(f) for f in factors]
        if parts:
            made.append((number, tuple(sorted(parts, key=_order))))
        else:
            constant += number
    return _summed(sorted(made, key=_term_order), constant, divisor)


def _summed(terms: list[tuple[int, tuple[Any, ...]]], constant: int, divisor: int) -> Size:
    if not terms:
        return constant // divisor
    inner = terms[0][1][0]
    if divisor == 1 and len(terms) == 1 and terms[0] == (1, (inner,)) and type(inner) is Expr:
        if not constant:
            return inner
        inside = [term for term in inner.terms if term[1]]  # a // d + c is (a + c * d) // d
        rest = sum(number for number, factors in inner.terms if not factors)
        return _summed(inside, rest + constant * inner.divisor, inner.divisor)
    return Expr.of((*terms, (constant, ())) if constant else terms, divisor)


def _term_order(term: tuple[int, tuple[Any, ...]]) -> tuple[int, list[Any]]:
    return len(term[1]), [_order(factor) for factor in term[1]]


def solve_strides(
    shapes: Sequence[Sequence[int]],
    strides: Sequence[Sequence[int]],
    sizes: Sequence[Size],
    symbols: Mapping[Any, Sequence[int]],
) -> list[Size] | None:
    """Strides for these samples of shapes and strides, with these `sizes`; None if none fit.

    The strides of a dense tensor, in any order of dimensions, are products of its sizes.
    """
    order = sorted(range(len(sizes)), key=lambda dim: (strides[0][dim], -dim))
    if all(_is_dense_in(order, *sample) for sample in zip(shapes, strides, strict=True)):
        found: list[Size] = [1] * len(sizes)
        step: Size = 1
        for dim in order:
            found[dim] = step
            step = times(step, sizes[dim])
        return found
    solved = [solve_size(numbers, symbols) for numbers in zip(*strides, strict=True)]
    return None if None in solved else solved  # type: ignore[return-value]  # no None


def _is_dense_in(order: Sequence[int], shape: Sequence[int], stride: Sequence[int]) -> bool:
    step = 1
    for dim in order:
        if stride[dim] != step:
            return False
        step *= max(shape[dim], 1)
    return True


def times(one: Size, other: Size) -> Size:
    """The product of two sizes."""
    if not isinstance(one, Expr) or not isinstance(other, Expr):
        if isinstance(one, int) and isinstance(other, int):
            return one * other
        number, size = (one, other) if isinstance(one, int) else (other, one)
        factor, factors = _monomial(size)
        return Expr.of(((number * factor, factors),))  # type: ignore[operator]  # a number
    (a, these), (b, those) = _monomial(one), _monomial(other)
    return Expr.of(((a * b, tuple(sorted((*these, *those), key=_order))),))


def _monomial(size: Any) -> tuple[int, tuple[Any, ...]]:
    """A size as a coefficient and factors."""
    if size.divisor == 1 and len(size.terms) == 1:
        return size.terms[0]  # type: ignore[no-any-return]  # of an expression
    return 1, (size,)


def _order(factor: Any) -> tuple[bool, int, str]:
    """A sort key: symbols before expressions."""
    is_symbol = isinstance(factor, Symbol)
    return (not is_symbol, factor.index if is_symbol else 0, repr(factor))


Product = tuple[tuple[Any, ...], list[int]]


def _products(symbols: Mapping[Any, Sequence[int]]) -> Iterator[Product]:
    for degree in (1, 2, 3):
        for factors in combinations_with_replacement(sorted(symbols, key=_order), degree):
            yield factors, [prod(row) for row in zip(*(symbols[s] for s in factors))]


def _line(numbers: Sequence[int], factors: tuple[Any, ...], values: list[int]) -> Expr | None:
    """`a * product + b`."""
    run = next(((n, v) for n, v in zip(numbers, values) if v != values[0]), None)
    if run is None:
        return None
    rise, length = run[0] - numbers[0], run[1] - values[0]
    if rise % length or rise == 0:
        return None
    slope = rise // length
    start = numbers[0] - slope * values[0]
    if any(n != slope * v + start for n, v in zip(numbers, values)):
        return None
    return Expr.of(((slope, factors), (start, ())))


def _rounded(numbers: Sequence[int], products: Sequence[Product]) -> Expr | None:
    """`(symbol + b) // d`: what a strided slice or convolution makes of a size."""
    for factors, values in products:
        for divisor in _DIVISORS:
            low = max(n * divisor - v for n, v in zip(numbers, values))
            high = min(n * divisor - v + divisor - 1 for n, v in zip(numbers, values))
            if low <= high:
                start = max(low, min(high, 0))
                terms = ((1, factors), (start, ())) if start else ((1, factors),)
                return Expr.of(terms, divisor)
    return None


def _sum(numbers: Sequence[int], products: Sequence[Product]) -> Expr | None:
    """A polynomial of low degree; it needs at least two more samples than it has terms."""
    ones: Product = ((), [1] * len(numbers))
    for degree in (1, 2, 3):
        terms = [p for p in products if len(p[0]) <= degree] + [ones]
        if len(terms) + 2 > len(numbers):
            return None
        factors = _solved([list(row) for row in zip(*(p[1] for p in terms))], numbers)
        if factors is not None:
            kept = [(f, p[0]) for f, p in zip(factors, terms, strict=True) if f]
            return Expr.of(tuple(kept))
    return None


def _solved(rows: list[list[int]], numbers: Sequence[int]) -> list[int] | None:
    """The integer coefficients that solve the linear system; None if none do, or several."""
    table = [[Fraction(x) for x in (*row, n)] for row, n in zip(rows, numbers, strict=True)]
    columns = len(rows[0])
    for column in range(columns):
        pivot = next((r for r in range(column, len(table)) if table[r][column]), None)
        if pivot is None:
            return None
        table[column], table[pivot] = table[pivot], table[column]
        lead = table[column]
        for r, row in enumerate(table):
            if r != column and row[column]:
                ratio = row[column] / lead[column]
                table[r] = [x - ratio * y for x, y in zip(row, lead, strict=True)]
    if any(row[-1] for row in table[columns:]):
        return None
    found = [table[c][-1] / table[c][c] for c in range(columns)]
    return [int(x) for x in found] if all(x.denominator == 1 for x in found) else None
