"""Derivatives of what was captured are eager's: with autocast, with dropout, and twice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torpor
from tests.comparison import loads_jit_decompositions

pytestmark = loads_jit_decompositions

Put = Callable[[Any], Any]


def counted(name: str) -> int:
    return torpor.metrics.counters().get(name, 0)


def bits(tensors: Any) -> list[Tensor]:
    return [torpor.eager(tensor.detach()).cpu() for tensor in tensors]


def same(result: list[Tensor], expected: list[Tensor]) -> None:
    for one, other in zip(bits(result), expected, strict=True):
        assert torch.equal(one, other.detach())


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.enter(x).chunk(3, -1)
        y = F.scaled_dot_product_attention(query, key, value, dropout_p=0.3)
        return F.dropout(self.leave(y), 0.1)


class Twice(nn.Module):
    """One weight for two products: autocast casts it once."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).relu())


def amp_train(model: nn.Module, put: Put, inside: bool = False, calls: int = 1) -> list[Tensor]:
    """Losses and parameters; backward inside the body of autocast, or after it."""
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch.manual_seed(1)
    found = []
    for step in range(3):
        x = put(torch.linspace(-1, 1 + step, 96).view(3, 4, 8))
        with torch.autocast("cpu", torch.bfloat16):
            loss = sum(model(x * call).float().pow(2).mean() for call in range(1, calls + 1))
            if inside:
                loss.backward()
        if not inside:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return [*found, *model.parameters()]


def linear() -> nn.Module:
    return nn.Linear(8, 8)


def both(make: Any, concrete: Put, **options: Any) -> None:
    torch.manual_seed(0)
    plain = make()
    result = amp_train(concrete(plain), concrete, **options)
    same(result, amp_train(plain, lambda t: t, **options))


def test_gradients_under_autocast_with_dropout_are_those_of_eager(concrete: Put) -> None:
    both(Attention, concrete)
    assert counted("CapturedRegions") == 2


@pytest.mark.parametrize("make", [linear, Twice])
def test_backward_in_the_body_of_autocast_is_that_of_eager(make: Any, concrete: Put) -> None:
    both(make, concrete, inside=True)


class Tied(nn.Module):
    """One weight as it is, in a sum, and in two products: autocast casts it for the latter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x + self.layer.weight.sum(0)).relu()
        return F.linear(y * self.layer.bias, self.layer.weight) + self.layer.weight[0]


class Normed(nn.Module):
    """Batch norm keeps the statistics of low-precision inputs in full precision."""

    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.convolution(x)).relu()  # type: ignore[no-any-return]  # modules have no types


def test_batch_norm_under_autocast_is_that_of_eager(concrete: Put) -> None:
    both(Normed, concrete)
    assert counted("CapturedRegions") == 2


@pytest.mark.parametrize("calls", [1, 2, 3])
@pytest.mark.parametrize("make", [linear, Twice, Tied, Attention])
def test_calls_under_one_autocast_share_its_casts(make: Any, calls: int, concrete: Put) -> None:
    both(make, concrete, calls=calls)
    assert counted("CapturedRegions") == 2


@pytest.mark.parametrize("make", [Attention, Twice, Tied])
def test_gradients_of_many_uses_are_added_one_by_one(make: Any, concrete: Put) -> None:
    def train(model: nn.Module, put: Put) -> list[Tensor]:
        torch.manual_seed(1)
        found = []
        for step in range(3):
            x = put(torch.linspace(-1, 1 + step, 96).view(3, 4, 8)).requires_grad_()
            y = x.sin()
            z = model(y) + 3 * y
            last = model(z) * y + z + model(y * z) * next(model.parameters()).mean()
            last.pow(2).mean().backward()
            found += [x.grad, *(p.grad for p in model.parameters())]
            model.zero_grad()
        return bits(found)

    torch.manual_seed(0)
    plain = make()
    same(train(concrete(plain), concrete), train(plain, lambda t: t))
    assert counted("CapturedRegions") > 0


class Alike(nn.Module):
    """A function that takes its own sum of gradients, which eager would go on with."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linspace(-2, 1, 96).view(3, 4, 8))

    def forward(self, x: Tensor) -> Tensor:
        return F.cosine_similarity(x, self.weight, -1)


def test_a_function_that_adds_gradients_of_one_input_is_not_captured(concrete: Put) -> None:
    both(Alike, concrete, calls=3)
    assert counted("CapturedRegions") == 0
    assert any("uses an input twice" in line for line in torpor.metrics.lines("NotCaptured"))


