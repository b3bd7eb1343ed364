"""What is counted while a program runs."""

from __future__ import annotations

import pytest
import torch

import torpor
from tests.comparison import Put


@pytest.fixture(autouse=True)
def fresh(on_the_reference_backend: None) -> None:
    torpor.sync(wait=True)
    torpor.metrics.reset()


def steps(put: Put, number: int) -> torch.Tensor:
    x = put(torch.ones(16))
    for _ in range(number):
        x = x * 2 + 1
        torpor.sync()
    torpor.wait()
    return x


def test_each_step_is_recorded_queued_and_run(put: Put) -> None:
    steps(put, 5)
    timers = torpor.metrics.timers()
    for name in ("Record", "QueueWait", "Execute"):
        assert timers[name]["count"] == 5, name
        assert 0 < timers[name]["p50"] <= timers[name]["p90"] <= timers[name]["p99"]
    assert timers["Compile"]["count"] == torpor.metrics.counters()["UncachedCompile"]
    assert "Sync" not in timers


def test_a_read_is_timed_and_counted_by_line(put: Put) -> None:
    x = steps(put, 1)
    (x + 1).tolist()
    timers = torpor.metrics.timers()
    assert timers["Sync"]["count"] == 1
    ((line, seconds),) = torpor.metrics.line_seconds("Wait").items()
    assert "(x + 1).tolist()" in line
    assert seconds == pytest.approx(timers["Sync"]["total"])


def test_data_that_are_there_are_read_without_waiting(put: Put) -> None:
    put(torch.ones(3)).tolist()
    assert "Sync" not in torpor.metrics.timers()


def test_bytes_in_and_out(put: Put) -> None:
    x = put(torch.ones(16))
    before = torpor.metrics.counters()
    assert before["BytesIn"] >= 64
    (x + 1).tolist()
    assert torpor.metrics.counters()["BytesOut"] - before.get("BytesOut", 0) == 64


def test_what_the_trace_holds_is_known_while_it_holds_it(put: Put) -> None:
    assert torpor.metrics.gauges()["PendingBytes"] == 0
    x = put(torch.ones(16))
    y = x + 1
    gauges = torpor.metrics.gauges()
    assert gauges["PendingBytes"] == 64
    assert gauges["PendingTensors"] == 1
    assert gauges["InternedNodes"] > 0
    torpor.sync(wait=True)
    gauges = torpor.metrics.gauges()
    assert (gauges["PendingBytes"], gauges["PendingTensors"]) == (0, 0)
    assert gauges["CachedPlans"] >= 1
    del y


def test_a_report_of_a_program_has_all_formats(put: Put) -> None:
    steps(put, 2)
    assert "Execute" in torpor.metrics.report()
    assert '"Execute"' in torpor.metrics.report(format="json")
    assert "torpor_execute_seconds_count 2" in torpor.metrics.report(format="prometheus")
