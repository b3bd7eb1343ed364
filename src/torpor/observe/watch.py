"""Who watches graphs run: tools that record or check what a backend does.

A watcher is called on the queue, right before a graph runs, with its arguments there. It must not
hold on to them: a donated one is about to be written over. What it returns is called with the
results before anybody else sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from torpor.backend.data import BackendData
from torpor.backend.interface import Backend
from torpor.execute.plan import Plan
from torpor.ir.node import SCALAR, Value
from torpor.passes.interpreter import graph_at

After = Callable[[Sequence[BackendData]], None]
Watcher = Callable[["Run"], After | None]

WATCHERS: list[Watcher] = []
"""Those asked when a graph is submitted; usually nobody."""


class Run:
    """One run of a compiled graph, about to start."""

    __slots__ = ("arguments", "backend", "graph", "numbers", "plan")

    def __init__(
        self, plan: Plan, backend: Backend, arguments: Sequence[Any], numbers: Sequence[Any]
    ) -> None:
        self.plan = plan
        self.backend = backend
        self.arguments = arguments
        sizes = plan.computation.sizes_in(arguments) if plan.symbols else {}
        self.graph = graph_at(plan.graph, sizes) if sizes else plan.graph  # as recorded
        self.numbers = numbers  # of each run-time scalar slot, also where they are given as data

    def inputs(self) -> Iterator[tuple[Value, Any]]:
        """The inputs of the graph as it was recorded: data, and plain numbers."""
        for value, argument in zip(self.graph.inputs, self.arguments):  # sizes may follow
            is_number = value.node.op is SCALAR
            yield value, self.numbers[value.node.args[0]] if is_number else argument

    @property
    def interpreted(self) -> bool:
        """The reference backend runs it in the place of the backend."""
        return self.plan.runner is not self.backend


def watched(watchers: Sequence[Watcher], run: Run) -> list[After]:
    """Show `run` to all watchers; those who want to see its results."""
    return [after for watcher in watchers if (after := watcher(run)) is not None]
