"""Programs whose changing sizes once gave wrong numbers, shapes or errors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torpor
from tests.comparison import Put, agree
from torpor.execute.sync import PLANS
from torpor.symbols import expressions as ir_sizes
from torpor.symbols.leaves import SIZES

Shape = tuple[int, ...]


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


def check(function: Callable[[Tensor], Any], put: Put, shapes: Sequence[Shape]) -> None:
    """Each step as eager does it: shapes while recording, numbers after, and errors at once."""
    for shape in shapes:
        x = torch.randn(shape)
        try:
            expected = _flat(function(x.clone()))
        except (RuntimeError, IndexError) as error:
            with pytest.raises(type(error)):
                function(put(x))
            continue
        actual = _flat(function(put(x)))
        assert [y.shape for y in actual] == [y.shape for y in expected], shape
        torpor.sync()
        for one, other in zip(expected, actual, strict=True):
            assert torch.equal(one, other.cpu()), shape


def _flat(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, (tuple, list)) else [result]


def rows(*lengths: int) -> list[Shape]:
    return [(length, 4) for length in lengths]


def pictures(*sides: int) -> list[Shape]:
    return [(2, 3, side, side + side // 8) for side in sides]


MANY = rows(40, 45, 48, 60, 64, 80, 96, 100, 33, 17, 128, 200, 7, 5, 300)
FEW = rows(12, 9, 4, 7, 30, 5, 2, 1, 16, 3, 8, 6, 0, 33)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.avg_pool2d(x, 16),
        lambda x: F.conv2d(x, torch.ones(2, 3, 16, 16, device=x.device), stride=16),
        lambda x: F.max_pool2d(x, 9, stride=9, ceil_mode=True),
        lambda x: x.unfold(2, 16, 16).unfold(3, 16, 16).flatten(2, 3).clone(),
    ],
    ids=("pool", "patches", "ceil", "windows"),
)
def test_a_size_rounded_down_by_much(function: Callable[[Tensor], Tensor], put: Put) -> None:
    """Near sizes give the same number of windows, which is no reason to call it a constant."""
    check(function, put, pictures(32, 48, 40, 64, 33, 35, 80, 224, 240, 100, 16))


@pytest.mark.parametrize(
    "function",
    [lambda x: x[3::7] + 1, lambda x: x.unfold(0, 7, 13).clone()],
    ids=("step", "unfold"),
)
def test_uncommon_divisors(function: Callable[[Tensor], Tensor], put: Put) -> None:
    check(function, put, MANY)


def test_rounded_sizes_stay_one_graph(put: Put) -> None:
    check(lambda x: F.avg_pool2d(x, 16), put, pictures(32, 48, 64, 80, 96))
    known = graphs()
    check(lambda x: F.avg_pool2d(x, 16), put, pictures(112, 128, 37, 200))
    assert graphs() == known


@pytest.mark.parametrize(
    "function",
    [
        lambda x: x.diagonal(1) * 2,
        torch.linalg.svdvals,
        lambda x: torch.linalg.qr(x).R.abs(),
    ],
    ids=("diagonal", "svdvals", "qr"),
)
def test_the_smaller_of_two_sizes(function: Callable[[Tensor], Tensor], put: Put) -> None:
    check(function, put, rows(30, 16, 33, 12, 2, 3, 8, 5))


def test_too_small_for_a_window_is_told_when_recorded(put: Put) -> None:
    check(lambda x: x.unfold(0, 4, 2).clone(), put, FEW)


def test_a_condition_that_divides_by_none() -> None:
    """It does not hold, and those after it are still told of the new size."""
    size = ir_sizes.symbol(0)
    size.bind(32, -1)
    divides, is_large = (ir_sizes.condition(c) for c in ("64 % (s0 // 16) == 0", "s0 > 20"))
    assert divides.holds
    assert is_large.holds
    size.bind(7, -1)
    assert not divides.holds
    assert not is_large.holds


@pytest.mark.parametrize("most", [1, 4])
def test_forgotten_conditions(most: int, put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir_sizes, "MAX_CONDITIONS", most)
    check(lambda x: x[:50] * 2, put, [*MANY, *MANY[::-1]])
    check(lambda x: x.view(2, -1) + x[:6].sum(), put, [*FEW, *FEW[::-1]])


def test_conditions_and_a_full_table(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "max_interned_nodes", 5)
    check(lambda x: x[:50].t() * 2, put, [*MANY, *MANY[::-1]])
    assert len(ir_sizes._entries) < 20


def imaginary(x: Tensor) -> Tensor:
    return torch.complex(x, x).conj().imag[:, 1:]


@pytest.mark.parametrize(
    "view",
    [
        lambda x: torch.view_as_real(torch.complex(x, x))[1:],
        lambda x: torch.complex(x, x).conj().t(),
        imaginary,
        lambda x: (x * 2).view(torch.int32)[1:].view(-1),
        lambda x: x.double().view(torch.float32)[:, ::2],
        lambda x: (x * 2).view(torch.float64)[1:],
        lambda x: (x * 2).view(-1)[: len(x) * 2].view(2, len(x)).t(),
        lambda x: (x * 2).split(len(x) // 2)[1],
    ],
    ids=("real", "conj", "imag", "ints", "halves", "doubles", "window", "split"),
)
def test_views_of_another_dtype_outlive_their_step(view: Callable[[Tensor], Tensor]) -> None:
    kept: list[tuple[Tensor, Tensor]] = []
    for length in (12, 9, 4, 7, 30, 5, 8, 6):
        x = torch.randn(length, 4)
        kept.append((view(x), view(x.to("lazy"))))
        torpor.sync()
        for one, other in kept:
            one.mul_(2)
            other.mul_(2)
        for one, other in kept:
            assert torch.equal(one.resolve_conj(), other.cpu().resolve_conj())


def test_a_view_of_a_result_that_nobody_holds(put: Put) -> None:
    check(lambda x: torch.view_as_real(torch.fft.rfft(x, dim=0)), put, rows(12, 9, 4, 7, 30, 5))


@pytest.mark.parametrize(
    "function",
    [lambda x: x * len(x), lambda x: x / (len(x) + 0.5), lambda x: (x + len(x)).exp() - 2 * len(x)],
    ids=("times", "divided", "twice"),
)
def test_numbers_that_change_with_the_size(function: Callable[[Tensor], Tensor], put: Put) -> None:
    check(function, put, rows(12, 9, 16, 7, 30, 5))
    known = graphs()
    check(function, put, rows(21, 8, 40, 11))
    assert graphs() == known


def test_sizes_that_are_in_proportion_by_chance(put: Put) -> None:
    """A gradient copied into memory of other strides, where one size is thrice the other."""

    def gradient(x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        F.layer_norm(x.transpose(1, 2), (x.shape[1],)).pow(3).sum().backward()
        assert x.grad is not None
        return x.grad

    check(gradient, put, [(2, 6, 8), (4, 4, 8), (3, 9, 8), (8, 8, 8), (4, 8, 8), (3, 3, 8)])


def test_a_tensor_filled_by_a_kernel_keeps_its_size(put: Put) -> None:
    """Its memory was recorded with the sizes of one step, and is read in the next."""
    held: list[tuple[Tensor, Tensor]] = []
    for length in (6, 9, 4, 7, 12):
        x = torch.randn(2, length)
        mask = torch.empty_like(put(x)).bernoulli_(0.5)
        torpor.sync(mask)
        held.append((mask, put(x) * mask))
        torpor.sync()
    for length, (mask, masked) in zip((6, 9, 4, 7, 12), held, strict=True):
        assert mask.detach().cpu().shape == masked.detach().cpu().shape == (2, length)


def test_a_window_that_outlives_its_step(put: Put) -> None:
    """Its size is one of the step's, not of the memory it looks at, which stays what it is."""
    table = put(torch.arange(64.0))
    held: list[tuple[int, Tensor, Tensor]] = []
    for length in (6, 9, 4, 7, 12, 5):
        x = put(torch.randn(length))
        window = table[length : 2 * length]
        torpor.sync(x + window)
        held.append((length, window, window[1:3]))
    for length, window, inner in held:
        expected = torch.arange(64.0)[length : 2 * length]
        assert torch.equal(window.detach().cpu(), expected)
        assert torch.equal((window + 1).cpu(), expected + 1)
        assert torch.equal((inner + 1).cpu(), expected[1:3] + 1)
    held[-1][1].fill_(7.0)
    assert table.cpu()[5:10].eq(7.0).all()
    assert table.cpu()[10] == 10.0


