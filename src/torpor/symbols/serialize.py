"""Sizes, and conditions on them, as data that another process reads.

The number of a symbol depends on what the process did before. Another one knows it by its place
among the symbols of the graph: `s0` is the first of them. A condition is text,

    s0*s1 <= 4096 and s0 % 8 == 0

and a size a list: of terms, each a number and its factors, and what their sum is divided by.

    (2*s0*s1 + 1)//4        [[[2, ["s0", "s1"]], [1, []]], 4]

What is read may come from anybody. Text is taken apart into names of symbols, whole numbers,
arithmetic and comparisons; what is anything else is refused, and only what was taken apart is ever
computed.
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
"""What a condition is made of, beside names, numbers and calls."""


class NotSizes(ValueError):
    """Something is no size, or no condition on sizes; the message says what it is."""


def own_names(symbols: Iterable[Symbol]) -> dict[str, Symbol]:
    """Symbols by the names they have in this process."""
    return {one.name: one for one in symbols}


def common_names(symbols: Iterable[Symbol]) -> dict[str, Symbol]:
    """The symbols of a graph, which are given in its order, by the names all processes know."""
    return {f"s{place}": one for place, one in enumerate(symbols)}


# -- conditions ------------------------------------------------------------------------------------


def assumption(text: str, symbols: Mapping[str, Symbol]) -> Condition:
    """The condition of that text, in which symbols have these names; `NotSizes` if it is none.

    No table knows it: it is asked for certain sizes (`Condition.at`), and told of no others.
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
    """Its text, on the names that all processes know."""
    names = {one.name: common for common, one in common_names(symbols).items()}
    return _renamed(condition.text, names)


def _renamed(text: str, names: Mapping[str, str]) -> str:
    return _NAME.sub(lambda found: names[found[0]], text)


def _parsed(text: Any) -> ast.Expression:
    if type(text) is not str or len(text) > LONGEST_CONDITION:
        raise ValueError("no text, or too long")
    return ast.parse(text, mode="eval")


def _names_in(tree: ast.Expression, symbols: Mapping[str, Symbol]) -> set[str]:
    """The names of symbols in a condition; an error if it holds what conditions do not."""
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
            return isinstance(value, int)  # True and False as well
        case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
            return name in _FUNCTIONS and len(args) >= 2
        case ast.BinOp(op=ast.Pow(), left=ast.Name() | ast.Constant(), right=power):
            return isinstance(power, ast.Constant) and power.value in range(LARGEST_POWER)
        case ast.BinOp(op=ast.Pow()):
            return False
    return isinstance(part, _PARTS)


def _test(tree: ast.Expression, names: Sequence[str]) -> Callable[..., bool]:
    """A function of the symbols, made of parts that were looked at."""
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
    """A size as lists, numbers and names that all processes know."""
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
    """The size of which `serialize_size` made this; `NotSizes` if it did not."""
    try:
        size = size_of(_formula(data, symbols))
    except (AttributeError, KeyError, RecursionError, TypeError, ValueError) as error:
        raise NotSizes(f"no size: {type(error).__name__}: {error}") from error
    assert size is not None, "a formula is that of a size"
    return size


def _formula(data: Any, symbols: Mapping[str, Symbol]) -> Any:
    """`data` with this process's names, as `size_of` takes it; an error if it is something else."""
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
