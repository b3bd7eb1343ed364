"""Select many items of a sequence without a Python loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any

ItemGetter = Callable[[Sequence[Any]], tuple[Any, ...]]


def item_getter(places: Sequence[int]) -> ItemGetter:
    """A function that returns the items at `places` of a sequence, in this order."""
    if len(places) > 1:
        return itemgetter(*places)
    return lambda items: tuple([items[place] for place in places])
