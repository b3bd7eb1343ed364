"""A dictionary that stays small: two generations, as the intern table has them."""

from __future__ import annotations

from typing import Any, Generic, TypeVar
from weakref import WeakSet

from torpor import config
from torpor.symbols.expressions import Condition, valid_while

T = TypeVar("T")

_memos: WeakSet[Memo[Any]] = WeakSet()


class Memo(Generic[T]):
    """What was computed before, by key; what is not asked for again is dropped.

    `young` is always the same dictionary, so that a hot path may look things up there directly.
    """

    __slots__ = ("__weakref__", "conditional", "old", "young")

    def __init__(self) -> None:
        self.young: dict[Any, T] = {}
        self.old: dict[Any, T] = {}
        self.conditional: set[Any] = set()  # keys of what is true of some sizes only
        _memos.add(self)

    def find(self, key: Any) -> T | None:
        """The entry under `key`, from either generation."""
        found = self.young.get(key)
        if found is None:
            found = self.old.pop(key, None)
            if found is not None:
                self.add(key, found)
        return found

    def add(self, key: Any, item: T, conditions: tuple[Condition, ...] = ()) -> T:
        """Remember `item` under `key`, and find it while `conditions` hold."""
        if len(self.young) >= config.max_interned_nodes // 16:  # each holds on to some nodes
            self.old = {k: i for k, i in self.young.items() if k not in self.conditional}
            self.young.clear()
            self.conditional.clear()
        self.young[key] = item
        if conditions:
            self.conditional.add(key)
            valid_while(conditions, self.young, key, item)
        return item

    def clear(self) -> None:
        """Forget everything."""
        self.young.clear()
        self.old.clear()
        self.conditional.clear()


def forget_memos() -> None:
    """Forget what every memo holds."""
    for memo in list(_memos):
        memo.clear()
