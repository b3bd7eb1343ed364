"""Deep, many, long: chains, threads and endless programs."""

import gc
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import torpor
from tests.comparison import Put, agree, assert_same, plain
from torpor.execute.sync import PLANS
from torpor.ir.node import TABLE
from torpor.observe.events import EVENTS

CHAIN = 100_000
DEEP_AUTOGRAD = 10_000
THREADS = 8
PAGE = 4096


@pytest.fixture(autouse=True)
def small_garbage() -> Iterator[None]:
    """Millions of nodes of the last test would make every garbage collection of the next slow."""
    yield
    TABLE.clear()
    PLANS.clear()
    gc.collect()


@pytest.fixture
def uncapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """One trace may grow without an automatic cut."""
    monkeypatch.setattr(torpor.config, "max_trace_nodes", 10**9)


@pytest.fixture
def small_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables so small that a short program fills them: from then on nothing may grow."""
    monkeypatch.setattr(torpor.config, "max_interned_nodes", 2_000)
    monkeypatch.setattr(torpor.config, "max_cached_plans", 16)
    monkeypatch.setattr(torpor.config, "max_memoised_types", 1_000)


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * PAGE


def _live_objects() -> int:
    """All but the last events, of which as many are kept as a bound says."""
    gc.collect()
    return len(gc.get_objects()) - len(EVENTS)


def test_a_chain_of_100_000_nodes_is_traced_synced_and_freed(uncapped: None, put: Put) -> None:
    x = put(torch.zeros(2))
    y = x
    for _ in range(CHAIN):
        y = y + 1
    torpor.sync(wait=True)
    assert plain(y).tolist() == [float(CHAIN)] * 2
    del y
    gc.collect()
    assert (x + 1).tolist() == [1.0, 1.0]


def test_a_chain_of_100_000_nodes_is_freed_without_being_run(uncapped: None, put: Put) -> None:
    x = put(torch.zeros(2))
    y = x
    for _ in range(CHAIN):
        y = y + 1
    assert torpor.is_pending(y)
    del y
    gc.collect()
    assert (x + 1).tolist() == [1.0, 1.0]


def test_a_chain_of_100_000_in_place_writes_computes(uncapped: None, put: Put) -> None:
    x = put(torch.zeros(2))
    for _ in range(CHAIN):
        x.add_(1)
    assert x.tolist() == [float(CHAIN)] * 2


def test_a_view_a_thousand_views_deep_computes(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        view = x
        for _ in range(200):
            view = view.t().unsqueeze(0).squeeze(0).view(3, 2).t()
        view.add_(1)
        return x, view

    agree(put, program, torch.zeros(2, 3))


def test_a_deep_autograd_chain_runs_backward_and_is_freed(uncapped: None, put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        y = x
        for _ in range(DEEP_AUTOGRAD):
            y = (y * 1.0001).sin()
        y.sum().backward()
        return y.detach(), x.grad

    agree(put, program, torch.linspace(0, 1, 3, requires_grad=True))
    gc.collect()


def test_a_deep_autograd_chain_is_freed_without_backward(uncapped: None, put: Put) -> None:
    x = put(torch.zeros(3, requires_grad=True))
    y = x
    for _ in range(DEEP_AUTOGRAD):
        y = (y * 1.0001).sin()
    del y
    gc.collect()
    assert plain(x + 1).tolist() == [1.0] * 3


def test_a_fan_of_20_000_roots_is_synced_at_once(uncapped: None, virtual: Put) -> None:
    x = virtual(torch.zeros(1))
    many = [x + number for number in range(20_000)]
    torpor.sync(wait=True)
    assert [many[index].item() for index in (0, 7, 19_999)] == [0.0, 7.0, 19_999.0]


def _in_threads(work: Callable[[int], object]) -> list[object]:
    """Runs `work(0..7)` at once; gives the results, or the first exception."""
    results: list[object] = [None] * THREADS
    failures: list[BaseException] = []
    start = threading.Barrier(THREADS)

    def body(index: int) -> None:
        start.wait()
        try:
            results[index] = work(index)
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=body, args=(i,), daemon=True) for i in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not any(thread.is_alive() for thread in threads), "a thread is stuck"
    if failures:
        raise failures[0]
    return results


def _train(model: nn.Module, x: torch.Tensor, steps: int = 10) -> list[float]:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def _models() -> list[tuple[nn.Module, torch.Tensor]]:
    torch.manual_seed(0)
    return [
        (nn.Sequential(nn.Linear(4, 6 + index % 3), nn.Tanh()), torch.randn(3, 4))
        for index in range(THREADS)
    ]


def test_eight_threads_train_at_once(put: Put) -> None:
    expected = [_train(model, x) for model, x in _models()]
    lazy = [(put(model), put(x)) for model, x in _models()]
    assert _in_threads(lambda index: _train(*lazy[index])) == expected


def test_eight_threads_record_on_one_shared_tensor(put: Put) -> None:
    eager = torch.randn(4, 4)
    shared = put(eager) * 1.0  # still pending when the threads begin

    def work(index: int) -> list[list[list[float]]]:
        return [(shared @ shared + index * turn).tolist() for turn in range(20)]

    got = _in_threads(work)
    for index, results in enumerate(got):
        expected = [(eager @ eager + index * turn).tolist() for turn in range(20)]
        assert results == expected


def test_eight_threads_record_the_very_same_program(put: Put) -> None:
    eager = torch.randn(4, 4)

    def work(_: int) -> list[float]:
        x = put(eager)
        values = []
        for turn in range(20):
            y = (x * turn).softmax(-1)
            y[0] = 1
            values.append(y.sum().item())
        return values

    y = [(eager * turn).softmax(-1) for turn in range(20)]
    for one in y:
        one[0] = 1
    expected = [one.sum().item() for one in y]
    assert _in_threads(work) == [expected] * THREADS


def test_one_thread_syncs_while_others_record(put: Put) -> None:
    def work(index: int) -> list[float]:
        x = put(torch.zeros(3))
        for turn in range(60):
            x.add_(index)
            if index % 2:
                torpor.sync(wait=turn % 10 == 0)
        return x.tolist()

    assert _in_threads(work) == [[60.0 * index] * 3 for index in range(THREADS)]


def test_a_tensor_recorded_in_one_thread_is_read_in_another(put: Put) -> None:
    x = put(torch.ones(3)) + 1
    assert _in_threads(lambda index: (x * index).tolist()) == [
        [2.0 * index] * 3 for index in range(THREADS)
    ]


def _step_with(put: Put, model: nn.Module, rows: int) -> None:
    model.zero_grad()
    model(put(torch.ones(rows, 4))).square().mean().backward()
    torpor.sync()


def test_a_thousand_steps_of_new_shapes_use_bounded_memory(small_tables: None, put: Put) -> None:
    model = put(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    for rows in range(1, 501):
        _step_with(put, model, rows)
    torpor.wait()
    objects, resident = _live_objects(), _resident_bytes()
    for rows in range(501, 1001):
        _step_with(put, model, rows)
    torpor.wait()
    assert _live_objects() - objects < 0.1 * objects
    assert _resident_bytes() - resident < 64 * 2**20


def test_a_thousand_steps_of_new_shapes_fit_into_the_default_tables(put: Put) -> None:
    model = put(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
    _step_with(put, model, 1)
    torpor.wait()
    resident = _resident_bytes()
    for rows in range(2, 1001):
        _step_with(put, model, rows)
    torpor.wait()
    assert _resident_bytes() - resident < 256 * 2**20


def test_new_graphs_without_end_use_bounded_memory(small_tables: None, put: Put) -> None:
    x = put(torch.ones(3))

    def step(number: int) -> None:
        y = x
        for bit in range(12):
            y = y.sin() if number >> bit & 1 else y.cos()
        torpor.sync(y)

    for number in range(1500):
        step(number)
    torpor.wait()
    objects, resident = _live_objects(), _resident_bytes()
    for number in range(1500, 3000):
        step(number)
    torpor.wait()
    assert _live_objects() - objects < 0.1 * objects
    assert _resident_bytes() - resident < 64 * 2**20


def test_ten_thousand_steps_of_one_shape_grow_nothing(put: Put) -> None:
    weight = put(torch.ones(3))

    def step() -> None:
        nonlocal weight
        weight = weight * 0.5 + 1
        torpor.sync()

    for _ in range(500):
        step()
    torpor.wait()
    objects, resident = _live_objects(), _resident_bytes()
    for _ in range(10_000):
        step()
    torpor.wait()
    assert _live_objects() - objects < 100
    assert _resident_bytes() - resident < 8 * 2**20
    assert_same(weight, torch.full((3,), 2.0))


def test_steps_with_a_changing_number_grow_nothing(put: Put) -> None:
    weight = put(torch.ones(3))

    def step(number: int) -> None:
        weight.mul_(1 + 1 / (number + 2)).sub_(0.001 * number)
        torpor.sync()

    for number in range(300):
        step(number)
    torpor.wait()
    objects = _live_objects()
    for number in range(300, 2300):
        step(number)
    torpor.wait()
    assert _live_objects() - objects < 200


def test_tensors_nobody_holds_are_freed(put: Put) -> None:
    def step() -> None:
        big = put(torch.ones(2**20))
        for _ in range(4):
            big = big * 2
        big.sum().item()

    for _ in range(10):
        step()
    torpor.wait()
    resident = _resident_bytes()
    for _ in range(60):
        step()
    torpor.wait()
    assert _resident_bytes() - resident < 48 * 2**20


def test_a_long_program_that_only_reads_grows_nothing(put: Put) -> None:
    x = put(torch.ones(3))
    for _ in range(300):
        assert (x * 2).sum().item() == 6.0
    objects = _live_objects()
    for _ in range(2000):
        assert (x * 2).sum().item() == 6.0
    assert _live_objects() - objects < 100


def test_a_training_script_that_never_syncs_grows_nothing(put: Put) -> None:
    model = put(nn.Linear(4, 4))
    x = put(torch.ones(2, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()

    for _ in range(100):
        step()
    torpor.wait()
    objects, resident = _live_objects(), _resident_bytes()
    for _ in range(500):
        step()
    torpor.wait()
    assert _live_objects() - objects < 200
    assert _resident_bytes() - resident < 8 * 2**20
