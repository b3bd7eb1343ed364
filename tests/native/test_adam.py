"""Adam's steps by the native library: torch's bits and versions; what is left to torch."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.optim import SGD, Adam, AdamW

from torpor import _torch, metrics
from torpor.backend.native_library import NATIVE
from torpor.frontend import adam


@pytest.fixture(autouse=True)
def patched(monkeypatch: pytest.MonkeyPatch, library: Any) -> Iterator[None]:
    """torch's loop is replaced as `torpor.enable()` does, and put back."""
    module: Any = sys.modules[Adam.__module__]
    monkeypatch.setattr(module, "_single_tensor_adam", module._single_tensor_adam)
    monkeypatch.setattr(NATIVE, "library", library)
    found = adam.Adam()
    _torch.around_adam(found.around)
    monkeypatch.setattr(adam, "ADAM", found)
    yield
    found.on = False


def shapes() -> list[tuple[int, ...]]:
    return [(64, 8, 3, 3), (7,), (1,), (33, 5), (), (0, 3), (4097,), (300, 200)]


def train(kind: Any, is_native: bool, steps: int = 12, change: Any = None, **options: Any) -> Any:
    """Parameters and state after some steps, versions, and how many steps the library made."""
    adam.ADAM.on = is_native
    before = metrics.counted("NativeAdamSteps")
    generator = torch.Generator().manual_seed(0)
    draw = functools.partial(torch.randn, generator=generator)
    parameters = [nn.Parameter(draw(shape)) for shape in shapes()]
    optimizer = kind(parameters, **options)
    for i in range(steps):
        for parameter in parameters:
            parameter.grad = draw(parameter.shape).to(parameter.dtype) * 10.0 ** (i % 7 - 3)
        if change is not None:
            change(parameters, optimizer, i)
        optimizer.step()
    adam.ADAM.on = False
    kept = [optimizer.state[parameter] for parameter in parameters]
    tensors = [*parameters, *(one for own in kept for one in own.values() if type(one) is Tensor)]
    versions = [one._version for one in tensors]
    return tensors, versions, metrics.counted("NativeAdamSteps") - before


def compare(kind: Any, steps: int, **options: Any) -> None:
    mine, versions, made = train(kind, True, **options)
    eager, expected, none = train(kind, False, **options)
    assert (made, none) == (steps, 0)
    assert versions == expected
    assert all(map(torch.equal, mine, eager))


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("kind", [Adam, AdamW])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"weight_decay": 0.1},
        {"maximize": True, "weight_decay": 0.01},
        {"betas": (0.8, 0.99), "eps": 1e-6, "lr": 0.1},
        {"lr": 1, "betas": (0.9, 0.0), "eps": 0.5},
        {"betas": (0.5, 0.999)},
        {"betas": (0.0, 0.9), "weight_decay": 0.1},
        {"betas": (0.3, 0.999), "maximize": True},
    ],
)
def test_steps_have_torchs_bits_and_versions(kind: Any, options: Any, threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        compare(kind, 12, **options)
    finally:
        torch.set_num_threads(before)


def test_a_schedule_and_parameters_that_start_later() -> None:
    def change(parameters: list[nn.Parameter], optimizer: Any, step: int) -> None:
        optimizer.param_groups[0]["lr"] = 0.1 / (step + 1)
        if step < 5:
            parameters[3].grad = None

    compare(Adam, 12, change=change)


def strided(parameters: list[nn.Parameter], optimizer: Any, step: int) -> None:
    if step == 0:
        parameters[0].data = parameters[0].data.to(memory_format=torch.channels_last)
    parameters[0].grad = parameters[0].grad.to(memory_format=torch.channels_last)  # type: ignore[union-attr]


def test_channels_last_parameters() -> None:
    compare(Adam, 12, change=strided)


def transposed(parameters: list[nn.Parameter], optimizer: Any, step: int) -> None:
    parameters[3].grad = parameters[3].grad.t().contiguous().t()  # type: ignore[union-attr]


def expanded(parameters: list[nn.Parameter], optimizer: Any, step: int) -> None:
    parameters[6].grad = torch.ones(1).expand(4097)


def doubled(parameters: list[nn.Parameter], optimizer: Any, step: int) -> None:
    gradient: Any = parameters[0].grad
    parameters[0].grad = None
    parameters[0].data = parameters[0].data.double()
    parameters[0].grad = gradient.double()


@pytest.mark.parametrize(
    ("options", "change"),
    [
        ({"amsgrad": True}, None),
        ({"lr": torch.tensor(0.01)}, None),
        ({"foreach": True}, None),
        ({"fused": True}, None),
        ({}, transposed),
        ({}, expanded),
        ({}, doubled),
    ],
)
def test_what_is_left_to_torch(options: Any, change: Any) -> None:
    mine, versions, made = train(Adam, True, change=change, **options)
    eager, expected, _ = train(Adam, False, change=change, **options)
    assert made == 0
    assert versions == expected
    assert all(map(torch.equal, mine, eager))


def small() -> tuple[nn.Parameter, Any]:
    parameter = nn.Parameter(torch.ones(3))
    parameter.grad = torch.ones(3)
    return parameter, Adam([parameter])


def made(act: Callable[[], object]) -> int:
    adam.ADAM.on = True
    before = metrics.counted("NativeAdamSteps")
    act()
    return metrics.counted("NativeAdamSteps") - before


def test_profilers_and_modes_see_torchs_ops() -> None:
    _, optimizer = small()
    assert made(optimizer.step) == 1
    with torch.profiler.profile() as profile:
        assert made(optimizer.step) == 0
    assert any(event.key == "aten::addcdiv_" for event in profile.key_averages())
    with torch.device("cpu"):  # a mode
        assert made(optimizer.step) == 0
    assert made(optimizer.step) == 1


def test_subclasses_are_left_to_torch() -> None:
    class Own(nn.Parameter):
        pass

    parameter = Own(torch.ones(3))
    parameter.grad = torch.ones(3)
    assert made(Adam([parameter]).step) == 0


def test_parameters_that_share_memory_are_left_to_torch() -> None:
    base = torch.ones(4)
    parameters = [nn.Parameter(base[:3]), nn.Parameter(base[1:])]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    assert made(Adam(parameters).step) == 0
    same = nn.Parameter(torch.ones(3))
    same.grad = same.data
    assert made(Adam([same]).step) == 0


def test_a_shared_gradient_is_only_read() -> None:
    shared = torch.ones(3)
    parameters = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = shared
    assert made(Adam(parameters).step) == 1
    assert torch.equal(shared, torch.ones(3))


def test_a_library_that_rounds_otherwise_is_not_used() -> None:
    def other(parameters: Any, *rest: Any) -> bool:
        for parameter in parameters:
            parameter.add_(1e-6)
        return True

    module: Any = sys.modules[Adam.__module__]
    loop = module._single_tensor_adam.__wrapped__
    assert adam.rounds_alike(other, loop) is False
    assert adam.rounds_alike(lambda *_: False, loop) is None
    assert adam.rounds_alike(NATIVE.library.adam, loop) is True


def test_other_optimizers_are_torchs() -> None:
    parameter, _ = small()
    assert made(SGD([parameter], 0.1).step) == 0
