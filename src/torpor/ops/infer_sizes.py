"""Output types of an op on operands whose sizes are symbols, and the sizes for which they hold.

Torch's own symbolic shapes say under which conditions an op does the same; for some sizes that meet
them the types are inferred as ever, on numbers, and what fits all of these is the type.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from torpor import _torch, config
from torpor.ir.fit import fit, fit_strides
from torpor.ir.node import Value
from torpor.ir.sizes import Condition, Expr, Symbol, condition, number, symbols_in
from torpor.ir.types import SymbolicType, TensorType
from torpor.ops import type_rules
from torpor.ops.infer import Physical, Types, infer, types_in
from torpor.ops.keys import key_of
from torpor.ops.spec import OpSpec

SAMPLES = (5, 14)
"""Sizes for which types are inferred; more are asked for where few do not tell."""

Sized = tuple[tuple[Any, ...], tuple[Condition, ...]]
_memo: dict[Any, list[Sized]] = {}


def infer_sizes(
    spec: OpSpec, key: tuple[Any, ...], bound: list[Any], sample: dict[Value, Any], to: Physical
) -> Sized | None:
    """Types with symbols, and the conditions under which they are right; None if there are none.

    An error of the user's at the sizes of this trace is raised, as by `infer`.
    """
    name = (spec.kind, types_in(key))
    known = _memo.setdefault(name, [])
    for types, conditions in known:
        if all(c.now() for c in conditions):
            return types, conditions
    if spec.name in type_rules.TRIED:  # by its kernel, which made-up sizes may not fit
        return None
    symbols = symbols_of(key)
    now = {symbol: symbol.value for symbol in symbols}
    present = _infer_at(spec, bound, sample, to, now)
    assumed = _conditions(spec, bound, sample, to, now)
    if assumed is None or not all(c.at(now) for c in assumed):
        return None
    answer = _fitted(spec, bound, sample, to, now, present, assumed)
    if answer is None:
        return None
    if len(_memo) > config.max_memoised_types:
        _memo.clear()
    known.append((answer, assumed))
    return answer, assumed


def forget() -> None:
    """Forget every inference."""
    _memo.clear()


def symbols_of(key: tuple[Any, ...]) -> list[Symbol]:
    """The symbols in the types of operands and among arguments."""
    found = set(symbols_in(key))
    stack = list(key)
    while stack:
        item = stack.pop()
        if type(item) is tuple:
            stack.extend(item)
        elif type(item) is Value and type(item.type) is SymbolicType:
            found.update(item.type.symbols)
    return sorted(found)


def _at(arg: Any, values: Mapping[Symbol, int], made: dict[Value, Value]) -> Any:
    """An argument for these sizes; the same value is the same stand-in."""
    if type(arg) is Value:
        if type(arg.type) is not SymbolicType:
            return arg
        if arg not in made:
            made[arg] = Value(arg.node, arg.index, arg.type.at(values))
        return made[arg]
    if type(arg) is tuple:
        return tuple([_at(item, values, made) for item in arg])
    return number(arg, values)


def concretely(args: Any) -> tuple[Any, ...]:
    """Arguments, or a key, with the sizes of this trace."""
    values = {one: one.value for one in symbols_of(tuple(args))}
    made: dict[Value, Value] = {}
    return tuple([_at(arg, values, made) for arg in args])


def _infer_at(
    spec: OpSpec,
    bound: list[Any],
    sample: dict[Value, Any],
    to: Physical,
    values: Mapping[Symbol, int],
) -> Types:
    made: dict[Value, Value] = {}
    there = [_at(arg, values, made) for arg in bound]
    return infer(spec, key_of(spec, there), there, sample, to)


def _conditions(
    spec: OpSpec,
    bound: list[Any],
    sample: dict[Value, Any],
    to: Physical,
    now: Mapping[Symbol, int],
) -> tuple[Condition, ...] | None:
    """Under which conditions torch does the same; None if it cannot tell."""
    open_sizes = _torch.OpenSizes({symbol.name: value for symbol, value in now.items()})
    sizes = {symbol: open_sizes.sizes[symbol.name] for symbol in now}
    made: dict[Value, torch.Tensor] = {}

    def fake(arg: Any) -> Any:
        if type(arg) is Value:
            if arg in sample:
                return sample[arg]
            if arg not in made:
                made[arg] = open_sizes.tensor(_loosely(arg.type, sizes), to(arg.type.device))
            return made[arg]
        if type(arg) is tuple:
            return [fake(item) for item in arg]
        return to(arg) if type(arg) is torch.device else number(arg, sizes)

    try:
        with open_sizes.tracing():
            positional, keywords = spec.call_arguments([fake(arg) for arg in bound])
            spec.target(*positional, **keywords)
    except Exception:  # no fake kernel, or none that knows symbols: not an error of the user's
        return None
    return tuple(condition(text) for text in open_sizes.conditions())


def _loosely(type_: TensorType, sizes: Mapping[Symbol, Any]) -> TensorType:
    return type_.loosely_at(sizes) if type(type_) is SymbolicType else type_


def _fitted(
    spec: OpSpec,
    bound: list[Any],
    sample: dict[Value, Any],
    to: Physical,
    now: Mapping[Symbol, int],
    present: Types,
    conditions: tuple[Condition, ...],
) -> tuple[Any, ...] | None:
    rows, seen = [present], [dict(now)]
    for values in _other_sizes(now):
        if len(rows) in SAMPLES:
            found = _types(rows, seen)
            if found is not None or len(rows) == SAMPLES[-1]:
                return found
        if not all(c.at(values) for c in conditions):
            continue
        try:
            types = _infer_at(spec, bound, sample, to, values)
        except Exception:  # these sizes do not go together: the program depends on its own
            return None
        if len(types) != len(present):
            return None
        rows.append(types)
        seen.append(values)
    return None if len(rows) < SAMPLES[0] else _types(rows, seen)


def _types(rows: list[Types], seen: list[dict[Symbol, int]]) -> tuple[Any, ...] | None:
    symbols = {symbol: [values[symbol] for values in seen] for symbol in seen[0]}
    found = [fit_type(column, symbols) for column in zip(*rows)]
    return None if NO_FIT in found else tuple(found)


NO_FIT = object()


def fit_type(column: tuple[Any, ...], symbols: Mapping[Symbol, list[int]]) -> Any:
    """The type that is each of `column` where the symbols are what they were; `NO_FIT` if none."""
    first = column[0]
    if all(type_ is first for type_ in column):
        return first
    if any(type_ is None or len(type_.shape) != len(first.shape) for type_ in column):
        return NO_FIT
    sizes = [fit(numbers, symbols) for numbers in zip(*(t.shape for t in column))]
    if None in sizes:
        return NO_FIT
    known: dict[Any, Any] = dict(symbols)
    for size, numbers in zip(sizes, zip(*(t.shape for t in column))):
        if type(size) is Expr and size.divisor != 1:
            known[size] = numbers
    shapes, strides = [t.shape for t in column], [t.stride for t in column]
    steps = fit_strides(shapes, strides, sizes, known)  # type: ignore[arg-type]  # no None
    offset = fit([t.offset for t in column], known)
    if steps is None or offset is None:
        return NO_FIT
    return SymbolicType.with_sizes(tuple(sizes), tuple(steps), offset, first)  # type: ignore[arg-type]  # no None


def _other_sizes(now: Mapping[Symbol, int]) -> Iterator[dict[Symbol, int]]:
    """Other sizes, near those of this trace first."""
    steps = ((1, 3), (2, 5), (5, 1), (7, 11), (-1, 2), (13, 17), (3, -1), (11, 4), (-2, -1))
    for factor in (1, 2, 3):
        for one, other in steps:
            values = {}
            for place, (symbol, value) in enumerate(now.items()):
                moved = value * factor + (one if place % 2 == 0 else other) * (1 + place // 2)
                values[symbol] = max(moved, 2)
            yield values