def smooth() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4), nn.Sigmoid())


def penalty(model: nn.Module, put: Put, compiled: Callable[..., Any]) -> list[list[Tensor]]:
    """Gradients of a loss with the norm of the gradient of the input in it, step by step."""
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        x = put(torch.linspace(-1, 1, 96).view(3, 4, 8)).requires_grad_()
        result = compiled(x)
        (slope,) = torch.autograd.grad(result.sum(), x, create_graph=True)
        (result.pow(2).mean() + slope.pow(2).sum()).backward()
        found.append(bits([slope, x.grad, *(p.grad for p in model.parameters())]))
        model.zero_grad()
    return found


@pytest.mark.parametrize("explicit", [False, True], ids=["capture", "compile"])
@pytest.mark.parametrize("make", [smooth, Attention, Twice])
def test_double_backward_is_that_of_eager(make: Any, explicit: bool, put: Put) -> None:
    torch.manual_seed(0)
    plain = make()
    model = put(plain)
    compiled = torch.compile(model, backend="eager") if explicit else model
    first, *later = penalty(model, put, compiled)
    expected_first, *expected = penalty(plain, lambda t: t, plain)
    assert torch.equal(first[0], expected_first[0])
    torch.testing.assert_close(first, expected_first)  # sums of two passes, in another order
    assert all(torch.equal(a, b) for x, y in zip(later, expected) for a, b in zip(x, y))


def test_double_backward_of_what_writes_runs_it_again_from_what_was_there(concrete: Put) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Tanh())
    model = concrete(copy.deepcopy(plain))
    first, expected = slopes(model, concrete), slopes(plain, lambda t: t)
    torch.testing.assert_close(
        bits(first), [one.detach() for one in expected], atol=1e-4, rtol=1e-5
    )
    same([*model.buffers()], [*plain.buffers()])
    model.zero_grad()
    plain.zero_grad()
    same(slopes(model, concrete), slopes(plain, lambda t: t))


def slopes(model: nn.Module, put: Put) -> list[Tensor]:
    x = put(torch.linspace(-1, 1, 24).view(3, 8).sin()).requires_grad_()
    (slope,) = torch.autograd.grad(model(x).pow(2).sum(), x, create_graph=True)
    slope.pow(2).sum().backward()
    return [x.grad, *(p.grad for p in model.parameters()), *model.buffers()]


def test_first_derivatives_keep_a_module_captured(concrete: Put) -> None:
    model = concrete(smooth())
    for _ in range(4):
        x = concrete(torch.ones(3, 8)).requires_grad_()
        (slope,) = torch.autograd.grad(model(x).sum(), x)
        torpor.sync()
        assert not slope.requires_grad
    assert counted("RegionLookups")
    assert not torpor.metrics.lines("NotCaptured")


@pytest.mark.parametrize("again", [{"retain_graph": True}, {"create_graph": True}])
def test_another_kind_of_backward_after_a_plain_one(again: dict[str, bool], concrete: Put) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(8, 4), nn.Tanh())
    model, x = concrete(plain), torch.linspace(-1, 1, 24).view(3, 8)
    for options in ({}, again):
        slopes_of = []
        for one, put in ((model, concrete), (plain, torch.clone)):
            given = put(x).requires_grad_()
            slopes_of += torch.autograd.grad(one(given).sum(), given, **options)
        same(slopes_of[:1], slopes_of[1:])
        assert slopes_of[0].requires_grad == slopes_of[1].requires_grad


# -- calls that a captured graph cannot make -------------------------------------------------------


class Counting(nn.Module):
    """It writes to two buffers, one of which may be a part of the other."""

    whole: Tensor
    part: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("whole", torch.arange(4.0))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(1)
        return self.layer(x) * self.part.sum() + x