def test_a_window_onto_what_is_written_in_every_step(put: Put) -> None:
    """The same value is written each time, so what the memory holds does not tell steps apart."""
    table, source = put(torch.zeros(64)), put(torch.arange(64.0))
    held: list[tuple[int, Tensor]] = []
    for length in (6, 9, 4, 7, 12, 5):
        x = put(torch.randn(length))
        pending = x * 2
        table.copy_(source * 2)
        window = table[length : 2 * length]
        torpor.sync(x + window)
        held.append((length, window))
        more = [kept + 1 for _, kept in held[-2:]]
        for (size, _), one in zip(held[-2:], more, strict=True):
            assert torch.equal(one.cpu(), torch.arange(64.0)[size : 2 * size] * 2 + 1)
        torpor.sync(pending)
        torpor.sync()


def test_a_window_that_was_written_through(put: Put) -> None:
    """It shows what its place holds, not what another step wrote at another place."""
    table, expected = put(torch.zeros(64)), torch.zeros(64)
    before: tuple[Tensor, Tensor] | None = None
    for length in (6, 9, 4, 7, 12, 5):
        x = torch.randn(length)
        new = put(x).relu()
        windows = table[:length], expected[:length]
        windows[0].copy_(new)
        windows[1].copy_(x.relu())
        more = None if before is None else before[0] + 1
        torpor.sync(table)
        if before is not None:
            assert torch.equal(more.cpu(), before[1] + 1), length
        before = windows
        torpor.sync()


