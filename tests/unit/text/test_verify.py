"""The verifier lets sound graphs through and names the node and the line of a broken one."""

from collections.abc import Callable

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
    chain,
    graphs,
    record,
    tensor_type,
)
from tests.unit.text.test_printer import TEXTS
from torpor.errors import GraphError
from torpor.ir.graph import Graph
from torpor.ir.node import TABLE, Node, Value, intern, leaf, scalar
from torpor.ir.types import SCALAR_TYPES, TensorType
from torpor.ops.keys import node_of, private_node
from torpor.ops.spec import spec_of
from torpor.text.parser import parse_graph
from torpor.text.torch_parser import parse
from torpor.text.verify import verify

INDICES = tensor_type(4, dtype=torch.int64)


def sound() -> Graph:
    total = record(aten.add.Tensor, leaf(0, MATRIX), leaf(1, ROW), site=Line("train.py:31   y = x"))
    result = record(aten.max.dim, total.outputs[0], 1, types=(tensor_type(4), INDICES))
    return Graph.of(result.outputs)


def fault(graph: Graph) -> str | None:
    try:
        verify(graph)
    except GraphError as error:
        return str(error)
    return None


def test_a_sound_graph_passes() -> None:
    verify(sound())


@pytest.mark.parametrize("text", TEXTS.values(), ids=TEXTS.keys())
def test_graphs_read_from_text_pass(text: str) -> None:
    verify(parse(text))


@given(graphs())
@settings(deadline=None, max_examples=60)
def test_a_random_graph_passes_or_is_refused_for_its_types(graph: Graph) -> None:
    """Random types put results on any device, and undefined tensors anywhere: no other fault."""
    allowed = ("is an undefined tensor", "the operands on")
    problem = fault(graph)
    assert problem is None or any(words in problem for words in allowed)


def test_a_chain_passes() -> None:
    verify(chain(1000))


def test_a_known_value_may_be_computed_again_for_the_sake_of_another_output() -> None:
    graph = sound()
    maximum = graph.nodes[-1]
    verify(Graph.of([maximum.outputs[1]], known=[maximum.outputs[0]]))
    again = record(aten.neg.default, maximum.outputs[0], types=tensor_type(4))
    both = Graph.of([again.outputs[0], maximum.outputs[1]], known=[maximum.outputs[0]])
    assert maximum.outputs[0] in both.inputs
    assert maximum in both.nodes
    verify(both)


def test_a_node_that_the_table_forgot_and_made_again_passes() -> None:
    first = record(aten.neg.default, leaf(0, MATRIX))
    operand = first.operands[0]
    TABLE.clear()
    second = node_of(spec_of(aten.neg.default), [operand], (MATRIX,))
    assert first is not second
    verify(Graph.of([first.outputs[0], second.outputs[0]]))


def test_a_private_node_may_have_the_key_of_an_interned_one() -> None:
    operand = leaf(0, MATRIX)
    first = node_of(spec_of(aten.neg.default), [operand], (MATRIX,))
    second = private_node(spec_of(aten.neg.default), [operand], (MATRIX,))
    assert second.key == first.key
    verify(Graph.of([second.outputs[0]]))


# -- planted faults --------------------------------------------------------------------------------


def forge(node: Node) -> Node:
    """A second node under the key of `node`."""
    return Node(node.op, node.key, node.args, tuple(v.type for v in node.outputs), node.site)


def without_first_node(graph: Graph) -> Graph:
    return Graph(graph.inputs, graph.nodes[1:], graph.outputs)


def reversed_nodes(graph: Graph) -> Graph:
    return Graph(graph.inputs, graph.nodes[::-1], graph.outputs)


def repeated_node(graph: Graph) -> Graph:
    return Graph(graph.inputs, (*graph.nodes, graph.nodes[0]), graph.outputs)


def missing_input(graph: Graph) -> Graph:
    return Graph(graph.inputs[:1], graph.nodes, graph.outputs)


def repeated_input(graph: Graph) -> Graph:
    return Graph((*graph.inputs, graph.inputs[0]), graph.nodes, graph.outputs)


