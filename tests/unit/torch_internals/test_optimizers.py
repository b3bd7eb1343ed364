"""What `_torch.optimizers` takes from inside torch still is what torpor takes it for."""

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from torpor import _torch


class _Own(torch.optim.SGD):
    """A class of this file: what is replaced in it is nobody else's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


@pytest.fixture
def kind() -> type[torch.optim.Optimizer]:
    """A new class of optimizers, of which torch has hooked `step` when the first was made."""
    made: type[torch.optim.Optimizer] = type("Fresh", (_Own,), {"step": _step()})
    _with_gradient(made)
    return made


def _step() -> Callable[..., Any]:
    def step(self: torch.optim.Optimizer, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.grad
        return "stepped"

    return step


def _with_gradient(kind: Any) -> tuple[torch.optim.Optimizer, torch.Tensor]:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    return kind([weight], lr=0.5), weight


def test_replace_step_surrounds_steps_between_their_hooks(kind: Any) -> None:
    order: list[Any] = []

    def around(step: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        order.append(type(optimizer))
        return step(optimizer, *args, **kwargs)

    assert _torch.replace_step(kind, around)
    optimizer, weight = _with_gradient(kind)
    optimizer.register_step_pre_hook(lambda *_: order.append("before"))
    optimizer.register_step_post_hook(lambda *_: order.append("after"))
    assert optimizer.step() == "stepped"
    assert order == ["before", kind, "after"]
    assert torch.equal(weight, torch.full((2,), 0.5))


def test_replace_step_is_met_by_schedulers_made_before_it(kind: Any) -> None:
    optimizer, _ = _with_gradient(kind)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # which wraps the step of this optimizer
    met: list[Any] = []

    def around(step: Any, optimizer: Any, *args: Any) -> Any:
        met.append(optimizer)
        return step(optimizer, *args)

    assert _torch.replace_step(kind, around)
    optimizer.step()
    assert met == [optimizer]


def test_replace_step_replaces_once(kind: Any) -> None:
    calls: list[str] = []

    def noting(name: str) -> Callable[..., Any]:
        def around(step: Any, *args: Any) -> Any:
            calls.append(name)
            return step(*args)

        return around

    assert _torch.replace_step(kind, noting("first"))
    assert _torch.replace_step(kind, noting("second"))
    _with_gradient(kind)[0].step()
    assert calls == ["first"]


def test_replace_step_refuses_what_torch_has_not_hooked() -> None:
    class Bare:
        def step(self) -> None:
            raise AssertionError("nobody calls it")

    assert not _torch.replace_step(Bare, lambda *_: None)  # type: ignore[arg-type]  # on purpose


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "RMSprop", "Adagrad"])
def test_steps_of_torchs_optimizers_can_be_replaced(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = getattr(torch.optim, name)
    kind = type(name, (found,), {"step": found.step.__wrapped__})
    _with_gradient(kind)  # torch hooks it
    assert _torch.replace_step(kind, lambda step, *args: step(*args))


def test_has_function_modes_knows_modes_of_this_thread() -> None:
    class Mode(TorchFunctionMode):
        """Does nothing."""

    assert not _torch.has_function_modes()
    with Mode():
        assert _torch.has_function_modes()
    assert not _torch.has_function_modes()


def test_foreach_calls_are_noted_with_their_numbers() -> None:
    tensors = [torch.ones(2), torch.ones(3)]
    with _torch.ForeachCalls() as noted:
        torch._foreach_mul_(tensors, 2.0)
        torch._foreach_addcdiv_(tensors, tensors, tensors, [0.5, 0.25])
        torch.add(tensors[0], 1.0)
    assert noted.calls == [("_foreach_mul_", 0), ("_foreach_addcdiv_", None, None, 2)]
    assert noted.numbers == [2.0, 0.5, 0.25]
    assert torch.equal(tensors[0], torch.full((2,), 2.5))


def test_foreach_calls_tell_of_every_function_and_its_result() -> None:
    told: list[tuple[str, Any]] = []

    def note(name: str, args: Any, kwargs: Any, result: Any) -> None:
        told.append((name, result))

    tensor = torch.ones(1)
    with _torch.ForeachCalls(note):
        added = torch.add(tensor, 1.0)
        torch._foreach_add_([tensor], 1.0)
    names = [name for name, _ in told]
    assert names == ["add", "_foreach_add_"]
    assert told[0][1] is added


@pytest.mark.parametrize(("name", "last"), [("SGD", -0.125), ("Adam", -1.25), ("AdamW", -1.25)])
def test_foreach_calls_see_the_whole_step_of_an_optimizer(name: str, last: float) -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = getattr(torch.optim, name)([weight], lr=0.125, foreach=True)
    with _torch.ForeachCalls() as noted:
        optimizer.step()
    assert noted.calls
    assert all(call[0].startswith("_foreach_") for call in noted.calls)
    assert noted.numbers[-1] == pytest.approx(last)  # the rate, corrected for the first step


def test_count_a_step_counts_as_torchs_optimizers_do() -> None:
    weight = nn.Parameter(torch.ones(2))
    weight.grad = torch.ones(2)
    optimizer = torch.optim.Adam([weight], foreach=True)
    optimizer.step()
    counter = optimizer.state[weight]["step"]
    ours = counter.clone()
    optimizer.step()
    _torch.count_a_step([ours])
    assert torch.equal(ours, counter)
    assert ours.dtype is counter.dtype
    assert ours.item() == 2.0


def test_around_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = sys.modules[torch.optim.Adam.__module__]
    loop = module._single_tensor_adam
    monkeypatch.setattr(module, "_single_tensor_adam", loop)
    seen: list[Any] = []

    def around(step: Callable[..., None]) -> Callable[..., None]:
        def watched(*lists: Any, **options: Any) -> None:
            seen.append((step, [len(one) for one in lists], sorted(options)))
            step(*lists, **options)

        return watched

    _torch.around_adam(around)
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    for kind in (torch.optim.Adam, torch.optim.AdamW):
        kind([parameter], 0.5).step()
    names = ["amsgrad", "beta1", "beta2", "capturable", "decoupled_weight_decay", "differentiable"]
    names += ["eps", "found_inf", "grad_scale", "has_complex", "lr", "maximize", "weight_decay"]
    assert seen == [(loop, [1, 1, 1, 1, 0, 1], names)] * 2
    assert parameter.max() < 0.1  # both steps were made
