"""Text in, text out: what is printed parses to the same nodes and prints the same again."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings

from tests.unit.ir.graphs import (
    CPU,
    LAZY,
    MATRIX,
    ROW,
    Line,
    aten,
    graphs,
    numbers,
    record,
    same_graph,
    tensor_type,
    tensor_types,
)
from torpor.ir.graph import Graph
from torpor.ir.node import TABLE, leaf, scalar
from torpor.ir.types import TensorType
from torpor.ops.keys import node_of
from torpor.ops.spec import ArgKind, spec_of
from torpor.text.printer import print_graph, print_node, same_constant
from torpor.text.torch_parser import parse

SMALL = """\
graph(%0 = leaf 0 : float32[4,8] @lazy:0, %1 = leaf 1 : float32[8] @lazy:0) {
  %2 = aten.add.Tensor(%0, %1, alpha=2) : float32[4,8] @lazy:0
  %3, %4 = aten.max.dim(%2, 1) : float32[4] @lazy:0, int64[4] @lazy:0
  return %2, %4
}"""

TEXTS = {
    "two ops": SMALL,
    "nothing": "graph() {\n  return\n}",
    "an input returned": "graph(%0 = leaf 3 : bool[] @cpu) {\n  return %0, %0\n}",
    "scalars": """\
graph(%0 = leaf 0 : float32[2] @cpu, %1 = scalar 0 : float, %2 = scalar 1 : complex) {
  %3 = aten.mul.Scalar(%0, %1) : float32[2] @cpu
  %4 = aten.mul.Scalar(%3, %2) : complex64[2] @cpu
  return %4
}""",
    "numbers": """\
graph(%0 = leaf 0 : float32[2] @cpu) {
  %1 = aten.mul.Scalar(%0, 1) : float32[2] @cpu
  %2 = aten.mul.Scalar(%1, 1.0) : float32[2] @cpu
  %3 = aten.mul.Scalar(%2, True) : float32[2] @cpu
  %4 = aten.mul.Scalar(%3, -0.0) : float32[2] @cpu
  %5 = aten.mul.Scalar(%4, nan) : float32[2] @cpu
  %6 = aten.mul.Scalar(%5, -inf) : float32[2] @cpu
  %7 = aten.mul.Scalar(%6, complex(-0.0, nan)) : float32[2] @cpu
  %8 = aten.mul.Scalar(%7, -9223372036854775808) : float32[2] @cpu
  %9 = aten.mul.Tensor(%8, 1e-300) : float32[2] @cpu
  return %9
}""",
    "defaults left out, what follows by name": """\
graph(%0 = leaf 0 : float32[9] @cpu) {
  %1 = aten.slice.Tensor(%0, start=1, end=5) : float32[4] offset 1 @cpu
  %2 = aten.slice.Tensor(%0, -1, 1, 5, 2) : float32[2] stride [2] offset 1 @cpu
  %3 = aten.slice.Tensor(%0, step=2) : float32[5] stride [2] @cpu
  return %1, %2, %3
}""",
    "dtypes, layouts, memory formats, devices": """\
graph() {
  %0 = aten.full.default([2, 3], 0.5, dtype=torch.float64, layout=torch.strided, device=@lazy:0,\
 pin_memory=False) : float64[2,3] @lazy:0
  %1 = aten.clone.default(%0, memory_format=torch.preserve_format) : float64[2,3] @lazy:0
  return %1
}""",
    "strings": """\
