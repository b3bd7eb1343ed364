"""Symbolic sizes: symbols, expressions of them, and conditions on them (guards).

A symbol is a size of the current trace. It is bound when the first tensor with that size enters the
trace, and keeps its value until the trace ends. Types and arguments of nodes contain symbols and
expressions instead of numbers, so that a step with other sizes hits the same nodes.

A node may be valid for some sizes only: `x[:50]` has 50 rows if `x` has more. Such a node is in its
intern table only while its conditions hold; thus lookups need no guard checks. When a symbol is
bound to another value, the tables are updated.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, ClassVar
from weakref import WeakSet, WeakValueDictionary

MAX_CONDITIONS = 512
"""How many conditions are kept; entries that depend on the least recently used are dropped."""

FOLLOWING = threading.RLock()
"""Held while types are refreshed after a change, or made: compile threads make types, too."""


class Symbol:
    """A size that is bound anew in every trace."""

    __slots__ = (
        "conditions",
        "epoch",
        "exact",
        "expr",
        "followers",
        "index",
        "is_size",
        "name",
        "value",
    )

    def __init__(self, index: int) -> None:
        self.index = index
        self.name = f"s{index}"
        self.value = 0
        self.epoch = -1  # the trace in which it was bound
        self.is_size = True  # False: the offset of a view, which is unrelated to other numbers
        self.followers: WeakSet[Any] = WeakSet()  # types to refresh when the value changes
        self.conditions: list[Condition] = []  # conditions other than `symbol == number`
        self.exact: dict[int, Condition] = {}
        self.expr = Expr.of(((1, (self,)),))

    def __repr__(self) -> str:
        return self.name

    def __lt__(self, other: Symbol) -> bool:
        return self.index < other.index

    @property
    def symbols(self) -> tuple[Symbol]:
        """Itself, for symmetry with `Expr.symbols`."""
        return (self,)

    def at(self, values: Mapping[Symbol, Any]) -> Any:
        """The number that it is for these values."""
        return values[self]

    def bind(self, value: int, epoch: int) -> None:
        """Bind it to `value` in the trace `epoch`."""
        self.epoch = epoch
        if self.value == value:
            return
        before, self.value = self.value, value
        Expr.version += 1
        with FOLLOWING:
            for follower in self.followers:
                follower.refresh()
        for number in (before, value):
            condition = self.exact.get(number)
            if condition is not None:
                condition.refresh()
        for condition in self.conditions:
            condition.refresh()


Term = tuple[int, tuple[Any, ...]]  # a coefficient, and factors: symbols or expressions


class Expr:
    """A sum of products of symbols, with an optional divisor. Interned: equality is `is`."""

    __slots__ = ("__weakref__", "_seen", "_value", "divisor", "symbols", "terms")

    version = 0  # incremented when a symbol changes
    _known: ClassVar[WeakValueDictionary[Any, Expr]] = WeakValueDictionary()

    _seen: int  # the version for which `_value` is valid
    _value: int
    terms: tuple[Term, ...]
    divisor: int  # the sum is divided by it, rounding down
    symbols: tuple[Symbol, ...]

    @staticmethod
    def of(terms: Sequence[Term], divisor: int = 1) -> Expr:
        """The interned expression with these terms."""
        if divisor == 1 and len(terms) == 1 and terms[0][0] == 1 and len(terms[0][1]) == 1:
            (only,) = terms[0][1]
            if type(only) is Expr:
                return only
        key = (tuple(terms), divisor)
        found = Expr._known.get(key)
        if found is None:
            found = object.__new__(Expr)
            found.terms, found.divisor = key
            met = {s for _, factors in terms for factor in factors for s in factor.symbols}
            found.symbols = tuple(sorted(met))
            found._seen, found._value = -1, 0
            found = Expr._known.setdefault(key, found)  # a compile thread may have been faster
        return found

    @property
    def value(self) -> int:
        """The number that it is in this trace."""
        if self._seen != Expr.version:
            self._value = self.at({symbol: symbol.value for symbol in self.symbols})
            self._seen = Expr.version
        return self._value

    def at(self, values: Mapping[Symbol, Any]) -> Any:
        """The number that it is for these values of the symbols."""
        total: Any = 0
        for factor, others in self.terms:
            product: Any = factor
            for each in others:
                product = product * each.at(values)
            total = total + product
        return total // self.divisor if self.divisor != 1 else total

    def is_bound(self, epoch: int) -> bool:
        """Whether all its symbols are bound in the trace `epoch`."""
        return all(symbol.epoch == epoch for symbol in self.symbols)

    def __repr__(self) -> str:
        text = " + ".join(map(_term, self.terms)).replace("+ -", "- ")
        if self.divisor != 1:
            return f"({text})//{self.divisor}"
        return text if len(self.terms) == 1 else f"({text})"


def _term(term: Term) -> str:
    factor, symbols = term
    names = "*".join([f"({s!r})" if type(s) is Expr else repr(s) for s in symbols])
    if not names:
        return str(factor)
    return names if factor == 1 else f"{factor}*{names}"


Size = int | Expr


def number(size: Any, values: Mapping[Symbol, Any]) -> Any:
    """`size` for these values of its symbols; anything but an expression is returned unchanged."""
    return size.at(values) if type(size) is Expr else size


def present(arg: Any) -> Any:
    """An argument with each expression replaced by its number in this trace."""
    if type(arg) is Expr:
        return arg.value
    if type(arg) is tuple and any(type(item) is Expr for item in arg):
        return tuple([item.value if type(item) is Expr else item for item in arg])
    return arg


def symbols_in(items: Iterable[Any]) -> list[Symbol]:
    """The symbols in arguments, ordered by index."""
    found: set[Symbol] = set()
    for item in items:
        if type(item) is Expr:
            found.update(item.symbols)
        elif type(item) is tuple:
            found.update(symbols_in(item))
    return sorted(found)


_symbols: list[Symbol] = []


def symbol(index: int) -> Symbol:
    """The symbol with this index."""
    while len(_symbols) <= index:
        _symbols.append(Symbol(len(_symbols)))
    return _symbols[index]


def named(name: str) -> Symbol:
    """The symbol with this name."""
    return symbol(int(name[1:]))


def bound(epoch: int) -> dict[Symbol, int]:
    """The sizes that are bound in the trace `epoch`."""
    return {s: s.value for s in _symbols if s.epoch == epoch and s.is_size}


# -- conditions ------------------------------------------------------------------------------------


class Condition:
    """A guard: a predicate on symbols, evaluated for the current trace."""

    __slots__ = ("entries", "holds", "symbols", "test", "text")

    def __init__(self, text: str, symbols: tuple[Symbol, ...], test: Callable[..., bool]) -> None:
        self.text = text
        self.symbols = symbols
        self.test = test
        self.entries: set[GuardedEntry] = set()
        self.holds = self.now()

    def now(self) -> bool:
        """Evaluate it for this trace."""
        return self._is_met([symbol.value for symbol in self.symbols])

    def at(self, values: Mapping[Symbol, int]) -> bool:
        """Evaluate it for these sizes."""
        return self._is_met([values[symbol] for symbol in self.symbols])

    def _is_met(self, numbers: list[int]) -> bool:
        try:
            return bool(self.test(*numbers))
        except ArithmeticError:  # a division by a size that is 0: not valid for such sizes
            return False

    def refresh(self) -> None:
        """Reevaluate it after a symbol has changed, and update the entries that depend on it."""
        holds = self.now()
        if holds is not self.holds:
            self.holds = holds
            for entry in self.entries:
                entry.refresh()

    def __repr__(self) -> str:
        return self.text


class GuardedEntry:
    """An entry that is in a table only while its conditions hold."""

    __slots__ = ("conditions", "item", "key", "rivals", "table")

    def __init__(
        self,
        table: dict[Any, Any],
        key: Any,
        item: Any,
        conditions: tuple[Condition, ...],
        rivals: dict[tuple[Condition, ...], GuardedEntry],
    ) -> None:
        self.table, self.key, self.item, self.conditions = table, key, item, conditions
        self.rivals = rivals  # all entries for the same key, including itself
        for each in conditions:
            each.entries.add(self)

    @property
    def is_valid(self) -> bool:
        """Whether all its conditions hold."""
        return all(condition.holds for condition in self.conditions)

    def refresh(self) -> None:
        """Add it to the table, or replace it there by another valid entry for its key."""
        if self.is_valid:
            self.table[self.key] = self.item
        elif self.table.get(self.key) is self.item:
            del self.table[self.key]
            for rival in self.rivals.values():
                if rival.is_valid:
                    self.table[self.key] = rival.item

    def forget(self) -> None:
        """Drop it for good."""
        for condition in self.conditions:
            condition.entries.discard(self)
        if self.table.get(self.key) is self.item:
            del self.table[self.key]
        self.rivals.pop(self.conditions, None)
        if not self.rivals:
            _entries.pop((id(self.table), self.key), None)


_entries: dict[tuple[int, Any], dict[tuple[Condition, ...], GuardedEntry]] = {}
"""Entries by table and key, then by their conditions."""

_conditions: OrderedDict[str, Condition] = OrderedDict()


def condition(text: str) -> Condition:
    """The condition with this text, a Python expression of symbol names."""
    found = _conditions.get(text)
    if found is None:
        names = sorted(set(re.findall(r"\bs\d+\b", text)), key=lambda name: int(name[1:]))
        symbols = tuple(map(named, names))
        test = eval(
            f"lambda {', '.join(names)}: {text}", {"Max": max, "Min": min}
        )  # the text is from torch or from us
        found = _conditions[text] = Condition(text, symbols, test)
        for each in symbols:
            each.conditions.append(found)
        _forget_old_conditions()
    _conditions.move_to_end(text)
    return found


def exactly(symbol: Symbol) -> Condition:
    """The condition that `symbol` has its present value."""
    text = f"{symbol.name} == {symbol.value}"
    found = symbol.exact.get(symbol.value) or _conditions.get(text)
    if found is None:
        value = symbol.value
        found = Condition(text, (symbol,), lambda now: bool(now == value))
        symbol.exact[value] = _conditions[text] = found
        _forget_old_conditions()
    _conditions.move_to_end(text)
    return found


def _forget_old_conditions() -> None:
    while len(_conditions) > MAX_CONDITIONS:
        _, old = _conditions.popitem(last=False)
        for each in old.symbols:
            if old in each.conditions:
                each.conditions.remove(old)
            for value in [v for v, c in each.exact.items() if c is old]:
                del each.exact[value]
        for entry in list(old.entries):
            entry.forget()


def valid_while(
    conditions: Iterable[Condition], table: dict[Any, Any], key: Any, item: Any
) -> None:
    """Make `item`, which is in `table` now, be there only while the conditions hold."""
    held = tuple([_known(each) for each in conditions])
    rivals = _entries.setdefault((id(table), key), {})
    before = rivals.get(held)
    if before is not None:
        for each in held:
            each.entries.discard(before)
    rivals[held] = GuardedEntry(table, key, item, held, rivals)


def _known(old: Condition) -> Condition:
    """The registered condition with the text of `old`; `old` itself if that had been dropped."""
    found = _conditions.get(old.text)
    if found is None:
        found = _conditions[old.text] = old
        for each in old.symbols:
            each.conditions.append(old)
        old.refresh()
        _forget_old_conditions()
    _conditions.move_to_end(old.text)
    return found


def forget_conditions() -> None:
    """Drop all conditions and entries; for tests and for a change of backend."""
    for each in _symbols:
        each.conditions.clear()
        each.exact.clear()
    _conditions.clear()
    forget_entries()


def forget_entries() -> None:
    """Drop all entries that depend on conditions."""
    for rivals in list(_entries.values()):
        for entry in list(rivals.values()):
            entry.forget()
