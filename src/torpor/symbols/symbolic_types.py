"""Inference of symbolic output types, and of the sizes for which they are valid.

Torch's symbolic shapes give the conditions (guards) under which an op behaves the same. For several
sizes that satisfy them, concrete types are inferred as usual; the symbolic type is fitted to those.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from torpor import _torch, config
from torpor.inference import type_rules
from torpor.inference.infer import Physical, infer, types_in
from torpor.ir.node import Value
from torpor.ir.types import SymbolicType, TensorType, Types, type_at
from torpor.ops.keys import key_of
from torpor.ops.spec import OpSpec, ReturnKind
from torpor.symbols.expressions import Condition, Expr, Size, Symbol, condition, number, symbols_in
from torpor.symbols.solve import size_of, solve_size, solve_strides

SAMPLES = (5, 14)
"""How many sizes to infer types for; the larger number if the smaller is not conclusive."""

Sized = tuple[tuple[Any, ...], tuple[Condition, ...]]
_memo: dict[Any, list[Sized]] = {}


def infer_sizes(
    spec: OpSpec, key: tuple[Any, ...], bound: list[Any], sample: dict[Value, Any], to: Physical
) -> Sized | None:
    """Symbolic types, and the conditions under which they are valid; None if there are none.

    If the call is an error at the sizes of this trace, that is raised, as by `infer`.
    """
    name = (spec.kind, types_in(key))
    known = _memo.setdefault(name, [])
    for types, conditions in known:
        if all(c.now() for c in conditions):
            return types, conditions
    if spec.name in type_rules.TRIED:  # its real kernel would run, and may reject made-up sizes
        return None
    now = {symbol: symbol.value for symbol in symbols_of(key)}
    call = _SizedCall(spec, bound, sample, to)
    present = call.types(now)
    traced = call.traced(now)
    if traced is None:
        return None
    assumed = (*traced.conditions, *_least_sizes(call, now, traced.conditions))
    if not all(c.at(now) for c in assumed):
        return None
    answer = _solved(call, now, present, traced, assumed)
    if answer is None:
        return None
    if len(_memo) > config.max_memoised_types:
        _memo.clear()
    known.append((answer, assumed))
    return answer, assumed


def forget() -> None:
    """Drop all memoized inferences."""
    _memo.clear()


def symbols_of(key: tuple[Any, ...]) -> list[Symbol]:
    """The symbols in the types of operands and in arguments."""
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
    """An argument with these sizes; the same value always gives the same stand-in."""
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
    """Arguments, or a key, with the concrete sizes of this trace."""
    values = {one: one.value for one in symbols_of(tuple(args))}
    made: dict[Value, Value] = {}
    return tuple([_at(arg, values, made) for arg in args])


class _TracedOp(NamedTuple):
    """What torch's symbolic shapes give for an op: conditions, and the sizes of its outputs."""

    conditions: tuple[Condition, ...]
    outputs: list[_Output | None]


class _Output(NamedTuple):
    """The sizes, strides and offset of an output, concatenated."""

    exact: tuple[Size | None, ...]  # None: not expressible as an `Expr`
    at: Callable[[Mapping[Symbol, int]], tuple[int, ...]]


