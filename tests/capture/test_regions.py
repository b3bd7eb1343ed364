"""What is captured is recorded by one look-up, and computes the very bits of eager."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torpor
from tests.comparison import loads_jit_decompositions

pytestmark = loads_jit_decompositions

Put = Callable[[Any], Any]


def counted(name: str) -> int:
    return torpor.metrics.counters().get(name, 0)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)  # type: ignore[no-any-return]  # modules have no types


class Broken(nn.Module):
    """Three graph breaks: a print, a numpy call, a branch on numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).relu()
        print("between", end="")
        scale = float(x.detach().numpy().shape[0])
        x = self.second(x) * scale
        return x + 1 if x.sum() > 0 else x - 1


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LSTM(8, 8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]  # modules have no types


class Written(nn.Module):
    """It writes to its argument, which no guard can see."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.add_(1))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def dropout() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.3), nn.Linear(16, 4), nn.Dropout(0.5))


def conv() -> nn.Module:
    return nn.Sequential(nn.Conv1d(4, 6, 3), nn.BatchNorm1d(6), nn.ReLU(), nn.Flatten())


MODELS = (mlp, dropout, conv, Attention, Recurrent, Broken)


def train(model: nn.Module, put: Put, batches: list[Tensor]) -> list[Tensor]:
    """Losses, then parameters and buffers."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(1)
    found = []
    for batch in batches:
        loss = model(put(batch)).float().pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *model.parameters(), *model.buffers()]


def as_eager(make: Callable[[], nn.Module], put: Put, batches: list[Tensor]) -> None:
    torch.manual_seed(0)
    model = make()
    expected = train(copy.deepcopy(model), lambda t: t, batches)
    result = train(put(model), put, batches)
    for one, other in zip(result, expected, strict=True):
        assert torch.equal(torpor.eager(one.detach()).cpu(), other.detach())


@pytest.mark.parametrize("make", MODELS, ids=lambda make: make.__name__)
def test_training_gives_the_bits_of_eager(make: Any, put: Put) -> None:
    as_eager(make, put, [torch.randn(3, 4, 8) for _ in range(5)])


@pytest.mark.parametrize("make", [mlp, dropout, conv, Attention], ids=lambda make: make.__name__)
def test_a_step_like_one_before_is_found_by_look_ups(make: Any, concrete: Put) -> None:
    as_eager(make, concrete, [torch.randn(3, 4, 8) for _ in range(6)])
    assert counted("CapturedRegions") == 2  # forward and backward
    assert counted("RegionLookups") >= 6


def test_nothing_runs_when_a_region_is_called(concrete: Put) -> None:
    model = concrete(mlp())
    for _ in range(3):
        result = model(concrete(torch.randn(3, 8)))
        assert torpor.is_pending(result)
        result.sum().backward()
        assert all(torpor.is_pending(p.grad) for p in model.parameters())


def test_other_sizes_are_right_at_once(concrete: Put) -> None:
    as_eager(mlp, concrete, [torch.randn(n, 8) for n in (3, 5, 3, 7, 4, 3, 9)])


def test_a_hook_added_later_is_called(concrete: Put) -> None:
    model, seen = concrete(mlp()), []
    model(concrete(torch.randn(3, 8)))
    model[1].register_forward_hook(lambda module, args, output: seen.append(1))
    model(concrete(torch.randn(3, 8)))
    assert seen == [1]


def test_hooks_of_parameters_see_gradients(concrete: Put) -> None:
    model, seen = concrete(mlp()), []
    model[0].weight.register_hook(lambda gradient: seen.append(gradient.shape))
    model[0].weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.shape))
    for _ in range(2):
        model(concrete(torch.randn(3, 8))).sum().backward()
    assert seen == [(16, 8)] * 4


