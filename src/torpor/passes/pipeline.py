"""What a pass is, and how passes are run in order, verifying the graph after each."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

from torpor import config
from torpor.errors import GraphError
from torpor.ir.graph import Graph
from torpor.ir.node import Node
from torpor.text.verify import verify


@dataclass(frozen=True, slots=True)
class Pass:
    """Takes a graph and returns a graph; the same one if it changes nothing."""

    name: str
    description: str
    run: Callable[[Graph], Graph]


def run_passes(passes: Iterable[Pass], graph: Graph) -> Graph:
    """`graph` after all `passes`."""
    for _, made in stages(passes, graph):
        graph = made
    return graph


def stages(passes: Iterable[Pass], graph: Graph) -> Iterator[tuple[Pass, Graph]]:
    """`graph` after each of `passes`, verified unless `config.verify_graphs` is off."""
    known: set[Node] = set()
    for one in passes:
        before, graph = graph, one.run(graph)
        if config.verify_graphs and graph is not before:
            try:
                verify(graph, known)
            except GraphError as error:
                error.args = (f"after pass {one.name!r}: {error}",)
                raise
        yield one, graph
