"""A bounded cache with two generations, like the intern table."""

from __future__ import annotations

from typing import Any, Generic, TypeVar
from weakref import WeakSet

from torpor import config
from torpor.symbols.expressions import Condition, valid_while

T = TypeVar("T")

_memos: WeakSet[Memo[Any]] = WeakSet()


class Memo(Generic[T]):
    """Memoized results by key; entries not looked up for a whole generation are dropped.

    `young` is always the same dictionary object, so hot paths may look keys up in it directly.
    """

    __slots__ = ("__weakref__", "conditional", "old", "young")

    def __init__(self) -> None:
        self.young: dict[Any, T] = {}
        self.old: dict[Any, T] = {}
        self.conditional: set[Any] = set()  # keys of entries that hold for certain sizes only
        _memos.add(self)

    def find(self, key: Any) -> T | None:
        """The entry for `key`, from either generation; None if there is none."""
        found = self.young.get(key)
        if found is None:
            found = self.old.pop(key, None)
            if found is not None:
                self.add(key, found)
        return found

    def add(self, key: Any, item: T, conditions: tuple[Condition, ...] = ()) -> T:
        """Store `item` under `key`; it can be found only while `conditions` hold."""
        if len(self.young) >= config.max_interned_nodes // 16:  # entries keep nodes alive
            self.old = {k: i for k, i in self.young.items() if k not in self.conditional}
            self.young.clear()
            self.conditional.clear()
        self.young[key] = item
        if conditions:
            self.conditional.add(key)
            valid_while(conditions, self.young, key, item)
        return item

    def clear(self) -> None:
        """Drop all entries."""
        self.young.clear()
        self.old.clear()
        self.conditional.clear()


def forget_memos() -> None:
    """Clear every memo."""
    for memo in list(_memos):
        memo.clear()
