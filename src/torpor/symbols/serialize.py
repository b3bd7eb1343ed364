"""Converting sizes, and conditions on them, to data for other processes.

A symbol's index depends on what its process did before, so a symbol is identified by its position
in the graph's symbols: `s0` is the first. A condition is text,

    s0*s1 <= 4096 and s0 % 8 == 0

and a size is a list of terms, each a coefficient and its factors, and the divisor of their sum:

    (2*s0*s1 + 1)//4        [[[2, ["s0", "s1"]], [1, []]], 4]

Input is untrusted. Text is parsed, and only symbol names, integers, arithmetic and comparisons are
accepted; only what was checked is ever evaluated.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Final

from torpor.symbols.expressions import Condition, Expr, Size, Symbol
from torpor.symbols.solve import size_of

LONGEST_CONDITION: Final = 1 << 14
LARGEST_POWER: Final = 16

_NAME: Final = re.compile(r"\bs\d+\b")
_FUNCTIONS: Final = {"Max": max, "Min": min, "max": max, "min": min}
_PARTS: Final = (
    ast.Expression, ast.Load, ast.Compare, ast.BoolOp, ast.BinOp, ast.UnaryOp, ast.Pow,
    ast.And, ast.Or, ast.Not, ast.UAdd, ast.USub,
    ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Mod,
    ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.Eq, ast.NotEq,
)  # fmt: skip
"""The AST nodes allowed in a condition, besides names, numbers and calls."""


class NotSizes(ValueError):
    """The input is not a size, or not a condition on sizes; the message quotes it."""


def own_names(symbols: Iterable[Symbol]) -> dict[str, Symbol]:
    """Symbols by their names in this process."""
    return {one.name: one for one in symbols}


def common_names(symbols: Iterable[Symbol]) -> dict[str, Symbol]:
    """A graph's symbols, given in its order, by the names used between processes."""
    return {f"s{place}": one for place, one in enumerate(symbols)}


# -- conditions ------------------------------------------------------------------------------------


def assumption(text: str, symbols: Mapping[str, Symbol]) -> Condition:
    """The condition with this text, in terms of these names; raises `NotSizes` if it is invalid.

    It is not registered: evaluate it for given sizes (`Condition.at`); it is never refreshed.
    """
    try:
        tree = _parsed(text)
        used = sorted(_names_in(tree, symbols), key=symbols.__getitem__)
        shown = _renamed(ast.unparse(tree), {name: symbols[name].name for name in used})
        test = _test(tree, used)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise NotSizes(f"no condition on sizes: {str(text)[:80]!r}: {error}") from error
    return Condition(shown, tuple([symbols[name] for name in used]), test)


def condition_text(condition: Condition, symbols: Iterable[Symbol]) -> str:
    """The text of a condition with the names used between processes."""
    names = {one.name: common for common, one in common_names(symbols).items()}
    return _renamed(condition.text, names)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return _NAME.sub(lambda found: names[found[0]], text)


def _parsed(text: Any) -> ast.Expression:
    if type(text) is not str or len(text) > LONGEST_CONDITION:
        raise ValueError("no text, or too long")
    return ast.parse(text, mode="eval")


def _names_in(tree: ast.Expression, symbols: Mapping[str, Symbol]) -> set[str]:
    """The names of symbols in a condition; raises if it contains anything that is not allowed."""
    parts = list(ast.walk(tree))
    functions = {id(part.func) for part in parts if isinstance(part, ast.Call)}
    found: set[str] = set()
    for part in parts:
        if isinstance(part, ast.Name) and id(part) not in functions and part.id in symbols:
            found.add(part.id)
        elif id(part) not in functions and not _is_allowed(part):
            raise ValueError(f"it holds {ast.dump(part)[:80]}")
    return found


def _is_allowed(part: ast.AST) -> bool:
    match part:
        case ast.Constant(value=value):
            return isinstance(value, int)  # includes True and False
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return name in _FUNCTIONS and len(args) >= 2
        case ast.BinOp(op=ast.Pow(), left=ast.Name() | ast.Constant(), right=power):
            return isinstance(power, ast.Constant) and power.value in range(LARGEST_POWER)
        case ast.BinOp(op=ast.Pow()):
            return False
    return isinstance(part, _PARTS)


def _test(tree: ast.Expression, names: Sequence[str]) -> Callable[..., bool]:
    """Compile a condition that was checked to a function of the symbols."""
    arguments = ast.arguments(
        posonlyargs=[], args=[ast.arg(arg=name) for name in names], kwonlyargs=[], kw_defaults=[],
        defaults=[],
    )  # fmt: skip
    whole = ast.Expression(body=ast.Lambda(args=arguments, body=tree.body))
    code = compile(ast.fix_missing_locations(whole), "<condition on sizes>", "eval")
    made: Callable[..., bool] = eval(code, {"__builtins__": {}, **_FUNCTIONS})
    return made


# -- sizes -----------------------------------------------------------------------------------------


def serialize_size(size: Size, symbols: Iterable[Symbol]) -> Any:
    """A size as lists and numbers, with the names used between processes."""
    names = {one: common for common, one in common_names(symbols).items()}
    return _serialized(size, names)


def _serialized(size: Any, names: Mapping[Symbol, str]) -> Any:
    if type(size) is not Expr:
        return names[size] if isinstance(size, Symbol) else size
    terms = [
        [number, [_serialized(one, names) for one in factors]] for number, factors in size.terms
    ]
    return [terms, size.divisor]


def deserialize_size(data: Any, symbols: Mapping[str, Symbol]) -> Size:
    """The inverse of `serialize_size`; raises `NotSizes` for any other data."""
    try:
        size = size_of(_formula(data, symbols))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise NotSizes(f"no size: {type(error).__name__}: {error}") from error
    assert size is not None, "a formula is that of a size"
    return size


def _formula(data: Any, symbols: Mapping[str, Symbol]) -> Any:
    """`data` with this process's names, in the form for `size_of`; raises if it is invalid."""
    if type(data) is int:
        return data
    terms, divisor = data
    made = []
    for number, factors in terms:
        parts = [symbols[f].name if type(f) is str else _formula(f, symbols) for f in factors]
        if type(number) is not int or any(type(part) is int for part in parts):
            raise TypeError("a term that is none")
        made.append((number, tuple(parts)))
    if type(divisor) is not int or divisor < 1:
        raise ValueError("a divisor that is none")
    return tuple(made), divisor