def foreign_output(graph: Graph) -> Graph:
    other = record(aten.neg.default, leaf(0, MATRIX), site=Line("train.py:31   y = x"))
    return Graph(graph.inputs, graph.nodes, other.outputs)


def forged_value_as_output(graph: Graph) -> Graph:
    value = graph.nodes[0].outputs[0]
    return Graph(graph.inputs, graph.nodes, [Value(value.node, 0, value.type)])


def forged_value_as_input(graph: Graph) -> Graph:
    value = graph.inputs[0]
    return Graph([Value(value.node, 3, value.type)], (), ())


def forged_value_as_operand(graph: Graph) -> Graph:
    first = graph.nodes[0]
    first.args = (Value(first.args[0].node, 0, MATRIX), *first.args[1:])
    first.operands = (first.args[0], first.args[1])
    return graph


def operands_unlike_arguments(graph: Graph) -> Graph:
    graph.nodes[0].operands = graph.nodes[0].operands[:1]
    return graph


def operand_hidden_in_a_list(graph: Graph) -> Graph:
    node = record(aten.cat.default, (leaf(0, MATRIX),), site=Line("train.py:31   y = x"))
    node.operands = ()
    return Graph((), (node,), ())


def too_few_arguments(graph: Graph) -> Graph:
    graph.nodes[0].args = graph.nodes[0].args[:2]
    return graph


def output_of_another_node(graph: Graph) -> Graph:
    graph.nodes[0].outputs = (Value(graph.nodes[1], 0, MATRIX),)
    return graph


def output_at_another_place(graph: Graph) -> Graph:
    graph.nodes[1].outputs = graph.nodes[1].outputs[::-1]
    return graph


def with_type(type_: object) -> Callable[[Graph], Graph]:
    def plant(graph: Graph) -> Graph:
        graph.nodes[0].outputs[0].type = type_
        return graph

    return plant


