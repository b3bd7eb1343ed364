"""Steps of optimizers that are recorded once do to every bit what eager's do."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn, optim

import torpor
from torpor.capture import optimizer_steps
from torpor.capture.optimizer_steps import KINDS

Put = Callable[[Any], Any]
Program = Callable[..., Any]

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "weight decay": {"weight_decay": 0.1},
    "maximize": {"maximize": True},
    "foreach": {"foreach": True},
    "loop": {"foreach": False},
}
CASES = [(kind, name) for kind in sorted(KINDS, key=str) for name in SETTINGS]
MORE: list[tuple[Any, dict[str, Any]]] = [
    (optim.Adam, {"amsgrad": True}),
    (optim.AdamW, {"amsgrad": True, "maximize": True}),
    (optim.SGD, {"momentum": 0.9}),
    (optim.SGD, {"momentum": 0.9, "nesterov": True, "weight_decay": 0.1}),
    (optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (optim.Adagrad, {"lr_decay": 0.1}),
    (optim.AdamW, {"lr": torch.tensor(0.01)}),
    (optim.Rprop, {}),
    (optim.Adafactor, {}),
]


def counted(name: str) -> int:
    return torpor.metrics.counters().get(name, 0)


def model_of(put: Put) -> nn.Module:
    torch.manual_seed(0)
    return put(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2)))


def train(
    put: Put,
    make: Callable[[nn.Module], Any],
    between: Program = lambda step, model, optimizer: optimizer,
    steps: int = 9,
) -> list[torch.Tensor]:
    """All parameters and state after some steps; `between` is called before each."""
    model = model_of(put)
    optimizer = make(model)
    seen = []
    for step in range(steps):
        optimizer = between(step, model, optimizer)
        loss = model(put(torch.linspace(-1, 1 + step, 12).view(3, 4))).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.detach())
    kept = [one for own in optimizer.state.values() for one in own.values()]
    tensors = [*seen, *model.parameters(), *(one for one in kept if isinstance(one, torch.Tensor))]
    return [torpor.eager(one.detach()).clone() for one in tensors]


def check(put: Put, make: Callable[[nn.Module], Any], *args: Any, **kwargs: Any) -> int:
    """The same as eager; how many calls were looked up."""
    result = train(put, make, *args, **kwargs)
    found = counted("RegionLookups")
    for one, other in zip(result, train(lambda x: x, make, *args, **kwargs), strict=True):
        assert torch.equal(one, other)
    return found


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Look-ups are those of optimizers: modules are not captured."""
    monkeypatch.setattr(torpor.capture.modules, "_can_be_captured", lambda module: False)


pytestmark = pytest.mark.usefixtures("alone")


def adamw(model: nn.Module) -> Any:
    return optim.AdamW(model.parameters(), lr=0.01)


@pytest.mark.parametrize(("kind", "name"), CASES, ids=lambda case: getattr(case, "__name__", case))
def test_every_optimizer_is_eager_bit_for_bit(kind: Any, name: str, concrete: Put) -> None:
    found = check(concrete, lambda model: kind(model.parameters(), **SETTINGS[name]))
    by_foreach = kind not in (optim.ASGD, optim.NAdam, optim.RAdam) or (
        name == "foreach" and kind is optim.RAdam
    )
    assert (found > 0) == (by_foreach and name != "loop")


@pytest.mark.parametrize(("kind", "options"), MORE)
def test_other_settings_are_eager_bit_for_bit(
    kind: Any, options: dict[str, Any], concrete: Put
) -> None:
    check(concrete, lambda model: kind(model.parameters(), **options))