class _SizedCall:
    """An op on operands with symbols, to be inferred for several sizes."""

    def __init__(
        self, spec: OpSpec, bound: list[Any], sample: dict[Value, Any], to: Physical
    ) -> None:
        self.spec, self.bound, self.sample, self.to = spec, bound, sample, to

    def types(self, values: Mapping[Symbol, int]) -> Types:
        """Its output types for these sizes, inferred as usual."""
        made: dict[Value, Value] = {}
        there = [_at(arg, values, made) for arg in self.bound]
        return infer(self.spec, key_of(self.spec, there), there, self.sample, self.to)

    def is_allowed(self, values: Mapping[Symbol, int]) -> bool:
        """Whether it is valid for these sizes."""
        try:
            self.types(values)
        except Exception:  # any: the user gets it if those sizes occur
            return False
        return True

    def traced(self, now: Mapping[Symbol, int]) -> _TracedOp | None:
        """What torch's symbolic shapes give for sizes like `now`; None if they fail."""
        opened = _torch.OpenSizes({symbol.name: value for symbol, value in now.items()})
        sizes = {symbol: opened.sizes[symbol.name] for symbol in now}
        made: dict[Value, torch.Tensor] = {}

        def fake(arg: Any) -> Any:
            if type(arg) is Value:
                if arg in self.sample:
                    return self.sample[arg]
                if arg not in made:
                    type_ = _uninterned(arg.type, sizes)
                    made[arg] = opened.tensor(type_, self.to(arg.type.device))
                return made[arg]
            if type(arg) is tuple:
                return [fake(item) for item in arg]
            return self.to(arg) if type(arg) is torch.device else number(arg, sizes)

        try:
            with opened.tracing():
                positional, keywords = self.spec.call_arguments([fake(arg) for arg in self.bound])
                result = self.spec.target(*positional, **keywords)
        except Exception:  # no fake kernel, or none that supports symbols: not a user error
            return None
        outputs = self._outputs(result, opened, list(now))
        return _TracedOp(tuple(condition(text) for text in opened.conditions()), outputs)

    def _outputs(
        self, result: Any, opened: _torch.OpenSizes, symbols: list[Symbol]
    ) -> list[_Output | None]:
        returns = self.spec.returns
        results = result if len(returns) > 1 else (result,) if returns else ()
        found: list[_Output | None] = []
        for returned, tensor in zip(returns, results, strict=True):
            if returned.kind in (ReturnKind.FRESH, ReturnKind.VIEW):
                fresh = returned.kind is ReturnKind.FRESH
                for item in tensor if returned.is_list else (tensor,):
                    found.append(_output(item, fresh, opened, symbols))
        for position in self.spec.mutated:
            written = self.bound[position]
            for value in written if type(written) is tuple else (written,):
                if type(value) is Value:
                    found.append(_unchanged(value.type))
        return found


def _output(
    tensor: Any, fresh: bool, opened: _torch.OpenSizes, symbols: list[Symbol]
) -> _Output | None:
    if tensor is None or tensor.layout is not torch.strided:
        return None
    numbers = (*tensor.shape, *tensor.stride(), 0 if fresh else tensor.storage_offset())

    def at(values: Mapping[Symbol, int]) -> tuple[int, ...]:
        by_name = {symbol.name: values[symbol] for symbol in symbols}
        return tuple([opened.at(n, by_name) for n in numbers])

    return _Output(tuple([size_of(opened.formula(n)) for n in numbers]), at)


def _unchanged(type_: TensorType) -> _Output:
    """An output that is a written argument: it usually keeps its sizes."""
    parts: tuple[Size, ...] = (*type_.shape, *type_.stride, type_.offset)
    if type(type_) is SymbolicType:
        parts = (*type_.sizes, *type_.steps, type_.at_offset_size)
    return _Output(parts, lambda values: tuple([number(part, values) for part in parts]))


def _uninterned(type_: TensorType, sizes: Mapping[Symbol, Any]) -> TensorType:
    return type_.uninterned_at(sizes) if type(type_) is SymbolicType else type_


def _least_sizes(
    call: _SizedCall, now: Mapping[Symbol, int], conditions: tuple[Condition, ...]
) -> list[Condition]:
    """Minimum sizes for which the op is not an error, which torch's symbols do not give."""
    found = []
    for symbol, value in now.items():

        def is_allowed(size: int, symbol: Symbol = symbol) -> bool:
            there = {**now, symbol: size}
            return not all(c.at(there) for c in conditions) or call.is_allowed(there)

        if value > 2 and not is_allowed(2):
            low, high = 2, value  # `low` is an error, `high` is not
            while high - low > 1:
                middle = (low + high) // 2
                low, high = (low, middle) if is_allowed(middle) else (middle, high)
            found.append(condition(f"{symbol.name} >= {high}"))
    return found


def _solved(
    call: _SizedCall,
    now: Mapping[Symbol, int],
    present: Types,
    traced: _TracedOp,
    conditions: tuple[Condition, ...],
) -> tuple[Any, ...] | None:
    rows, seen = [present], [dict(now)]
    for values in _other_sizes(now):
        if len(rows) in SAMPLES:
            found = _types(rows, seen, traced)
            if found is not None or len(rows) == SAMPLES[-1]:
                return found
        if not all(c.at(values) for c in conditions):
            continue
        try:
            types = call.types(values)
        except Exception:  # invalid combination of sizes: the op requires relations between them
            return None
        if len(types) != len(present):
            return None
        rows.append(types)
        seen.append(values)
    return None if len(rows) < SAMPLES[0] else _types(rows, seen, traced)


