"""`torpor bench --cold`: what it takes to compile from nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from torpor.bench import cold
from torpor.bench.cold import ColdPlan, Start, Starts
from torpor.cli import main


class Small(ColdPlan):
    """Without what takes minutes."""

    @property
    def starts(self) -> list[Start]:
        sizes = [(1, "torpor"), (2, "torpor"), (0, "torpor"), (0, "torpor")]
        return [Start(self.workload, layers, runner) for layers, runner in sizes]


def test_every_start_is_measured_in_a_process_of_its_own() -> None:
    plan = Small("cpu", 1, "reference", scale="tiny", few=1, many=2, timeout=120)
    reported: list[str] = []
    starts = cold.measure(plan, reported.append)
    assert [start.error for start in starts.rows] == [""] * 4
    assert reported[:2] == ["gpt, 1 layers: torpor", "gpt, 2 layers: torpor"]
    for start in starts.rows:
        assert start.cold_s > 0
        assert start.cpu_s > 0
        assert start.graphs >= 1


def test_a_start_that_fails_costs_its_row() -> None:
    plan = Small("cpu", 1, "no such backend", scale="tiny", timeout=120)
    starts = cold.measure(plan, lambda _: None)
    assert all("no such backend" in start.error for start in starts.rows)
    assert starts.growth is None
    assert cold.table(starts)[1][0][-1]


def test_ratios_are_of_compile_times() -> None:
    plan = ColdPlan("cpu", 2)
    starts = Starts(plan.starts)
    for start, seconds in zip(starts.rows, (10.0, 15.0, 40.0, 20.0), strict=True):
        start.compile_s = seconds
    assert starts.growth == 1.5
    assert starts.to_compile == 0.5
    _, rows = cold.checks(plan, starts)
    assert [row[1] for row in rows] == ["1.50 ×", "0.50 ×"]
    assert [row[2] for row in rows] == ["2.00 ×", "0.60 ×"]


def test_the_command_writes_all_numbers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cold, "ColdPlan", Small)
    target = tmp_path / "cold.json"
    arguments = ["--cold", "--scale", "tiny", "--backends", "reference", "--device", "cpu"]
    assert main(["bench", *arguments, "--threads", "1", "--json", str(target)]) == 0
    numbers = json.loads(target.read_text())
    assert len(numbers["starts"]) == 4
    assert {"growth", "to_compile", "machine", "versions"} <= numbers.keys()


def test_workloads_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--cold", "conv"]) == 2
    assert "--cold has workloads of its own" in capsys.readouterr().err