def test_numbers_of_coming_steps_are_found_at_once(
    concrete: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until a setting changes; then the numbers of the next steps are others."""
    runs, on_standins = [], optimizer_steps._on_standins

    def counted_run(*args: Any) -> Any:
        runs.append(args)
        return on_standins(*args)

    def between(step: int, model: nn.Module, optimizer: Any) -> Any:
        optimizer.param_groups[0]["lr"] = 0.01 if step < 25 else 0.02
        optimizer.param_groups[0]["betas"] = (0.9, 0.999) if step < 38 else (0.8, 0.999)
        return optimizer

    monkeypatch.setattr(optimizer_steps, "_on_standins", counted_run)
    assert check(concrete, adamw, between, steps=60) > 40
    assert len(runs) < 30


def test_a_number_that_stands_in_two_calls_may_be_an_input_of_one(concrete: Put) -> None:
    for eps in (1e-6, 1e-5, 1e-4):  # promoted where the operands are the same for all three
        torpor.metrics.reset()
        assert check(concrete, lambda m: optim.Adadelta(m.parameters(), eps=eps)) > 0  # noqa: B023


@pytest.mark.parametrize("kind", [optim.AdamW, optim.SGD, optim.Adagrad])
def test_a_rate_that_changes_with_every_step_is_an_input(kind: Any, concrete: Put) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> Any:
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 3)
        return optimizer

    assert check(concrete, lambda m: kind(m.parameters()), between, steps=12) >= 4


def test_a_scheduler_holds_on_to_the_step(concrete: Put) -> None:
    class Scheduled(optim.AdamW):
        pass

    def make(model: nn.Module) -> Any:
        optimizer = adamw(model)
        optimizer.scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
        return optimizer

    def between(step: int, model: nn.Module, optimizer: Any) -> Any:
        if step:
            optimizer.scheduler.step()
        return optimizer

    assert check(concrete, make, between, steps=12) >= 4
    torpor.metrics.reset()
    assert check(concrete, lambda m: Scheduled(m.parameters())) == 0  # a class of the user's


def test_a_rate_that_changes_once_is_another_step(concrete: Put) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> Any:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 if step < 6 else 0.01
            group["weight_decay"] = 0.1 if step < 9 else 0.0
        return optimizer

    assert check(concrete, adamw, between, steps=14) >= 6


NUMPY: dict[str, Callable[[int], dict[str, Any]]] = {
    "a rate that changes always": lambda step: {"lr": np.interp(step, [0, 20], [0.1, 0.5])},
    "weight decay": lambda step: {"weight_decay": np.float64(0.01 * (1 + step // 6))},
    "betas": lambda step: {"betas": (np.float64(0.5 + 0.1 * (step // 6)), 0.9)},
    "single precision": lambda step: {"weight_decay": np.float32(0.01 * (1 + step // 6))},
}


@pytest.mark.parametrize("name", NUMPY)
def test_numbers_may_be_those_of_numpy(name: str, concrete: Put) -> None:
    def between(step: int, model: nn.Module, optimizer: Any) -> Any:
        for group in optimizer.param_groups:
            group.update(NUMPY[name](step))
        return optimizer

    check(concrete, lambda model: optim.Adam(model.parameters()), between, steps=14)


def freeze(step: int, model: Any, optimizer: Any) -> Any:
    model[0].requires_grad_(step % 6 < 3)
    return optimizer


def edit(step: int, model: Any, optimizer: Any) -> Any:
    if step == 6:
        with torch.no_grad():
            model[0].weight.mul_(0.5)
        own = optimizer.state[model[0].weight]
        own["exp_avg"].zero_()
        own["step"] += 3
    return optimizer


def load(step: int, model: Any, optimizer: Any) -> Any:
    if step == 6:
        optimizer.load_state_dict(optimizer.state_dict())
    return optimizer


def duplicate(step: int, model: Any, optimizer: Any) -> Any:
    if step != 6:
        return optimizer
    other = adamw(model)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return other


def clip(step: int, model: Any, optimizer: Any) -> Any:
    if step == 5:
        optimizer.register_step_pre_hook(
            lambda *told: nn.utils.clip_grad_norm_(model.parameters(), 0.01) and None
        )
    return optimizer


def negate(step: int, model: Any, optimizer: Any) -> Any:
    optimizer.param_groups[0]["maximize"] = step > 6
    return optimizer


@pytest.mark.parametrize("between", [freeze, edit, load, duplicate, clip, negate])
def test_what_happens_between_steps_counts(between: Program, concrete: Put) -> None:
    assert check(concrete, adamw, between, steps=14) >= 4


def test_groups_have_their_own_rates_and_may_be_added(concrete: Put) -> None:
    def make(model: Any) -> Any:
        return optim.AdamW([{"params": model[0].parameters(), "lr": 0.1}], weight_decay=0.2)

    def between(step: int, model: Any, optimizer: Any) -> Any:
        if step == 5:
            rest = [*model[2].parameters(), *model[3].parameters()]
            optimizer.add_param_group({"params": rest, "lr": 0.01, "betas": (0.8, 0.9)})
        return optimizer

    assert check(concrete, make, between, steps=14) >= 8


def test_a_closure_is_called(concrete: Put) -> None:
    calls = []
    model = model_of(concrete)
    optimizer = adamw(model)
    for _ in range(6):
        model(concrete(torch.ones(3, 4))).sum().backward()
        optimizer.step(lambda: calls.append(1))
    assert len(calls) == 6
    assert any("closure" in line for line in torpor.metrics.lines("NotCaptured"))


def test_parameters_that_share_memory_are_recorded_op_by_op(concrete: Put) -> None:
    def steps(put: Put) -> torch.Tensor:
        both = put(torch.linspace(-1, 1, 8))
        halves = [nn.Parameter(half) for half in both.view(2, 4)]
        optimizer = optim.AdamW(halves)
        for step in range(6):
            for half in halves:
                half.grad = put(torch.linspace(-1, step, 4))
            optimizer.step()
        return torpor.eager(both)

    assert torch.equal(steps(concrete), steps(lambda x: x))
    assert counted("RegionLookups") == 0
    assert any("share memory" in line for line in torpor.metrics.lines("NotCaptured"))


def test_versions_grow_as_they_do_op_by_op(concrete: Put) -> None:
    model = model_of(concrete)
    optimizer = adamw(model)
    grown = []
    for _ in range(9):
        model(concrete(torch.ones(3, 4))).sum().backward()
        before = model[0].weight._version
        optimizer.step()
        optimizer.zero_grad()
        grown.append(model[0].weight._version - before)
    assert counted("RegionLookups") >= 3
    assert len({*grown[1:]}) == 1


class Some(nn.Module):
    """Each call uses some of its layers: parameters have made different numbers of steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, chosen: tuple[int, ...]) -> torch.Tensor:
        for place in chosen:
            x = x + self.layers[place](x)
        return x


def test_which_parameters_have_made_which_number_of_steps_matters(concrete: Put) -> None:
    """Steps that read equal values and equal numbers may have them for other parameters."""

    def run(put: Put) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model, draws, found = put(Some()), random.Random(3), []
        optimizer = optim.AdamW(model.parameters(), lr=0.01)
        for _ in range(24):
            chosen = tuple(place for place in range(4) if draws.random() < 0.7) or (0,)
            loss = model(put(torch.randn(3, 4)), chosen).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return [torch.tensor(found), *map(torpor.eager, model.parameters())]

    result, expected = run(concrete), run(lambda tensor: tensor)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert counted("RegionLookups")