def _types(
    rows: list[Types], seen: list[dict[Symbol, int]], traced: _TracedOp
) -> tuple[Any, ...] | None:
    symbols = {symbol: [values[symbol] for values in seen] for symbol in seen[0]}
    found = []
    for place, column in enumerate(zip(*rows)):
        output = traced.outputs[place] if place < len(traced.outputs) else None
        type_ = UNSOLVED if output is None else _exact_type(column, seen, output)
        if type_ is UNSOLVED:
            type_ = solve_type(column, symbols)
            if output is not None and not _agree(type_, output, seen, traced.conditions):
                return None
        found.append(type_)
    return None if UNSOLVED in found else tuple(found)


def _exact_type(column: tuple[Any, ...], seen: list[dict[Symbol, int]], output: _Output) -> Any:
    """The type from torch's symbols, if it agrees with concrete inference."""
    first, exact = column[0], output.exact
    if first is None or None in exact:
        return UNSOLVED
    rank = len(first.shape)
    if len(exact) != 2 * rank + 1:
        return UNSOLVED
    made = SymbolicType.with_sizes(exact[:rank], exact[rank:-1], exact[-1], first)  # type: ignore[arg-type]  # no None
    if all(type_at(made, values) is type_ for values, type_ in zip(seen, column, strict=True)):
        return made
    return UNSOLVED


def _agree(
    type_: Any, output: _Output, seen: list[dict[Symbol, int]], conditions: tuple[Condition, ...]
) -> bool:
    """Whether a fitted type has the shape that torch's symbols give, for other sizes, too."""
    if type_ is None or type_ is UNSOLVED:
        return True
    small = ({**seen[0], symbol: size} for symbol in seen[0] for size in (2, 3, 4, 5, 8, 16))
    for values in (*small, *_other_sizes(seen[0])):
        if all(c.at(values) for c in conditions):
            shape = type_at(type_, values).shape
            if shape != output.at(values)[: len(shape)]:
                return False
    return True


UNSOLVED = object()


def solve_type(column: tuple[Any, ...], symbols: Mapping[Symbol, list[int]]) -> Any:
    """The type that gives each of `column` for the symbols' values; `UNSOLVED` if there is none."""
    first = column[0]
    if all(type_ is first for type_ in column):
        return first
    if any(type_ is None or len(type_.shape) != len(first.shape) for type_ in column):
        return UNSOLVED
    sizes = [solve_size(numbers, symbols) for numbers in zip(*(t.shape for t in column))]
    if None in sizes:
        return UNSOLVED
    known: dict[Any, Any] = dict(symbols)
    for size, numbers in zip(sizes, zip(*(t.shape for t in column))):
        if type(size) is Expr and size.divisor != 1:
            known[size] = numbers
    shapes, strides = [t.shape for t in column], [t.stride for t in column]
    steps = solve_strides(shapes, strides, sizes, known)  # type: ignore[arg-type]  # no None
    offset = solve_size([t.offset for t in column], known)
    if steps is None or offset is None:
        return UNSOLVED
    return SymbolicType.with_sizes(tuple(sizes), tuple(steps), offset, first)  # type: ignore[arg-type]  # no None


def _other_sizes(now: Mapping[Symbol, int]) -> Iterator[dict[Symbol, int]]:
    """Other sizes: some close to this trace's, some far, to detect rounded divisions."""
    near = ((2, 5), (5, 1), (1, 3), (7, 11), (-1, 2), (13, 17), (3, -1), (11, 4), (-2, -1))
    for turn in range(3 * len(near)):
        one, other = near[turn % len(near)]
        factor = (turn + turn // len(near)) % 3 + 1
        values = {}
        for place, (symbol, value) in enumerate(now.items()):
            moved = value * factor + (one if place % 2 == 0 else other) * (1 + place // 2)
            values[symbol] = max(moved, 2)
        yield values
        if turn % 3 == 2:  # multiples: divisibility is preserved
            yield {symbol: value * (turn // 3 + 2) for symbol, value in now.items()}