def test_a_cache_filled_by_assignment(put: Put) -> None:
    cache, expected = put(torch.zeros(3, 40)), torch.zeros(3, 40)
    before: tuple[Tensor, Tensor] | None = None
    for length in (6, 9, 4, 7, 12, 5):
        x = torch.randn(3, length)
        new = put(x) * 2
        cache[:, 1 : 1 + length] = new
        expected[:, 1 : 1 + length] = x * 2
        more = None if before is None else before[0] + 1
        read = cache[:, :length], expected[:, :length]
        torpor.sync(read[0].sum(1))
        if before is not None:
            assert torch.equal(more.cpu(), before[1] + 1), length
        before = read
        torpor.sync()


@pytest.mark.parametrize(
    "part",
    [lambda x: x.split(len(x) // 2)[1], lambda x: x.split([2, len(x) - 3, 1])[1]],
    ids=("alike", "listed"),
)
def test_writes_to_a_part(part: Callable[[Tensor], Tensor], put: Put) -> None:
    """Where a part of a split begins is computed from sizes."""

    def write(x: Tensor) -> Tensor:
        y = x * 2
        part(y).mul_(3)
        return y

    check(write, put, rows(12, 8, 16, 6, 30, 10))
    assert not torpor.metrics.counters().get("Fallback")


def test_a_marked_tensor_that_is_resized() -> None:
    x = torch.randn(6, 4).to("lazy")
    torpor.mark_dynamic(x, 1)
    torpor.sync(x * 2)
    x.resize_(20, 2).fill_(1.0)
    assert torch.equal((x * 2).cpu(), torch.full((20, 2), 2.0))


def test_what_ran_before_does_not_count(put: Put) -> None:
    """Sizes of another program are no guesses for this one."""

    def needed() -> int:
        SIZES.clear()
        before = graphs()
        check(lambda x: x * 2, put, [(n, 24) for n in (4, 5, 6)])
        check(lambda x: (x * 2).unflatten(1, (3, 8)) + 1, put, [(n, 24) for n in range(4, 12)])
        return graphs() - before

    alone = needed()
    PLANS.clear()
    for shift in range(1, 9):
        SIZES.clear()
        check(lambda x, shift=shift: x[shift:] + 1, put, rows(12, 9, 14, 17))
    assert needed() <= alone


def test_a_held_window_does_not_keep_sizes_from_settling(put: Put) -> None:
    """Its numbers are another step's: they say nothing of what the same op means in this one."""
    table = put(torch.zeros(64))
    before, known = None, []
    for length in (6, 9, 4, 7, 12, 5, 8, 11, 10, 3):
        new = put(torch.randn(length)).relu()
        window = table[:length]
        window.copy_(new)
        if before is not None:
            assert (before + 1).shape == before.shape
        before = window
        torpor.sync()
        known.append(graphs())
    assert known[-1] == known[5]


def test_a_view_keeps_its_sizes_when_two_symbols_change_places(put: Put) -> None:
    for shape in ((5, 3), (3, 4), (7, 2)):
        x = put(torch.randn(shape))
        torpor.sync()
        y = x.clone()
        torpor.sync()
        y.tolist()

    def program(base: Tensor) -> list[Tensor]:
        columns = base.t().contiguous().t()
        between = columns[None]
        view = between[0]
        torpor.sync()
        columns.mT.clone()
        after = view + 1
        view[0].mul_(10)
        return [after, view, between, columns]

    agree(put, program, torch.arange(24.0).view(4, 6))
