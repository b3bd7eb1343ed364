"""Sizes that change from step to step: the same nodes, the same graph, eager's numbers."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import torpor
from tests.comparison import Put
from tests.tagger import random_shapes, train
from torpor.execute.sync import PLANS
from torpor.inference import infer
from torpor.ir.node import TABLE
from torpor.ir.types import SymbolicType
from torpor.symbols.leaves import SIZES
from torpor.trace.values import value_of

aten = torch.ops.aten


@pytest.fixture(autouse=True)
def fresh(on_the_reference_backend: None) -> Iterator[None]:
    torpor.sync(wait=True)
    PLANS.clear()
    SIZES.clear()
    torpor.metrics.reset()
    yield
    torpor.sync(wait=True)


def graphs() -> int:
    """Graphs that were met for the first time."""
    return int(torpor.metrics.counters().get("UncachedCompile", 0))


def new_nodes() -> int:
    """Nodes that were made since the start of the test."""
    return sum(torpor.metrics.new_nodes().values())


def run(function: Callable[..., Any], put: Put, *inputs: Tensor) -> list[Tensor]:
    """What a step computes, eagerly and lazily: equal, or the test fails."""
    expected = function(*inputs)
    actual = function(*[put(x.clone()) for x in inputs])
    torpor.sync()
    pairs = zip(_flat(expected), _flat(actual), strict=True)
    for one, other in pairs:
        assert torch.equal(one, other.cpu()), (one.shape, other.shape)
        for size, mine, theirs in zip(one.shape, one.stride(), other.stride(), strict=True):
            assert size < 2 or mine == theirs
    return _flat(actual)


def _flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


WEIGHT = torch.randn(16, 16, generator=torch.Generator().manual_seed(0))


def attention(x: Tensor) -> Tensor:
    batch, length, width = x.shape
    heads = x.view(batch, length, 4, width // 4).transpose(1, 2)
    scores = (heads @ heads.transpose(-1, -2)).softmax(-1)
    positions = torch.arange(length, device=x.device, dtype=x.dtype)
    return (scores @ heads).transpose(1, 2).reshape(batch, length, width) + positions[:, None]


def test_a_size_never_seen_before_makes_no_node(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    for shape in ((8, 16, 16), (5, 20, 16), (6, 31, 16), (4, 17, 16), (3, 12, 16), (9, 40, 16)):
        run(attention, put, torch.randn(shape))
    known, nodes = graphs(), new_nodes()
    monkeypatch.setattr(infer, "_infer", lambda *_: pytest.fail("a type was inferred"))
    for shape in ((7, 64, 16), (3, 50, 16), (2, 9, 16), (9, 33, 16), (16, 16, 16)):
        run(attention, put, torch.randn(shape))
    assert graphs() == known
    assert new_nodes() == nodes


def test_the_graph_shows_symbols(put: Put) -> None:
    for length in (3, 5):
        run(lambda x: (x * 2).view(-1), put, torch.randn(length, 4))
    x = put(torch.randn(9, 4))
    y = (x * 2).view(-1)
    assert "float32[4*s" in torpor.graph(y)
    assert y.shape == (36,)


def test_off_keeps_sizes_as_numbers(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "dynamic", "off")
    for length in (3, 5, 7, 9):
        run(lambda x: x * 2, put, torch.randn(length, 4))
    assert graphs() == 4


def test_on_needs_no_second_look(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "dynamic", "on")
    SIZES.clear()
    for length in (3, 5, 7, 9):
        run(lambda x, y: (x + y) @ x.t(), put, torch.randn(length, 4), torch.randn(length, 4))
    assert graphs() == 2


def test_marked_sizes_are_symbols_from_the_start(put: Put) -> None:
    for length in (3, 5, 7):
        x = torch.randn(length, 4)
        y = put(x)
        torpor.mark_dynamic(y, 0)
        z = y.exp().view(-1)
        torpor.sync()
        assert torch.equal(z.cpu(), x.exp().view(-1))
    assert graphs() == 1


def test_marks_are_checked(put: Put) -> None:
    x = put(torch.randn(3, 4))
    with pytest.raises(IndexError, match="no dimension 2"):
        torpor.mark_dynamic(x, 2)
    with pytest.raises(ValueError, match="no view"):
        torpor.mark_dynamic(x[0], 0)
    with pytest.raises(ValueError, match="lazy tensor"):
        torpor.mark_dynamic(torch.ones(2), 0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x[:5].sum(0),  # all of it, or five
        lambda x: x[-3:] * 2,
        lambda x: x[1:-1].contiguous(),
        lambda x: torch.cat([x, x[:2]]),
        lambda x: F.pad(x, (1, 2, 0, 3)),
        lambda x: x.expand(2, *x.shape).clone(),
        lambda x: x.repeat(2, 1),
        lambda x: F.pad(x, (0, 0, 0, 1)).unfold(0, 2, 1).sum(-1),
        lambda x: torch.zeros(len(x), 3, device=x.device) + x.sum(),
        lambda x: x.t().reshape(-1)[::2].clone(),
        lambda x: x * len(x),
        lambda x: x / math.sqrt(x.shape[0]),
        lambda x: x.split(2)[0] + 1,
        lambda x: torch.tril(torch.ones(len(x), len(x), device=x.device)) @ x,
        lambda x: F.one_hot(torch.arange(len(x), device=x.device) % 4, 4).float() @ x.t(),
        lambda x: F.interpolate(x[None], size=7),
        lambda x: F.max_pool1d(x.t()[None], 2, ceil_mode=True),
        lambda x: F.conv1d(x.t()[None], WEIGHT[:4, :4, None].contiguous().to(x.device), stride=2)
        if x.device.type == "cpu" and not torpor.is_lazy(x)
        else F.conv1d(x.t()[None], x.new_tensor(WEIGHT[:4, :4, None].tolist()), stride=2),
        lambda x: x.sort(0).values.cumsum(0),
        lambda x: x.flip(0).diff(dim=0),
        lambda x: torch.stack([x, x]).transpose(0, 1).reshape(-1),
        lambda x: x.mean(0).expand(len(x), 4).sum(),
    ],
    ids=range(22),
)  # fmt: skip
def test_ops_at_many_sizes(function: Callable[[Tensor], Any], put: Put) -> None:
    for length in (12, 9, 4, 7, 30, 5, 2, 1, 16, 3, 8, 6):
        run(function, put, torch.randn(length, 4))


def test_an_error_of_one_size_is_raised_at_that_size(put: Put) -> None:
    for length in (12, 9, 15, 11):
        run(lambda x: x[7] * 2, put, torch.randn(length, 4))
    with pytest.raises(IndexError):
        put(torch.randn(6, 4))[7]
    torpor.sync()
    run(lambda x: x[7] * 2, put, torch.randn(13, 4))


def test_sizes_that_do_not_go_together_are_refused(put: Put) -> None:
    def add(x: Tensor, y: Tensor) -> Tensor:
        return x + y

    for length in (12, 9, 15, 11):
        run(add, put, torch.randn(length), torch.randn(length))
    with pytest.raises(RuntimeError, match="must match"):
        add(put(torch.randn(7)), put(torch.randn(8)))
    torpor.sync()
    run(add, put, torch.randn(6), torch.randn(6))
    run(add, put, torch.randn(6), torch.randn(1))


def test_two_sizes_that_were_equal_by_chance(put: Put) -> None:
    def outer(x: Tensor, y: Tensor) -> Tensor:
        return x[:, None] * y[None, :]

    for one, other in ((4, 4), (6, 6), (8, 8), (5, 7), (9, 3), (3, 9), (7, 7), (11, 2)):
        run(outer, put, torch.randn(one), torch.randn(other))


def test_a_size_that_equals_a_constant_by_chance(put: Put) -> None:
    def step(x: Tensor) -> Tensor:
        return x.view(len(x), 4, 4).sum(1) @ torch.ones(4, 4, device=x.device)

    for length in (4, 16, 8, 4, 5, 16, 7, 4):
        run(step, put, torch.randn(length, 16))
    assert graphs() <= 6


def test_a_branch_on_a_size_makes_two_graphs(put: Put) -> None:
    def step(x: Tensor) -> Tensor:
        return x.exp() if len(x) > 10 else x.sin() + 1

    for length in (12, 5, 13, 6, 20, 7, 30, 8, 40, 9):
        run(step, put, torch.randn(length))
    assert graphs() <= 6


def test_writes_and_views(put: Put) -> None:
    def step(x: Tensor) -> tuple[Tensor, Tensor]:
        y = x.clone()
        row = y[1]
        row.mul_(2)
        y[:, 1:].add_(1)
        y.t()[0].zero_()
        return y, row.clone()

    for length in (5, 8, 3, 11, 2, 6):
        run(step, put, torch.randn(length, 4))


def test_a_view_outlives_its_step(put: Put) -> None:
    kept: list[tuple[Tensor, Tensor]] = []
    for length in (5, 8, 3, 11, 6, 7):
        x = torch.randn(length, 4)
        lazy = put(x.clone())
        view, other = x[1:].t(), lazy[1:].t()
        torpor.sync()
        kept.append((view, other))
        for one, two in kept:
            assert torch.equal((one * 2).contiguous(), (two * 2).cpu().contiguous())
            one.add_(1)
            two.add_(1)
        torpor.sync()
    for one, two in kept:
        assert torch.equal(one, two.cpu())


def test_a_module_of_another_width_is_another_module(put: Put) -> None:
    narrow, wide = nn.Linear(4, 4), nn.Linear(4, 6)
    with torch.no_grad():
        models = [(m, _placed(copy.deepcopy(m), put)) for m in (narrow, wide)]
        for index in (0, 0, 0, 1, 1, 0, 1):
            plain, lazy = models[index]
            x = torch.randn(3, 4)
            assert torch.equal(plain(x), lazy(put(x)).cpu())
        y = models[1][1](put(torch.randn(3, 4)))
    assert not isinstance(value_of(y).type, SymbolicType)


def _placed(model: nn.Module, put: Put) -> nn.Module:
    return model.to("lazy") if put(torch.ones(1)).device.type == "lazy" else torpor.lazy(model)


def test_training_with_random_sizes(put: Put) -> None:
    shapes = random_shapes(60)
    assert train(put, 60, shapes) == train(None, 60, shapes)
    assert graphs() <= 10  # first steps, where numbers and sizes become inputs; batches of 1


def test_a_last_smaller_batch(put: Put) -> None:
    shapes = [(8, 12)] * 5 + [(3, 12)]
    assert train(put, 24, shapes) == train(None, 24, shapes)
    assert graphs() <= 6


def test_memory_stays_bounded_over_many_sizes(put: Put) -> None:
    def step(x: Tensor) -> Tensor:
        return x[: len(x) // 2].sum(0) if len(x) % 7 else x.roll(len(x) // 3, 0).mean(0)

    for length in range(2, 40):
        run(step, put, torch.randn(length, 4))
    nodes = len(TABLE)
    for length in range(40, 140):
        run(step, put, torch.randn(length, 4))
    assert len(TABLE) < nodes + 100


def test_a_growing_cache(put: Put) -> None:
    cache, lazy = torch.randn(2, 3, 4), None
    lazy = put(cache.clone())
    for _ in range(30):
        new = torch.randn(2, 1, 4)
        cache = torch.cat([cache, new.tanh()], 1)
        lazy = torch.cat([lazy, put(new).tanh()], 1)
        one = (cache @ cache.transpose(1, 2)).softmax(-1)[:, -1]
        other = (lazy @ lazy.transpose(1, 2)).softmax(-1)[:, -1]
        torpor.sync()
        assert torch.equal(one, other.cpu())
    assert graphs() <= 6


def test_a_loop_over_parameters_that_reads_each_makes_no_size_a_symbol() -> None:
    """Norms for a log, or an average of weights: other sizes are other parameters' there."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    model = torpor.lazy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = torpor.metrics.counters().get("SizesPromoted", 0)
    for _ in range(4):
        optimizer.zero_grad()
        model(torpor.lazy(torch.ones(2, 4))).sum().backward()
        optimizer.step()
        for parameter in model.parameters():
            parameter.detach().mul(2).add(1).norm().item()
    assert torpor.metrics.counters().get("SizesPromoted", 0) == before
