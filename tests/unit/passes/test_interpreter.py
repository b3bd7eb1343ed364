"""One interpreter to subclass: what stands for values, and copies of graphs."""

from typing import Any

import pytest
import torch

from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.passes.interpreter import Copier, Interpreter
from torpor.text.printer import print_graph
from torpor.text.torch_parser import parse
from torpor.text.verify import verify

TEXT = """\
graph(%0 = leaf 0 : float32[4] @cpu, %1 = scalar 0 : float) {
  %2 = aten.mul.Tensor(%0, %1) : float32[4] @cpu
  %3, %4 = aten._foreach_add.Scalar([%2, %0], 1.0) : float32[4] @cpu, float32[4] @cpu
  return %4, %3
}"""


class Sums(Interpreter[Any]):
    """Runs the ops of a graph on tensors and numbers."""

    def __init__(self, given: dict[Value, Any]) -> None:
        super().__init__()
        self.given = given
        self.asked: list[Value] = []

    def input(self, value: Value) -> Any:
        self.asked.append(value)
        return self.given[value]

    def node(self, node: Node, args: tuple[Any, ...]) -> list[Any]:
        made = node.op.target(*args)
        return list(made) if isinstance(made, (list, tuple)) else [made]


def test_values_stand_for_tensors() -> None:
    graph = parse(TEXT)
    run = Sums(dict(zip(graph.inputs, (torch.ones(4), 3.0), strict=True)))
    run.run(graph.nodes)
    first, second = (run.value(value) for value in graph.outputs)
    assert first.tolist() == [2.0] * 4
    assert second.tolist() == [4.0] * 4
    assert run.asked == list(graph.inputs)  # each once


def copied(graph: Graph, copier: Copier) -> Graph:
    copier.run(graph.nodes)
    made = copier.graph(graph.outputs)
    verify(made)
    return made


def test_a_copy_is_the_same_graph_of_other_nodes() -> None:
    graph = parse(TEXT)
    made = copied(graph, Copier())
    assert print_graph(made) == TEXT.replace("%1 = scalar 0", "%1 = scalar 1")  # numbered together
    assert not set(made.nodes) & set(graph.nodes)


def test_a_copy_begins_where_the_nodes_do() -> None:
    graph = parse(TEXT)
    copier = Copier()
    copier.run(graph.nodes[1:])
    made = copier.graph(graph.outputs)
    assert copier.read == [graph.nodes[0].outputs[0], graph.inputs[0]]
    assert [value.type for value in made.inputs] == [value.type for value in copier.read]
    assert print_graph(made).startswith("graph(%0 = leaf 0 : float32[4] @cpu, %1 = leaf 1")


class Counted(Copier):
    """With one more than every number."""

    def constant(self, constant: Any) -> Any:
        return constant + 1 if type(constant) is float else constant


def test_a_copy_may_differ() -> None:
    assert "[%2, %0], 2.0)" in print_graph(copied(parse(TEXT), Counted()))


def test_an_interpreter_has_to_say_what_a_node_is() -> None:
    graph = parse(TEXT)
    with pytest.raises(NotImplementedError):
        Interpreter[Any]().run(graph.nodes)
