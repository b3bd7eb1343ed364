"""Watchers of runs: tools that record or check what a backend does.

A watcher is called on the queue right before a graph runs, with its materialized arguments. It must
not keep references to them: donated ones are about to be overwritten. If it returns a function,
that is called with the results before anything else sees them.
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
"""Read when a graph is submitted; usually empty."""


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
        self.numbers = numbers  # by run-time scalar slot, even if passed as data

    def inputs(self) -> Iterator[tuple[Value, Any]]:
        """The inputs of the recorded graph: data, and plain numbers."""
        for value, argument in zip(self.graph.inputs, self.arguments):  # sizes may follow
            is_number = value.node.op is SCALAR
            yield value, self.numbers[value.node.args[0]] if is_number else argument

    @property
    def interpreted(self) -> bool:
        """Whether the reference backend runs it instead of the backend."""
        return self.plan.runner is not self.backend


def watched(watchers: Sequence[Watcher], run: Run) -> list[After]:
    """Show `run` to all watchers; returns the functions to call with its results."""
    return [after for watcher in watchers if (after := watcher(run)) is not None]
