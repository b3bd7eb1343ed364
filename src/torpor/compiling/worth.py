"""Whether compiling a graph pays: its estimated cost against the expected savings.

A graph that has run for some time is expected to run as long again, and to take less time by a
fixed fraction once compiled. The cost is estimated from earlier compiles, per node.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

SAVED: Final = 0.15
"""The fraction of run time that compiling is expected to save. It also bounds the loss if a program
ends just after a graph was compiled."""

BACKGROUND_PRICE: Final = 0.01
"""The fraction of a compile that slows the program down if a low-priority process does it."""

_IMPORTS: Final = 3.0
"""Seconds that it takes to import Inductor."""
_SHARE: Final = "torch._inductor.compile_fx"


class CompileCosts:
    """The cost of compiles in this process, starting from a prior."""

    def __init__(self) -> None:
        self.seconds, self.nodes = 10.0, 200
        self.pending: list[float] = []  # expected seconds of each compile in the background
        self.waited = 0.0  # seconds that the program has waited for them

    def note(self, seconds: float, nodes: int) -> None:
        """Record that a graph with this number of nodes took these seconds to compile."""
        self.seconds += seconds
        self.nodes += nodes

    def of(self, nodes: int) -> float:
        """The expected seconds to compile a graph with this number of nodes."""
        imports = 0.0 if _SHARE in sys.modules else _IMPORTS
        return imports + nodes * self.seconds / self.nodes

    @contextmanager
    def expected(self, nodes: int) -> Iterator[None]:
        """In the body, a graph with this number of nodes is compiled in the background."""
        seconds = self.of(nodes)
        self.pending.append(seconds)
        try:
            yield
        finally:
            self.pending.remove(seconds)


COSTS: Final = CompileCosts()


def is_worth_waiting(spent: float) -> bool:
    """Whether a program that has run for `spent` seconds may block until its graphs are compiled.

    Background compiles only get idle cores. If the program leaves none, they would never finish.
    """
    return bool(COSTS.pending) and spent * SAVED > sum(COSTS.pending) + COSTS.waited


def is_worth_it(spent: float, nodes: int, *, in_background: bool) -> bool:
    """Whether compiling pays for a graph whose interpreted runs have taken `spent` seconds."""
    price = COSTS.of(nodes) * (BACKGROUND_PRICE if in_background else 1.0)
    return spent * SAVED > price