class CountingTwice(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(x.detach().sum())
        self.part.mul_(2)
        return self.layer(x) + self.whole.sum()


class CountingAlone(Counting):
    def forward(self, x: Tensor) -> Tensor:
        self.whole.add_(1)
        return self.layer(x) * 2 + x


def of_ones(model: Any) -> Tensor:
    return torch.ones(4)


@pytest.mark.parametrize(
    ("make", "give"),
    [
        (Counting, of_ones),
        (CountingTwice, of_ones),
        (CountingAlone, lambda model: model.whole),
        (CountingAlone, lambda model: model.whole.detach()[:]),
    ],
    ids=["two", "two written", "itself given", "a view given"],
)
def test_a_buffer_that_is_written_may_share_memory(make: Any, give: Any, concrete: Put) -> None:
    def train(model: Any, put: Put) -> list[Tensor]:
        found = []
        for _ in range(3):
            x = give(model)
            result = model(x if x is model.whole or x._base is not None else put(x))
            result.sum().backward()
            found += [result, model.layer.weight.grad.clone(), model.whole.clone()]
        return found

    torch.manual_seed(0)
    plain = make()
    same(train(concrete(plain), concrete), train(plain, lambda t: t))


class Attending(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x).view(2, 5, 2, 4).transpose(1, 2)
        return F.scaled_dot_product_attention(h, h, h, is_causal=True)


def test_the_kernel_of_attention_may_be_chosen_anew(concrete: Put) -> None:
    def train(model: nn.Module, put: Put) -> list[Tensor]:
        found = []
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH, SDPBackend.FLASH_ATTENTION):
            model.zero_grad()
            with sdpa_kernel([backend]):
                result = model(put(torch.linspace(-1, 3, 80).view(2, 5, 8).sin()))
                result.pow(2).sum().backward()
            found += [result, *(parameter.grad for parameter in model.parameters())]
        return found

    torch.manual_seed(0)
    plain = Attending()
    same(train(concrete(plain), concrete), train(plain, lambda t: t))
    assert counted("CapturedRegions")


def test_forward_mode_differentiates_a_captured_module(concrete: Put) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    found = []
    for model, put in ((concrete(plain), concrete), (plain, torch.clone)):
        for _ in range(2):
            model(put(torch.ones(4)))
            with forward_ad.dual_level():
                dual = forward_ad.make_dual(put(torch.ones(4)), put(torch.arange(4.0)))
                found.append(forward_ad.unpack_dual(model(dual)).tangent)
    same(found[:2], found[2:])
    assert counted("CapturedRegions")


class CastsInside(nn.Module):
    """Autocast, entered here, casts the weight once for both products."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(16, 16)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return self.layer(self.layer(x).relu()).float()


def test_autocast_inside_a_module_casts_a_parameter_once(concrete: Put) -> None:
    def train(model: nn.Module, put: Put) -> list[Tensor]:
        for _ in range(3):
            model(put(torch.linspace(-1, 3, 80).view(5, 16).sin())).pow(2).sum().backward()
        return [parameter.grad for parameter in model.parameters()]

    torch.manual_seed(0)
    plain = CastsInside()
    same(train(concrete(plain), concrete), train(plain, lambda t: t))
    assert any("enters autocast" in line for line in torpor.metrics.lines("NotCaptured"))


class Shifted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.arange(4.0))

    def forward(self, x: Tensor) -> Tensor:
        return x.sin() + self.weight


@pytest.mark.parametrize("is_met", [False, True])
def test_an_inference_tensor_is_an_argument(is_met: bool, concrete: Put) -> None:
    plain, found = Shifted(), []
    for model, put in ((concrete(plain), concrete), (plain, torch.clone)):
        if is_met:
            model(put(torch.ones(4))).sum().backward()
        for _ in range(2):
            with torch.inference_mode():
                x = put(torch.arange(4.0)) * 2
            result = model(x)
            result.pow(2).sum().backward()
            found += [result, model.weight.grad.clone()]
    same(found[:4], found[4:])


def test_batch_norm_raises_no_versions_of_its_statistics(concrete: Put) -> None:
    """Backward in evaluation may follow a call in training."""

    def train(model: Any, put: Put) -> list[Tensor]:
        found = []
        for _ in range(3):
            model.zero_grad()
            x = put(torch.linspace(-1, 3, 24).view(6, 4).sin())
            result = model.eval()(x)
            model.train()(x).pow(2).sum().backward()
            result.pow(2).sum().backward()
            found += [result, *(parameter.grad.clone() for parameter in model.parameters())]
        return [*found, *model.buffers()]

    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    model = concrete(plain)
    before = [buffer._version for buffer in model.buffers()]
    same(train(model, concrete), train(plain, lambda t: t))
    assert [buffer._version - own for buffer, own in zip(model.buffers(), before)] == [0, 0, 3]
    assert counted("CapturedRegions")
