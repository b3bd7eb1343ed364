"""Passes run in order, and what one breaks is found at once."""

from __future__ import annotations

import pytest
import torch

from torpor import config
from torpor.backend.registry import make
from torpor.compiling.compilation import passes_of
from torpor.errors import GraphError
from torpor.ir.graph import COMPILED, Block, Graph
from torpor.passes import Pass, run_passes

from .texts import graph_of

BODY = """
%1 = aten.sin.default(%0)
%2 = aten.cos.default(%1)
return %2
"""


def backwards(graph: Graph) -> Graph:
    return Graph(graph.inputs, graph.nodes[::-1], graph.outputs)


def test_passes_run_one_after_the_other() -> None:
    seen: list[str] = []

    def noted(name: str) -> Pass:
        return Pass(name, "", lambda graph: seen.append(name) or graph)

    graph = graph_of(BODY)
    assert run_passes([noted("one"), noted("two")], graph) is graph
    assert seen == ["one", "two"]


def test_a_graph_that_breaks_the_rules_is_blamed_on_its_pass() -> None:
    with pytest.raises(GraphError, match=r"after pass 'wrong'.*used before it is defined"):
        run_passes([Pass("wrong", "", backwards)], graph_of(BODY))


def test_the_switch_of_the_verifier_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(config, "verify_graphs", False)
    assert len(run_passes([Pass("wrong", "", backwards)], graph_of(BODY))) == 2


def blocks_of(graph: Graph, *outputs: tuple[int, ...]) -> Graph:
    """A block for each node, which leaves outputs of these nodes behind."""
    nodes = graph.nodes
    left = [tuple(nodes[i].outputs[0] for i in places) for places in outputs]
    pairs = zip(nodes, left, strict=True)
    return graph.in_blocks([Block(COMPILED, 0, (n,), outputs=o) for n, o in pairs])


@pytest.mark.parametrize(
    ("outputs", "problem"),
    [
        (((), (1,)), "not left behind by its own"),
        (((0,), ()), "is an output of the graph, and not left behind"),
        (((0,), (0, 1)), "left behind by a block that does not make it"),
    ],
)
def test_blocks_leave_behind_what_is_read(
    outputs: tuple[tuple[int, ...], ...], problem: str
) -> None:
    graph = graph_of(BODY)
    run_passes([Pass("right", "", lambda g: blocks_of(g, (0,), (1,)))], graph)
    with pytest.raises(GraphError, match=problem):
        run_passes([Pass("wrong", "", lambda g: blocks_of(g, *outputs))], graph)


def test_blocks_hold_every_node() -> None:
    graph = graph_of(BODY)
    missing = Graph(graph.inputs, graph.nodes, graph.outputs, [Block(COMPILED, 0, graph.nodes[:1])])
    with pytest.raises(GraphError, match="do not hold its nodes"):
        run_passes([Pass("wrong", "", lambda g: missing)], graph)


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("%1 = aten.sin.default(%0)\nreturn %1 over %1", "is no input"),
        ("%1 = aten.sum.default(%0) : float32[] @cpu\nreturn %1 over %0", "is written over"),
    ],
)
def test_donations_fit(body: str, problem: str) -> None:
    graph = graph_of(body)
    with pytest.raises(GraphError, match=problem):
        run_passes([Pass("cut", "", lambda g: g.in_blocks([Block(COMPILED, 0, g.nodes)]))], graph)


def test_a_backend_names_its_passes() -> None:
    def names(name: str) -> list[str]:
        backend = make(name)
        return [p.name for p in passes_of(backend, backend.backend_device(torch.device("cpu")))]

    assert names("reference") == ["expand"]
    rest = ["limit", "views", "outputs", "overwrite"]
    assert names("dynamo:eager") == ["expand", "schedule", *rest]
    lists = ["split-lists", "repeats", "join-lists"]
    assert names("inductor") == ["expand", "schedule", *lists, *rest]