def test_results_share_memory_as_in_eager(put: Put) -> None:
    @torch.compile(backend="eager")
    def views(x: Tensor) -> tuple[Tensor, Tensor]:
        return x[1:], x.t()

    x = put(torch.arange(6.0).view(2, 3))
    for _ in range(2):
        part, turned = views(x)
        x.add_(1)
        assert torch.equal(torpor.eager(part).cpu(), torpor.eager(x[1:]).cpu())
        assert torch.equal(torpor.eager(turned).cpu(), torpor.eager(x.t()).cpu())


def test_arguments_that_share_memory_are_written_as_in_eager(put: Put) -> None:
    def write(a: Tensor, b: Tensor) -> Tensor:
        a.mul_(2)
        return a + b

    compiled = torch.compile(write, backend="eager")
    for _ in range(2):
        x, plain = put(torch.arange(6.0)), torch.arange(6.0)
        for _ in range(2):
            result, expected = compiled(x[:4], x[2:]), write(plain[:4], plain[2:])
            assert torch.equal(torpor.eager(result).cpu(), expected)
            assert torch.equal(torpor.eager(x).cpu(), plain)
            result, expected = compiled(x[:3], x[3:]), write(plain[:3], plain[3:])
            assert torch.equal(torpor.eager(result).cpu(), expected)


def test_grad_mode_and_evaluation_are_other_calls(concrete: Put) -> None:
    torch.manual_seed(0)
    plain = dropout()
    model, x = concrete(copy.deepcopy(plain)), torch.randn(3, 8)
    for _ in range(2):
        for mode in (True, False):
            plain.train(mode), model.train(mode)
            for grad in (True, False):
                with torch.set_grad_enabled(grad):
                    torch.manual_seed(2)
                    expected = plain(x)
                    torch.manual_seed(2)
                    result = model(concrete(x))
                assert result.requires_grad == grad
                assert torch.equal(torpor.eager(result.detach()), expected.detach())


def test_autocast_is_that_of_the_call(concrete: Put) -> None:
    torch.manual_seed(0)
    plain = mlp()
    model, x = concrete(copy.deepcopy(plain)), torch.randn(3, 8)
    for on in (True, False, True, False):
        with torch.autocast("cpu", torch.bfloat16, enabled=on):
            result, expected = model(concrete(x)), plain(x)
        assert result.dtype is expected.dtype
        assert torch.equal(torpor.eager(result.detach()), expected.detach())


def test_a_mistake_is_an_error_at_the_users_line(concrete: Put) -> None:
    class Wrong(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: Tensor) -> Tensor:
            return x + self.weight  # the wrong line

    with pytest.raises(RuntimeError, match=r"must match.*\n.*test_regions.py.*the wrong line"):
        concrete(Wrong())(concrete(torch.ones(4)))


def test_what_was_kept_must_not_have_been_written(concrete: Put) -> None:
    model = concrete(mlp())
    for _ in range(2):
        result = model(concrete(torch.randn(3, 8)))
        with torch.no_grad():
            model[2].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            result.sum().backward()


def test_a_loss_that_is_read_before_backward_computes_nothing_twice(concrete: Put) -> None:
    torch.manual_seed(0)
    plain = dropout()
    model, x = concrete(copy.deepcopy(plain)), torch.randn(3, 8)
    for _ in range(4):
        losses = []
        for one, put in ((plain, lambda t: t), (model, concrete)):
            torch.manual_seed(5)
            loss = one(put(x)).pow(2).sum()
            losses.append(loss.item())
            loss.backward(retain_graph=True)
            loss.backward()
        assert losses[0] == losses[1]
        for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.equal(torpor.eager(mine.grad), theirs.grad)


def test_explain_says_what_was_captured_and_what_was_not(concrete: Put) -> None:
    train(concrete(mlp()), concrete, [torch.ones(3, 8)] * 4)
    train(concrete(Written()), concrete, [torch.ones(3, 8)])
    said = torpor.explain().regions
    captured = [region for region in said if not region.why_not]
    assert sum(region.graphs for region in captured) == 2
    assert sum(region.lookups for region in captured) >= 4
    assert all(region.misses and region.seconds > 0 for region in captured)
    refused = [region for region in said if region.why_not]
    assert any("test_regions.py" in r.line and "writes" in r.why_not for r in refused)
    assert "Regions:" in str(torpor.explain())


