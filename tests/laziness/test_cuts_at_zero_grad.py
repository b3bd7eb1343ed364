"""Gradients that die at `zero_grad` are no results of a step, where the backend asks for that."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

import torpor
from torpor.backend import registry
from torpor.backends.reference import ReferenceBackend


class Few(ReferenceBackend):
    cuts_at_zero_grad = True

    def __init__(self) -> None:
        super().__init__()
        self.results: list[int] = []

    def execute(self, computation: Any, arguments: Any, device: Any) -> Any:
        self.results.append(len(computation.graph.outputs))
        return super().execute(computation, arguments, device)


@pytest.fixture
def backend() -> Iterator[Few]:
    made = Few()
    registry.activate(made)
    yield made
    torpor.use("reference")


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1))


def train(model: nn.Module, x: torch.Tensor, steps: int = 4, read: bool = False) -> list[Any]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses: list[Any] = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item() if read else loss.detach())
    return losses


X = torch.linspace(-1, 1, 12).view(3, 4)


def test_a_step_of_six_parameters_has_seven_results(backend: Few) -> None:
    model = network()
    lazy = train(copy.deepcopy(model).to("lazy"), X.to("lazy"))
    float(lazy[2])  # of the last step that has begun
    assert backend.results == [7, 7, 7]
    assert [float(loss) for loss in lazy] == [float(loss) for loss in train(model, X)]
    assert backend.results == [7, 7, 7, 13]  # its gradients are alive


def test_gradients_can_be_read_before_they_die(backend: Few) -> None:
    plain, lazy = network(), network().to("lazy")
    train(plain, X, 2)
    train(lazy, X.to("lazy"), 2)
    for one, other in zip(lazy.parameters(), plain.parameters(), strict=True):
        assert one.grad is not None
        assert torch.equal(one.grad.cpu(), other.grad)  # type: ignore[arg-type]  # it has one
        assert torch.equal(one.detach().cpu(), other.detach())


def test_a_program_that_reads_after_its_steps_has_one_graph(backend: Few) -> None:
    model = network()
    lazy = train(copy.deepcopy(model).to("lazy"), X.to("lazy"), read=True)
    assert lazy == train(model, X, read=True)
    assert backend.results == [13, 13, 13, 13]


def test_a_module_call_cuts_before_it_adds_to_the_step(backend: Few) -> None:
    model = network().to("lazy")
    held = train(model, X.to("lazy"), 1)
    with torch.no_grad():
        model(X.to("lazy"))
    torpor.wait()
    assert backend.results == [13, 1]
    assert len(held) == 1


def test_wait_starts_a_step_that_waits(backend: Few) -> None:
    model = network().to("lazy")
    held = train(model, X.to("lazy"), 1)
    assert backend.results == []
    torpor.wait()
    assert backend.results == [13]
    assert len(held) == 1


def test_other_backends_cut_at_once() -> None:
    torpor.use("reference")
    model = network().to("lazy")
    train(model, X.to("lazy"), 1)
    assert not any(torpor.is_pending(parameter) for parameter in model.parameters())