def bad_type(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> TensorType:
    return TensorType.of(shape, stride, torch.float32, LAZY, offset)


def undefined_result(graph: Graph) -> Graph:
    graph.nodes[1].outputs[0].type = None
    return graph


def leaf_among_nodes(graph: Graph) -> Graph:
    return Graph(graph.inputs, (leaf(9, ROW).node, *graph.nodes), graph.outputs)


def slot_under_two_types(graph: Graph) -> Graph:
    return Graph((*graph.inputs, leaf(0, ROW)), graph.nodes, graph.outputs)


def scalar_slot_under_two_types(graph: Graph) -> Graph:
    return Graph((*graph.inputs, scalar(0, int), scalar(0, float)), graph.nodes, graph.outputs)


def negative_slot(graph: Graph) -> Graph:
    return Graph((*graph.inputs, leaf(-1, ROW)), graph.nodes, graph.outputs)


def number_as_leaf(graph: Graph) -> Graph:
    graph.inputs[0].type = None
    return graph


def result_elsewhere(graph: Graph) -> Graph:
    graph.nodes[0].outputs[0].type = MATRIX.on(CPU)
    return graph


def not_interned(graph: Graph) -> Graph:
    forged = forge(graph.nodes[1])
    return Graph(graph.inputs, (graph.nodes[0], forged), forged.outputs)


FAULTS: list[tuple[Callable[[Graph], Graph], str]] = [
    (without_first_node, "operand 0 is used before it is defined"),
    (reversed_nodes, "operand 0 is used before it is defined"),
    (missing_input, "operand 1 is used before it is defined"),
    (repeated_node, "the node stands in the graph twice"),
    (repeated_input, "input 2 of the graph is an input already"),
    (foreign_output, "output 0 of the graph is defined nowhere in it"),
    (forged_value_as_output, "output 0 of the graph is not among the outputs of its own node"),
    (forged_value_as_input, "input 0 of the graph is not among the outputs of its own node"),
    (forged_value_as_operand, "operand 0 is not among the outputs of its own node"),
    (operands_unlike_arguments, "the operands are not the values among the arguments"),
    (operand_hidden_in_a_list, "the operands are not the values among the arguments"),
    (too_few_arguments, "2 arguments for an op that has 3"),
    (output_of_another_node, "output 0 belongs to another node or place"),
    (output_at_another_place, "output 0 belongs to another node or place"),
    (with_type(bad_type((2, 3), (1,))), "malformed type: 2 sizes and 1 strides"),
    (with_type(bad_type((-2,), (1,))), "malformed type: a size is negative"),
    (with_type(bad_type((2,), (-1,))), "malformed type: a stride is negative"),
    (with_type(bad_type((2,), (1,), -1)), "malformed type: the offset is negative"),
    (with_type(SCALAR_TYPES[int]), "output 0 is a number; only run-time scalars are"),
    (with_type("float32"), "output 0 has 'float32' in the place of its type"),
    (with_type(None), "operand 0 is an undefined tensor"),
    (undefined_result, "output 0 of the graph is an undefined tensor"),
    (leaf_among_nodes, "an input stands among the nodes"),
    (slot_under_two_types, "leaf slot 0 enters the graph twice: as float32[4,8] @lazy:0 and as"),
    (scalar_slot_under_two_types, "scalar slot 0 enters the graph twice: as scalar int and as"),
    (negative_slot, "slot -1 is not a number from 0 up"),
    (number_as_leaf, "a leaf has a TensorType, not None"),
    (result_elsewhere, "output 0 is on cpu, the operands on lazy:0"),
    (not_interned, "not interned: its key belongs to another node"),
]


@pytest.mark.parametrize(("plant", "problem"), FAULTS, ids=[problem for _, problem in FAULTS])
def test_fault(
    plant: Callable[[Graph], Graph], problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TABLE, "generation", 0)  # as if no node was ever forgotten
    with pytest.raises(GraphError) as caught:
        verify(plant(sound()))
    assert problem in str(caught.value)


def test_a_fault_names_the_node_and_the_users_line() -> None:
    with pytest.raises(GraphError) as caught:
        verify(missing_input(sound()))
    assert str(caught.value).split("\n")[1:] == [
        "  recorded at: train.py:31   y = x",
        "  in graph:    aten.add.Tensor(%a: float32[4,8] @lazy:0, %b: float32[8] @lazy:0)"
        " -> float32[4,8] @lazy:0",
    ]


# -- devices ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("named", ["cpu", "cuda", "cuda:0"])
def test_a_device_argument_may_move_a_result(named: str) -> None:
    device = torch.device(named)
    where = torch.device("cuda:0") if device.type == "cuda" else device
    node = record(aten._to_copy.default, leaf(0, MATRIX), device=device, types=MATRIX.on(where))
    verify(Graph.of(node.outputs))


def test_a_device_argument_does_not_move_a_result_elsewhere() -> None:
    node = record(
        aten._to_copy.default, leaf(0, MATRIX), device=torch.device("cuda:1"),
        types=MATRIX.on(torch.device("cuda:0")),
    )  # fmt: skip
    with pytest.raises(GraphError, match="output 0 is on cuda:0, the operands on lazy:0"):
        verify(Graph.of(node.outputs))


def test_a_result_may_be_with_any_operand() -> None:
    number = leaf(0, TensorType.contiguous((), torch.float32, CPU))
    node = record(aten.add.Tensor, number, leaf(1, MATRIX))
    verify(Graph.of(node.outputs))


def test_an_op_without_tensors_makes_its_result_anywhere() -> None:
    verify(Graph.of(record(aten.zeros.default, (4, 8)).outputs))


def test_an_op_of_the_callers_own_is_verified_like_any_other() -> None:
    kind = TABLE.kind("test.own.op")
    text = "graph(%0 = leaf 0 : float32[2] @cpu) {\n  %1 = own.op(%0) : none\n  return\n}"
    graph = parse_graph(
        text, lambda _, args, __, types: intern(kind, (0,), lambda: (tuple(args), types))
    )
    verify(graph)
