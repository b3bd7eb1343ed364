"""Counters and timers: exact, bounded, and cheap where ops count themselves."""

import threading
from collections import Counter

import pytest

from torpor import metrics


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counters of its own for every test; what the process counts goes on counting elsewhere."""
    for name, empty in (("_counts", Counter()), ("_cells", {}), ("_new_nodes", Counter()),
                        ("_timers", {}), ("_lines", {})):  # fmt: skip
        monkeypatch.setattr(metrics, name, empty)


def test_counters_leave_out_what_is_zero() -> None:
    metrics.count("Met", 2)
    metrics.count("Nothing", 0)
    assert metrics.counters() == {"Met": 2, "OpsRecorded": 0}


def test_overloads_count_under_one_name() -> None:
    metrics.op_cell("lazy::add", "aten.add.Tensor")[0] += 2
    metrics.op_cell("lazy::add", "aten.add.Scalar")[0] += 1
    assert metrics.counters() == {"lazy::add": 3, "OpsRecorded": 3}
    assert metrics.recorded()["lazy::add", "aten.add.Tensor"] == 2


def test_a_cell_is_the_same_list_after_a_reset() -> None:
    cell = metrics.op_cell("lazy::mul")
    cell[0] += 1
    metrics.reset()
    assert metrics.counters() == {"OpsRecorded": 0}
    cell[0] += 1
    assert metrics.counters()["lazy::mul"] == 1
    assert metrics.op_cell("lazy::mul") is cell


def test_count_is_exact_from_many_threads() -> None:
    def work() -> None:
        for _ in range(1000):
            metrics.count("Met")

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.counters()["Met"] == 4000


def test_count_line_counts_under_the_line_too() -> None:
    for line in ("a.py:1", "a.py:1", "b.py:2"):
        metrics.count_line("Sync::item", line)
    assert metrics.counters()["Sync::item"] == 3
    assert metrics.lines("Sync::item") == {"a.py:1": 2, "b.py:2": 1}
    assert metrics.lines("never met") == {}


def test_new_nodes_count_by_op() -> None:
    metrics.count_node("aten.add.Tensor")
    assert metrics.new_nodes() == {"aten.add.Tensor": 1}


def test_a_timer_counts_a_body_that_raises() -> None:
    with pytest.raises(KeyError), metrics.timer("Work"):
        raise KeyError
    assert metrics.timers()["Work"]["count"] == 1


def test_percentiles_are_samples_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_timers", {"Work": [float(n) for n in range(100, -1, -1)]})
    summary = metrics.timers()["Work"]
    assert (summary["p50"], summary["p90"], summary["p99"]) == (50, 90, 99)
    assert (summary["count"], summary["total"]) == (101, 5050)


def test_a_timer_keeps_a_bounded_number_of_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics, "_MAX_SAMPLES", 8)
    for _ in range(100):
        with metrics.timer("Work"):
            pass
    assert metrics.timers()["Work"]["count"] <= 8


def test_report_has_a_line_for_each_counter_and_timer() -> None:
    metrics.count("Met", 1234)
    with metrics.timer("Work"):
        pass
    met, ops, work = metrics.report().splitlines()
    assert met.split() == ["Met", "1,234"]
    assert ops.split() == ["OpsRecorded", "0"]
    assert work.split()[:3] == ["Work", "1", "total"]


def test_reset_forgets_everything() -> None:
    metrics.count_line("Met", "a.py:1")
    metrics.count_node("aten.add.Tensor")
    with metrics.timer("Work"):
        pass
    metrics.reset()
    assert metrics.counters() == {"OpsRecorded": 0}
    assert (metrics.timers(), metrics.lines("Met"), metrics.new_nodes()) == ({}, {}, {})