def test_nothing_refers_weakly_to_parameters_of_what_was_captured(concrete: Put) -> None:
    """`torch.utils.swap_tensors` refuses tensors that somebody refers to weakly."""
    model = concrete(mlp())
    train(model, concrete, [torch.ones(3, 8)] * 3)
    assert counted("CapturedRegions")
    assert not [p for p in model.parameters() if weakref.getweakrefs(p)]


# -- gradients, and what was kept for them ---------------------------------------------------------


class Called(nn.Module):
    """A function of its input and of parameters of a few numbers."""

    def __init__(self, function: Callable[..., Any], *shapes: tuple[int, ...]) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])
        self.function = function

    def forward(self, x: Tensor) -> Any:
        return self.function(x, *self.weights)


def both_ways(program: Callable[[Put], list[Tensor]], concrete: Put) -> None:
    """A program gives the same as in eager, and something is captured."""
    for one, other in zip(program(concrete), program(lambda t: t), strict=True):
        assert torch.equal(torpor.eager(one.detach()), other.detach())
    assert counted("CapturedRegions")


@pytest.mark.parametrize(
    "function",
    [
        lambda x, a, b: x * 2 + (a + b),
        lambda x, a, b: (x.view(3, 2, 2) + a.view(2, 2) + b.view(2, 2)).exp(),
        lambda x, a, b: (x + torch.cat([a[:2], b[:2]]) + a).tanh(),
    ],
    ids=["sum", "views", "parts"],
)
def test_gradients_of_several_parameters_share_no_memory(function: Any, concrete: Put) -> None:
    """Autograd adds to them in place, and so do users."""

    def program(put: Put) -> list[Tensor]:
        model, found = put(Called(function, (4,), (4,))), []
        for step in range(9):
            model(put(torch.linspace(0, 1, 12).view(3, 4))).pow(2).sum().backward()
            if step % 3 == 2:
                model.weights[0].grad.mul_(0.5)
                found += [parameter.grad.clone() for parameter in model.parameters()]
                model.zero_grad()
                torpor.sync()  # calls are then found by look-ups
        return found

    both_ways(program, concrete)


def written(model: nn.Module, put: Put, write: Callable[[Tensor, Tensor], object]) -> list[str]:
    """What backward raises after `write(x, result)`."""
    found = []
    for _ in range(3):
        x = put(torch.linspace(-1, 1, 40).view(10, 4))
        result = model(x)
        with torch.no_grad():
            write(x, result)
        try:
            result.sum().backward()
        except RuntimeError as error:
            found.append(str(error)[:60])
        else:
            found.append("")
    return found


WRITTEN: dict[str, tuple[Any, Any, bool]] = {
    "the result": (lambda x, w: (x @ w).tanh(), lambda x, y: y.mul_(2), True),
    "a view of the result": (lambda x, w: (x @ w).exp(), lambda x, y: y[0].zero_(), True),
    "the base of a view": (lambda x, w: x[:3] @ w, lambda x, y: x.mul_(2), True),
    "the result, which is not kept": (lambda x, w: (x @ w) + 1, lambda x, y: y.mul_(2), False),
}


@pytest.mark.parametrize("name", WRITTEN)
def test_a_write_before_backward_is_an_error_where_it_is_one_in_eager(
    name: str, concrete: Put
) -> None:
    function, write, is_error = WRITTEN[name]
    model = Called(function, (4, 4))
    expected = written(model, lambda t: t, write)
    assert all(expected) == is_error
    assert written(concrete(model), concrete, write) == expected
    assert counted("CapturedRegions") == 2
