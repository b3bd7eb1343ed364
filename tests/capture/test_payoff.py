"""What is captured without being asked for: what has taken long to record, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import nn

import torpor
from tests.comparison import loads_jit_decompositions
from torpor.adaptive.bound import ModelGroup, _consider_capturing
from torpor.adaptive.choice import Choice
from torpor.capture import modules, payoff
from torpor.capture.payoff import RecordingCost

pytestmark = loads_jit_decompositions

Put = Callable[[Any], Any]


@pytest.fixture(autouse=True)
def by_itself(captured: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Modules are captured when that pays, which it does after few calls."""
    monkeypatch.setattr(torpor.config, "capture", "auto")
    monkeypatch.setattr(payoff, "PRICE", 5)
    monkeypatch.setattr(payoff, "_IMPORTS", 0.0)
    monkeypatch.setattr(payoff, "_LEAST", 0.0)
    monkeypatch.setattr(modules._torch, "had_unusual_backward", lambda: False)


def regions() -> int:
    return torpor.metrics.counters().get("CapturedRegions", 0)


def train(model: nn.Module, put: Put, steps: int) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(steps):
        loss = model(put(torch.full((2, 4), 1.0 + step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return list(model.parameters())


def test_a_model_is_captured_once_recording_it_has_taken_as_long(concrete: Put) -> None:
    model = concrete(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)))
    train(model, concrete, 4)
    assert not regions()
    train(model, concrete, 8)
    assert regions() == 2


def test_its_bits_are_those_of_eager(concrete: Put) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    found = train(concrete(plain), concrete, 12)
    assert regions() == 2
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    expected = train(plain, lambda t: t, 12)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_plain_model_is_never_captured() -> None:
    train(nn.Linear(4, 4), lambda t: t, 20)
    assert not regions()


def test_nothing_is_captured_by_itself_after_a_double_backward(
    concrete: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(modules._torch, "had_unusual_backward", lambda: True)
    train(concrete(nn.Linear(4, 4)), concrete, 20)
    assert not regions()


def test_a_call_that_met_a_new_node_does_not_count(concrete: Put) -> None:
    x, cost = concrete(torch.ones(3)), RecordingCost()
    for met_before in (False, True):
        cost.begin()
        _ = x * 1.2345 + 6.789
        cost.end(0.1, has_gradients=False)
        assert bool(cost.calls) is met_before


def test_a_small_model_is_not_captured_in_the_first_seconds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A capture of one layer takes a second, a recording of it a quarter of a millisecond."""
    monkeypatch.undo()
    monkeypatch.setattr(payoff, "_IMPORTS", 0.0)
    cost, calls = RecordingCost(), 0
    while not cost.pays():
        cost.begin()
        cost.end(0.00025, has_gradients=False)
        calls += 1
    assert calls * 0.00025 > 2.0


def lost(model: nn.Module, ratio: float, seconds: float) -> Choice:
    """A place that has lost by `ratio`: eager takes 10 ms a step, recording 5 of its own."""
    known = modules._known[model] = modules._Module()
    known.cost.seconds, known.cost.calls = 0.05, 10
    place = ModelGroup("model", Choice(0.0))
    place.modules.append(ref(model))
    place.choice.eager_step, place.choice.here, place.choice._due = 0.01, 20, 120
    _consider_capturing(place, ratio, seconds)
    assert known.is_due is (place.choice._due == 20)
    return place.choice


@pytest.mark.parametrize(
    ("ratio", "seconds", "captured"), [(1.2, 100.0, True), (1.2, 0.01, False), (1.5, 100.0, False)]
)
def test_a_place_that_lost_by_what_recording_takes_is_captured(
    ratio: float, seconds: float, captured: bool
) -> None:
    """If so it would win, and if the program has run for long enough to run on."""
    choice = lost(nn.Linear(2, 2), ratio, seconds)
    assert (choice._due == choice.here) is captured


def test_what_the_device_hides_does_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    full = [0.0]
    monkeypatch.setattr(payoff.metrics, "timed", lambda name: full[0])
    cost = RecordingCost()
    for _ in range(20):
        full[0] += 0.5  # the program has waited for the device since
        cost.begin()
        cost.end(0.2, has_gradients=True)
    assert not cost.pays()
    for _ in range(20):
        cost.begin()
        cost.end(0.2, has_gradients=True)
    assert cost.pays()
