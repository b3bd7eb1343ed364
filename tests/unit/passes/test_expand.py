"""Ops with a lowering, taken apart: a graph in, a graph out."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torpor
from torpor.ir.graph import Graph
from torpor.passes.expand import Vocabulary, expanded
from torpor.text.printer import print_graph
from torpor.text.torch_parser import parse
from torpor.text.verify import verify

NS = "torpor_tests_expand"
_library = torch.library.Library(NS, "DEF")
_library.define("scaled(Tensor x, float by) -> Tensor")
_library.define("both(Tensor x) -> (Tensor, Tensor[])")
_library.define("store(Tensor(a!) x, Tensor y) -> ()")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    ops = {
        "scaled": lambda x, by: (x * by).clone().add_(1),
        "both": lambda x: (x + 1, [x * 2, x]),
        "store": lambda x, y: x.copy_(y),
    }
    for name, lowering in ops.items():
        torpor.ops.register(f"{NS}::{name}", lowering=lowering)
    yield
    for name in ops:
        torpor.ops.unregister(f"{NS}::{name}")


def after(text: str, backend: str = "reference") -> Graph:
    graph = parse(text.strip())
    made = expanded(graph, Vocabulary(backend, lambda device: device))
    verify(made)
    assert made.inputs == graph.inputs
    assert [v.type for v in made.outputs] == [v.type for v in graph.outputs]
    return made


def text_of(graph: Graph) -> list[str]:
    return [line.strip() for line in print_graph(graph).splitlines()[1:-1]]


def test_a_graph_without_such_ops_is_left_alone() -> None:
    graph = parse(
        "graph(%0 = leaf 0 : float32[4] @cpu) {\n"
        "  %1 = aten.relu.default(%0) : float32[4] @cpu\n  return %1\n}"
    )
    assert expanded(graph, Vocabulary("reference", lambda device: device)) is graph


def test_writes_inside_a_lowering_become_values() -> None:
    made = after(f"""
graph(%0 = leaf 0 : float32[4] @cpu) {{
  %1 = {NS}.scaled.default(%0, 2.0) : float32[4] @cpu
  %2 = aten.relu.default(%1) : float32[4] @cpu
  return %2
}}""")
    assert text_of(made) == [
        "%1 = aten.mul.Tensor(%0, 2.0) : float32[4] @cpu",
        "%2 = aten.clone.default(%1) : float32[4] @cpu",
        "%3 = aten.add.Tensor(%2, 1) : float32[4] @cpu",
        "%4 = aten.relu.default(%3) : float32[4] @cpu",
        "return %4",
    ]


def test_several_results_are_found_by_their_place_and_an_argument_is_copied() -> None:
    made = after(f"""
graph(%0 = leaf 0 : float32[4] @cpu) {{
  %1, %2, %3 = {NS}.both.default(%0) : float32[4] @cpu, float32[4] @cpu, float32[4] @cpu
  %4 = aten.sub.Tensor(%3, %1) : float32[4] @cpu
  return %2, %4, %3
}}""")
    ops = [node.op.name for node in made.nodes]
    assert ops[:2] == ["aten.add.Tensor", "aten.mul.Tensor"]
    assert "aten.clone.default" in ops
    assert made.outputs[2] is not made.inputs[0]


def test_the_new_contents_of_a_written_argument_are_an_output() -> None:
    made = after(f"""
graph(%0 = leaf 0 : float32[4] @cpu, %1 = leaf 1 : float16[4] @cpu) {{
  %2 = {NS}.store.default(%0, %1) : float32[4] @cpu
  %3 = {NS}.store.default(%2, %0) : float32[4] @cpu
  return %3, %2
}}""")
    assert made.outputs[0].node.operands != made.outputs[1].node.operands


def test_nodes_keep_the_line_of_the_op_they_stand_for() -> None:
    x = torch.ones(3).to("lazy")
    y = getattr(torch.ops, NS).scaled(x, 3.0)
    shown = torpor.graph(y, "backend").splitlines()
    lines = [line for line in shown if "aten." in line]
    assert len(lines) == 3
    assert all("test_expand.py" in line for line in lines)
    del y
