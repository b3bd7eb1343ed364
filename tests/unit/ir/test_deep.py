"""A hundred thousand nodes in a chain: nothing may recurse on the depth of a graph."""

import gc
import sys
import weakref
from collections.abc import Iterator

import pytest

from tests.unit.ir.graphs import chain, same_graph
from torpor.ir.graph import Graph
from torpor.ir.node import TABLE
from torpor.text.dot import dot
from torpor.text.printer import print_graph
from torpor.text.torch_parser import parse
from torpor.text.verify import verify

DEPTH = 100_000


@pytest.fixture
def shallow_stack() -> Iterator[None]:
    """A stack that a recursion of any note would run through."""
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(300)
    yield
    sys.setrecursionlimit(limit)


@pytest.mark.usefixtures("shallow_stack")
def test_a_deep_graph_is_ordered_verified_printed_parsed_and_drawn() -> None:
    graph = chain(DEPTH)
    assert len(graph) == DEPTH
    verify(graph)
    text = print_graph(graph)
    assert text.count("\n") == DEPTH + 2
    assert same_graph(parse(text), graph)
    assert dot(graph).count(" -> n") == 2 * DEPTH


@pytest.mark.usefixtures("shallow_stack")
def test_a_deep_graph_is_freed() -> None:
    graph: Graph | None = chain(DEPTH)
    assert graph is not None
    last = weakref.ref(graph.nodes[-1])
    first = weakref.ref(graph.nodes[0])
    graph = None
    TABLE.clear()
    gc.collect()
    assert first() is None
    assert last() is None
