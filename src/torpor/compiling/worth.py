"""Whether compiling a graph pays: what it would cost against what it would save.

A graph that has run for some time is taken to run as long again, and a compiled one to save a part
of that. What compiling costs is estimated from what it has cost, by node.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SAVED: Final = 0.15
"""The part of a run that compiling is taken to save; so much longer a program takes at worst if it
ends when a graph has just been compiled."""

BACKGROUND_PRICE: Final = 0.01
"""The part of a compile that the program feels if another process of low priority does it."""

_IMPORTS: Final = 3.0
"""Seconds to import Inductor."""
_SHARE: Final = "torch._inductor.compile_fx"


class CompileCosts:
    """What compiles have cost in this process, with a little experience to begin with."""

    def __init__(self) -> None:
        self.seconds, self.nodes = 10.0, 200
        self.pending: list[float] = []  # what each compile in the background may still cost
        self.waited = 0.0  # seconds that the program has waited for those

    def note(self, seconds: float, nodes: int) -> None:
        """A graph of so many nodes was compiled in so many seconds."""
        self.seconds += seconds
        self.nodes += nodes

    def of(self, nodes: int) -> float:
        """Seconds that a graph of so many nodes may well take to compile."""
        imports = 0.0 if _SHARE in sys.modules else _IMPORTS
        return imports + nodes * self.seconds / self.nodes

    @contextmanager
    def expected(self, nodes: int) -> Iterator[None]:
        """In the body a graph of so many nodes is compiled in the background."""
        seconds = self.of(nodes)
        self.pending.append(seconds)
        try:
            yield
        finally:
            self.pending.remove(seconds)


COSTS: Final = CompileCosts()


def is_worth_waiting(spent: float) -> bool:
    """A program that has run for `spent` seconds may stand still until its graphs are compiled.

    What is compiled in the background gets the cores that it leaves idle. A program that leaves
    none would go without for ever.
    """
    return bool(COSTS.pending) and spent * SAVED > sum(COSTS.pending) + COSTS.waited


def is_worth_it(spent: float, nodes: int, *, in_background: bool) -> bool:
    """A graph that has run for `spent` seconds, uncompiled, is worth compiling."""
    price = COSTS.of(nodes) * (BACKGROUND_PRICE if in_background else 1.0)
    return spent * SAVED > price