graph(%0 = leaf 0 : float32[2] @cpu) {
  %1 = aten.div.Tensor_mode(%0, %0, rounding_mode="floor") : float32[2] @cpu
  %2 = aten.div.Tensor_mode(%0, %0, rounding_mode="\\"#\\\\ \\n\\u00e9") : float32[2] @cpu
  return %1, %2
}""",
    "lists of tensors, some absent": """\
graph(%0 = leaf 0 : float32[2,2] @cpu, %1 = leaf 1 : int64[3] @cpu) {
  %2 = aten.index.Tensor(%0, [None, %1]) : float32[2,3] @cpu
  %3 = aten.cat.default([%2, %2], -1) : float32[2,6] @cpu
  %4 = aten.cat.default([]) : float32[0] @cpu
  return %3, %4
}""",
    "writes give the new contents": """\
graph(%0 = leaf 0 : float32[3] @cpu, %1 = leaf 1 : float32[3] @cpu) {
  %2, %3 = aten._foreach_add_.Scalar([%0, %1], 1) : float32[3] @cpu, float32[3] @cpu
  %4 = aten.copy_.default(%2, %3) : float32[3] @cpu
  return %4
}""",
    "undefined outputs": """\
graph(%0 = leaf 0 : float32[1,1,3] @cpu) {
  %1, %2, %3 = aten.convolution_backward.default(%0, %0, %0, [0], [1], [0], [1], False, [0], 1,\
 [False, True, False]) : none, float32[1,1,3] @cpu, none
  return %2
}""",
    "a node without outputs": """\
graph(%0 = leaf 0 : bool[] @cpu) {
  aten._assert_async.msg(%0, "no")
  return
}""",
    "strides, offsets, conjugates and negatives": """\
graph(
  %0 = leaf 0 : complex64[2,3] stride [1,2] offset 4 conj neg @cuda:1,
  %1 = leaf 1 : float32[0,3] @meta,
  %2 = leaf 2 : float32[2] stride [0] @cpu,
) {
  return %0, %1, %2
}""",
    "computed inputs": """\
graph(%0 = computed 0 : float32[4] @cpu, %1 = computed 7 : float32[4] @cpu) {
  %2 = aten.sub.Tensor(%0, %1) : float32[4] @cpu
  return %2
}""",
}


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_text_parses_and_prints_the_same(text: str) -> None:
    assert print_graph(parse(text)) == text


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_the_same_text_twice_is_the_same_nodes(text: str) -> None:
    assert same_graph(parse(text), parse(text))


@given(graphs())
@settings(deadline=None, max_examples=150)
def test_random_graphs_come_back_as_the_same_nodes(graph: Graph) -> None:
    text = print_graph(graph)
    assert same_graph(parse(text), graph)
    assert print_graph(parse(text)) == text


@given(graphs())
@settings(deadline=None, max_examples=40)
def test_text_read_by_a_table_that_forgot_everything_prints_the_same(graph: Graph) -> None:
    text = print_graph(graph)
    TABLE.clear()
    assert print_graph(parse(text)) == text


@given(numbers, numbers)
@settings(deadline=None)
def test_two_numbers_print_the_same_only_if_they_are_the_same(a: complex, b: complex) -> None:
    x = leaf(0, MATRIX)
    one, other = record(aten.mul.Scalar, x, a), record(aten.mul.Scalar, x, b)
    assert (print_node(one) == print_node(other)) == (one is other) == same_constant(a, b)


@given(tensor_types())
@settings(deadline=None)
def test_types_come_back_as_the_same_object(type_: TensorType) -> None:
    assert parse(print_graph(Graph.of([leaf(5, type_)]))).inputs[0].type is type_


@pytest.mark.parametrize("defaults", [True, False], ids=["defaults", "no defaults"])
def test_every_aten_op_comes_back_as_the_same_node(defaults: bool) -> None:
    for target in _aten_ops():
        spec = spec_of(target)
        bound = [
            a.default if defaults and a.has_default else _example(a.kind) for a in spec.arguments
        ]
        node = node_of(spec, bound, (MATRIX,))
        graph = Graph.of(node.outputs)
        assert same_graph(parse(print_graph(graph)), graph), print_node(node)


def _example(kind: ArgKind) -> Any:
    x = leaf(0, MATRIX)
    return {
        ArgKind.TENSOR: x, ArgKind.TENSORS: (x, None), ArgKind.PLAIN: 3, ArgKind.PLAINS: (1, 2),
        ArgKind.FLOAT: -0.0, ArgKind.FLOATS: (0.5, math.nan), ArgKind.SCALAR: True,
        ArgKind.SCALARS: (1, 1.0), ArgKind.OPAQUE: None,
    }[kind]  # fmt: skip


def _aten_ops() -> list[torch._ops.OpOverload]:
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")]
    split = [name.removeprefix("aten::").partition(".") for name in sorted(names)]
    return [getattr(getattr(aten, base), overload or "default") for base, _, overload in split]


def test_a_recorded_line_stands_behind_its_node_as_a_comment() -> None:
    line = Line('train.py:31   y = x + b  # sum\n"more"')
    node = record(aten.add.Tensor, leaf(0, MATRIX), leaf(1, ROW), site=line)
    text = print_graph(Graph.of(node.outputs))
    assert text.splitlines()[1] == (
        "  %2 = aten.add.Tensor(%0, %1) : float32[4,8] @lazy:0"
        '    # train.py:31   y = x + b  # sum "more"'
    )
    assert parse(text).nodes == (node,)


def test_the_line_a_node_was_recorded_at_survives_parsing() -> None:
    node = record(aten.relu.default, leaf(0, MATRIX), site=Line("a.py:1   relu"))
    assert parse(print_graph(Graph.of(node.outputs))).nodes[0].site is node.site


def test_a_long_header_has_one_input_a_line() -> None:
    values = [leaf(slot, MATRIX) for slot in range(4)]
    text = print_graph(Graph.of(values))
    assert text.splitlines()[:3] == [
        "graph(",
        "  %0 = leaf 0 : float32[4,8] @lazy:0,",
        "  %1 = leaf 1 : float32[4,8] @lazy:0,",
    ]
    assert parse(text).inputs == tuple(values)


def test_a_computed_input_names_where_it_comes_from() -> None:
    types = (tensor_type(4), tensor_type(4, dtype=torch.int64))
    maximum = record(aten.max.dim, leaf(0, MATRIX), 1, types=types, site=Line("a.py:1   max"))
    node = record(aten.neg.default, maximum.outputs[1], types=types[1])
    text = print_graph(Graph.of(node.outputs, known=maximum.outputs))
    assert text.splitlines()[1] == (
        "  %0 = computed 0 : int64[4] @lazy:0,    # aten.max.dim output 1  a.py:1   max"
    )


def test_a_computed_input_comes_back_as_an_opaque_input() -> None:
    negated = record(aten.neg.default, leaf(0, MATRIX))
    node = record(aten.exp.default, negated.outputs[0])
    graph = parse(print_graph(Graph.of(node.outputs, known=negated.outputs)))
    assert [value.type for value in graph.inputs] == [MATRIX]
    assert graph.inputs[0].node.op.name == "torpor.computed"
    assert same_graph(parse(print_graph(graph)), graph)


def test_computed_inputs_old_and_new_get_places_of_their_own() -> None:
    opaque = parse("graph(%0 = computed 0 : float32[4,8] @lazy:0) {\n  return %0\n}").inputs[0]
    negated = record(aten.neg.default, leaf(0, MATRIX)).outputs[0]
    total = record(aten.add.Tensor, negated, opaque)
    text = print_graph(Graph.of(total.outputs, known=[opaque, negated]))
    assert "%0 = computed 1 :" in text
    assert "%1 = computed 0 :" in text


def test_an_input_that_the_graph_computes_again_keeps_one_name() -> None:
    types = (tensor_type(4), tensor_type(4, dtype=torch.int64))
    values, indices = record(aten.max.dim, leaf(0, MATRIX), 1, types=types).outputs
    total = record(aten.add.Tensor, values, indices, types=types[0])
    text = print_graph(Graph.of(total.outputs, known=[values]))
    assert "  _, %2 = aten.max.dim(%1, 1) : " in text
    assert "aten.add.Tensor(%0, %2)" in text
    assert len(parse(text).nodes) == 2


def test_equal_statements_are_one_node() -> None:
    graph = parse("""
        graph(%x = leaf 0 : float32[2] @cpu) {
          %a = aten.neg.default(%x) : float32[2] @cpu
          %b = aten.neg.default(self=%x) : float32[2] @cpu  # the same
          return %a, %b
        }
    """)
    assert len(graph.nodes) == 1
    assert graph.outputs[0] is graph.outputs[1]


def test_an_argument_is_left_out_only_if_it_is_its_default_exactly() -> None:
    x = leaf(0, MATRIX)
    printed = [print_node(record(aten.add.Tensor, x, x, alpha=a)) for a in (1, 1.0, True)]
    ends = [text.partition("%a")[2].partition(")")[0].rpartition("%a")[2] for text in printed]
    assert ends == ["", ", alpha=1.0", ", alpha=True"]
    values = [print_node(record(aten.nan_to_num.default, x, v)) for v in (None, 0.0, -0.0)]
    assert [text.partition("@lazy:0")[2].partition(")")[0] for text in values] == [
        "", ", 0.0", ", -0.0",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("a", "b"),
    [(1, 1.0), (1, True), (0.0, -0.0), (0j, -0j), ((1,), (True,)), ((), None), (0, None)],
)
def test_equal_looking_constants_are_told_apart(a: object, b: object) -> None:
    assert same_constant(a, a)
    assert not same_constant(a, b)


def test_nan_is_the_same_constant_as_nan() -> None:
    assert same_constant(math.nan, float("nan"))
    assert same_constant((complex(math.nan, 0),), (complex(float("nan"), 0),))


def test_a_node_alone_prints_on_one_line_with_the_types_of_its_operands() -> None:
    x, y = leaf(0, MATRIX), leaf(1, ROW)
    assert print_node(record(aten.addcmul.default, x, y, y, value=3)) == (
        "aten.addcmul.default(%a: float32[4,8] @lazy:0, %b: float32[8] @lazy:0, %b, value=3)"
        " -> float32[4,8] @lazy:0"
    )
    assert print_node(x.node) == "leaf 0 : float32[4,8] @lazy:0"
    assert print_node(scalar(2, float).node) == "scalar 2 : float"


def test_a_node_alone_shows_the_first_of_many_operands() -> None:
    node = record(aten.cat.default, tuple(leaf(slot, ROW) for slot in range(40)))
    text = print_node(node)
    assert "%h: float32[8] @lazy:0, ... 32 more])" in text
    assert "%i" not in text


def test_something_that_cannot_be_in_a_graph_prints_as_its_type() -> None:
    node = record(aten.neg.default, torch.Generator())
    assert print_node(node) == "aten.neg.default(<Generator>) -> float32[4,8] @lazy:0"


def test_a_broken_graph_still_prints() -> None:
    node = record(aten.neg.default, leaf(0, MATRIX))
    text = print_graph(Graph((), (node, leaf(1, ROW).node), (node.outputs[0], leaf(2, ROW))))
    assert text.splitlines() == [
        "graph() {",
        "  %0 = aten.neg.default(%?) : float32[4,8] @lazy:0",
        "  %1 = torpor.leaf(1) : float32[8] @lazy:0",
        "  return %0, %?",
        "}",
    ]


def test_sizes_may_be_spaced_and_lines_joined() -> None:
    text = "graph(%0=leaf 0:float32[ 4, 8 ]@lazy:0){%1=aten.neg.default(%0):float32[4,8] @lazy:0 return %1}"  # noqa: E501
    assert parse(text).inputs[0] is leaf(0, MATRIX)


def test_a_device_argument_is_read_with_its_index() -> None:
    node = record(aten._to_copy.default, leaf(0, MATRIX), device=CPU, types=MATRIX.on(CPU))
    assert "device=@cpu)" in print_node(node)
    node = record(aten._to_copy.default, leaf(0, MATRIX), device=LAZY)
    assert "device=@lazy:0)" in print_node(node)
