"""`torpor.explain()` on programs whose graphs never come back: quick, right, and it adds up."""

from __future__ import annotations

import gc
import inspect
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

import torpor
from torpor.backend import Computation, register
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backends.reference import ReferenceBackend
from torpor.debug.causes import ADVICE, TITLES
from torpor.debug.explain import Balance, Explanation
from torpor.execute.sync import PLANS
from torpor.ir.node import TABLE
from torpor.observe.events import EVENTS
from torpor.observe.history import HISTORY
from torpor.text import difference as kinds

MARK = "# <- here"
PARTS = ("recording", "planning", "compiling", "running", "waiting", "outside")


class Slow(ReferenceBackend):
    """Takes its time to compile and to run."""

    name = "sluggish"

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        time.sleep(0.15)
        return super().compile(computations)

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        time.sleep(0.02)
        return super().execute(computation, arguments, device)


register("sluggish", Slow)


@pytest.fixture(autouse=True)
def fresh(on_the_reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A node keeps the line that met it first, so none may be known before."""
    monkeypatch.setattr(torpor.config, "compile_after", 2)
    torpor.sync(wait=True)
    TABLE.clear()
    HISTORY.clear()
    torpor.metrics.reset()
    yield
    torpor.sync(wait=True)
    TABLE.clear()


def marked_line(function: Callable[..., Any]) -> str:
    source, start = inspect.getsourcelines(function)
    offset = next(number for number, line in enumerate(source) if MARK in line)
    return f"{os.path.basename(__file__)}:{start + offset} "


def parts(balance: Balance) -> float:
    return sum(getattr(balance, part) for part in PARTS)


# -- it adds up --------------------------------------------------------------------------------


@pytest.mark.parametrize("queued", [False, True])
def test_the_seconds_add_up_to_the_wall_clock(
    queued: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", 0)
    monkeypatch.setattr(torpor.config, "async_queue", queued)
    with torpor.using("sluggish"):
        x = torch.ones(4).to("lazy")
        torpor.metrics.reset()
        start = time.perf_counter()
        for _ in range(5):
            time.sleep(0.03)  # outside: no trace is open
            y = x.exp()
            time.sleep(0.04)  # while it is being recorded
            torpor.sync()
            y.sum().item()
        torpor.wait()
        balance = torpor.explain().balance
        wall = time.perf_counter() - start
    assert parts(balance) == pytest.approx(balance.wall, rel=1e-6)
    assert balance.wall == pytest.approx(wall, rel=0.03)
    assert balance.outside >= 5 * 0.03
    assert balance.recording >= 5 * 0.04
    assert balance.compiling >= 2 * 0.15
    assert balance.running + balance.waiting >= 5 * 0.02  # a run beside recording costs nothing
    assert balance.planning < balance.outside


def test_a_trace_that_goes_on_is_counted_too() -> None:
    x = torch.ones(4).to("lazy")
    torpor.metrics.reset()
    y = x.exp()
    time.sleep(0.05)
    balance = torpor.explain().balance
    assert balance.recording >= 0.05
    assert parts(balance) == pytest.approx(balance.wall, rel=1e-6)
    del y


def test_what_was_spent_before_a_reset_is_left_out() -> None:
    y = torch.ones(4).to("lazy").exp()
    time.sleep(0.05)
    torpor.metrics.reset()
    torpor.sync(wait=True)
    assert torpor.explain().balance.wall < 0.05
    del y


# -- programs that are slow by construction ----------------------------------------------------


def updates_by_hand(steps: int) -> None:
    net = torch.nn.Linear(4, 4).to("lazy")
    x = torch.ones(2, 4)
    for _ in range(steps):
        loss = net(x.to("lazy")).pow(2).mean()
        net.zero_grad()
        loss.backward()
        for p in net.parameters():
            p.data.add_(p.grad, alpha=-0.1)
        loss.item()  # <- here


def test_a_step_that_nothing_ends_is_told_to_call_sync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "cut_after_reads", False, raising=False)
    updates_by_hand(12)
    found = next(one for one in torpor.explain().findings if one.cause == "open")
    assert found.count == 9
    assert found.line.startswith(marked_line(updates_by_hand))
    assert "Call torpor.sync() here" in found.advice
    assert "never compiled because none came back" in found.title


def test_the_advice_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "cut_after_reads", False, raising=False)
    item = torch.Tensor.item

    def item_and_sync(tensor: torch.Tensor) -> Any:
        number = item(tensor)
        torpor.sync()
        return number

    monkeypatch.setattr(torch.Tensor, "item", item_and_sync)
    updates_by_hand(12)
    answer = torpor.explain()
    assert not [one for one in answer.findings if one.cause == "open"]
    assert any(graph.compiled and graph.hits > 5 for graph in answer.graphs)


def rows_of_lazy_data(steps: int) -> None:
    data = torch.randn(steps + 3, 4).to("lazy")
    for i in range(steps):
        x = data[i]  # <- here
        y = x.exp()
        torpor.sync()
        del x, y


def test_an_index_that_changes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "promote_scalars", False)
    monkeypatch.setattr(torpor.config, "dynamic", "off")  # else it becomes an input
    rows_of_lazy_data(8)
    found = torpor.explain().findings[0]
    assert (found.cause, found.count) == ("index", 7)
    assert found.line.startswith(marked_line(rows_of_lazy_data))
    assert "index_select" in found.advice
    assert "`index` of aten.select.int, 0 -> 1" in found.details[0]


def test_every_cause_has_words_and_advice() -> None:
    names = {value for name, value in vars(kinds).items() if name.isupper() and name[0] != "_"}
    causes = {name for name in names if isinstance(name, str)}
    assert causes == ADVICE.keys() == TITLES.keys()


# -- many graphs -------------------------------------------------------------------------------


def new_graphs(count: int, start: int = 0) -> None:
    x = torch.ones(3).to("lazy")
    for exponent in range(start, start + count):
        y = (x**exponent).sum()
        torpor.sync()
        del y


def test_the_answer_comes_at_once_after_many_graphs() -> None:
    new_graphs(1500)
    start = time.process_time()
    answer: Explanation = torpor.explain()
    str(answer)
    assert time.process_time() - start < 1.0
    assert (answer.findings[0].cause, len(answer.graphs), answer.forgotten) == (
        "constant",
        1024,
        476,
    )


def test_nothing_is_compared_before_somebody_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: Any) -> None:
        raise AssertionError("nobody has asked")

    monkeypatch.setattr("torpor.observe.history.difference", refuse)
    monkeypatch.setattr("torpor.observe.history.difference_of_parts", refuse)
    new_graphs(80)
    updates_by_hand(80)


def test_graphs_that_never_come_back_keep_memory_flat(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "max_interned_nodes", 64)
    monkeypatch.setattr(torpor.config, "max_cached_plans", 16)
    new_graphs(200)
    before = _objects()
    new_graphs(400, start=200)
    assert _objects() < before + 500
    PLANS.clear()


def _objects() -> int:
    torpor.wait()
    gc.collect()
    return len(gc.get_objects()) - len(EVENTS) - 2 * len(HISTORY.records)  # bounded, not full yet


def test_the_first_graphs_of_a_line_are_known_longest() -> None:
    new_graphs(200)
    known = [record.place for record in HISTORY.records if record.graph is not None]
    assert known[:5] == [0, 1, 2, 3, 140]
    assert known[-1] == 199
