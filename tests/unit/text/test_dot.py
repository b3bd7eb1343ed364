"""Graphviz text: every node and edge is there, and nothing in it can break the syntax."""

import re

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.ir.graphs import MATRIX, ROW, Line, aten, graphs, record, tensor_type
from torpor.ir.graph import Graph
from torpor.ir.node import leaf, scalar
from torpor.text.dot import dot

STRING = r'"(?:[^"\\\n]|\\.)*"'
ID = rf"(?:\w+|{STRING})"
ATTRIBUTES = rf"\[\w+=(?:\w+|{STRING})(?:, \w+=(?:\w+|{STRING}))*\]"
LINE = re.compile(rf"  (?:{ID}|{ID} -> {ID})(?: {ATTRIBUTES})?;")


def lines_of(text: str) -> list[str]:
    lines = text.split("\n")
    assert lines[0] == "digraph torpor {"
    assert lines[-1] == "}"
    assert [line for line in lines[1:-1] if not LINE.fullmatch(line)] == []
    return lines[1:-1]


def edges(text: str) -> list[str]:
    return [line.strip(" ;") for line in lines_of(text) if "->" in line.partition("[")[0]]


def box(text: str, name: str) -> str:
    return next(line for line in lines_of(text) if line.startswith(f"  {name} ["))


def small() -> Graph:
    total = record(aten.add_.Tensor, leaf(0, MATRIX), leaf(1, ROW), alpha=scalar(0, float))
    types = (tensor_type(4), tensor_type(4, dtype=torch.int64))
    result = record(aten.max.dim, total.outputs[0], 1, types=types, site=Line("a.py:1   max"))
    return Graph.of([result.outputs[1], total.outputs[0]])


def test_every_operand_is_an_edge() -> None:
    assert edges(dot(small())) == [
        "i0 -> n0",
        "i1 -> n0",
        "i2 -> n0",
        "n0 -> n1",
        'n1 -> r0 [taillabel="1"]',
        "n0 -> r1",
    ]


def test_labels_give_op_attributes_and_types() -> None:
    text = dot(small())
    assert r'label="leaf 0\nfloat32[4,8] @lazy:0"' in box(text, "i0")
    assert r'label="scalar 0\nscalar float"' in box(text, "i2")
    assert r'label="aten.max.dim\ndim=1\nfloat32[4] @lazy:0\nint64[4] @lazy:0"' in box(text, "n1")


def test_the_users_line_is_the_tooltip() -> None:
    assert r'tooltip="a.py:1   max\naten.max.dim(%a: ' in box(dot(small()), "n1")


def test_kinds_have_colours_of_their_own() -> None:
    graph = small()
    negated = record(aten.neg.default, graph.outputs[1])
    text = dot(Graph.of([*graph.outputs, *negated.outputs]))
    partial = dot(Graph.of(negated.outputs, known=negated.operands))
    boxes = [box(text, "i0"), box(text, "i2"), box(text, "n0"), box(text, "n1"), box(partial, "i0")]
    colours = [re.search('fillcolor="(#.{6})"', line) for line in boxes]
    assert len({match[1] for match in colours if match}) == 5


def test_long_labels_are_folded() -> None:
    many = record(aten.view.default, leaf(0, MATRIX), tuple(range(10_000)))
    wide = record(aten.unbind.int, leaf(0, MATRIX), types=(ROW,) * 500)
    text = dot(Graph.of([*many.outputs, *wide.outputs]))
    assert all(len(line) < 1500 for line in lines_of(text))
    assert "... 497 more" in box(text, "n1")


def test_a_broken_graph_is_drawn_all_the_same() -> None:
    graph = small()
    assert '"defined nowhere" -> n0' in edges(dot(Graph((), graph.nodes[1:], graph.outputs)))


def test_an_input_that_the_graph_computes_again_stays_the_input() -> None:
    maximum = small().nodes[-1]
    text = dot(Graph.of([maximum.outputs[1], maximum.outputs[0]], known=[maximum.outputs[0]]))
    assert edges(text)[-1] == 'i3 -> r1 [taillabel="0"]'


@given(st.text(), st.text(st.characters(exclude_categories=["Cs"])))
@settings(deadline=None)
def test_no_text_breaks_the_syntax(line: str, mode: str) -> None:
    x = leaf(0, MATRIX)
    node = record(aten.div.Tensor_mode, x, x, rounding_mode=mode)
    node.site = Line(line)
    lines_of(dot(Graph.of(node.outputs)))


@given(graphs())
@settings(deadline=None, max_examples=50)
def test_random_graphs_are_drawn_with_every_node(graph: Graph) -> None:
    lines = lines_of(dot(graph))
    assert sum(line.startswith("  n") and "->" not in line[:12] for line in lines) == 1 + len(graph)
