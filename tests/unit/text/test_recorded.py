"""Graphs that a program recorded: the text of a real step, not of a step written for a test."""

import pytest
import torch
from torch import nn

import torpor
from tests.unit.ir.graphs import same_graph
from torpor.ir.graph import Graph
from torpor.text.dot import dot
from torpor.text.printer import print_graph
from torpor.text.torch_parser import parse
from torpor.text.verify import verify
from torpor.trace.values import value_of


def recorded(*tensors: torch.Tensor) -> Graph:
    return Graph.of([value_of(tensor) for tensor in tensors])  # type: ignore[arg-type]


@pytest.fixture(autouse=True)
def nothing_pending() -> None:
    torpor.sync(wait=True)


def test_a_training_step_comes_back_as_the_same_nodes() -> None:
    layers = (nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(144, 5))
    model = nn.Sequential(*layers).to("lazy")
    torpor.sync(wait=True)
    x, y = torch.randn(2, 3, 8, 8, device="lazy"), torch.tensor([1, 4], device="lazy")
    nn.functional.cross_entropy(model(x), y).backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    graph = recorded(*gradients, *model.buffers())
    text = print_graph(graph)
    verify(graph)
    assert same_graph(parse(text), graph)
    assert print_graph(parse(text)) == text
    assert dot(graph).count("\n  n") >= len(graph)
    assert "test_recorded.py:" in text


def test_views_and_writes_through_them_come_back_as_the_same_nodes() -> None:
    x = torch.randn(4, 6, device="lazy")
    torpor.sync(wait=True)
    x[1:, ::2].mul_(2.0)
    x.t()[0].zero_()
    y = x.view(3, 8).unbind(0)[1].conj() + 1j
    graph = recorded(x, y)
    verify(graph)
    assert same_graph(parse(print_graph(graph)), graph)
