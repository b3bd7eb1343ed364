"""The kit in several processes, and going on where an interrupted run stopped."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pytest

from torpor.backend import Computation
from torpor.backends.reference import ReferenceBackend
from torpor.cli import main
from torpor.testing.journal import Journal, read
from torpor.testing.run import Outcome, run_kit

HERE = "tests.backends.test_kit_in_processes"


class Crashing(ReferenceBackend):
    """Takes its process with it when it is given an `exp`."""

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        if any(n.op.name == "aten.exp.default" for c in computations for n in c.graph.nodes):
            os._exit(3)
        return super().compile(computations)


def run_ops(backend: str, ops: str, *options: str) -> Outcome:
    chosen = ("--ops", f"^({ops})$", "--samples", "1", *options)
    return run_kit(backend, "test_operators", options=chosen)


def statuses(outcome: Outcome) -> dict[str, str]:
    return {result.op: result.status for result in outcome.card.ops}


def test_pytest_xdist_need_not_be_there() -> None:
    assert statuses(run_ops("reference", "add", "-p", "no:xdist")) == {"add": "native"}


def test_a_crash_costs_the_operator_that_crashed() -> None:
    outcome = run_ops(f"{HERE}:Crashing", "add|exp|neg|sin", "-n", "2")
    assert statuses(outcome) == {"add": "native", "exp": "wrong", "neg": "native", "sin": "native"}
    assert "crashed" in outcome.card.wrong[0].detail
    assert not outcome.held


def test_a_run_goes_on_where_its_journal_ends(tmp_path: Path) -> None:
    journal = tmp_path / "deep" / "run.jsonl"
    first = run_ops("reference", "add|neg", "--journal", str(journal))
    second = run_ops("reference", "add|neg|exp|nonzero", "--journal", str(journal))
    assert second.held, second.output
    assert (len(first.card.ops), len(second.card.ops)) == (2, 4)
    keys = [line.get("key") for line in read(journal)]
    assert keys.count("test_operators::test_operator[add]") == 1
    third = run_ops("reference", "add|neg|exp|nonzero", "--journal", str(journal))
    assert third.held, third.output
    assert statuses(third) == statuses(second)


def test_the_command_goes_on_in_two_processes_and_finds_what_one_finds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Points and operators come from both; what the journal holds is not run again."""
    journal = str(tmp_path / "run.jsonl")
    alone = run_kit("reference", "test_models", "test_operators", options=("--ops", "^(add|exp)$"))
    run_kit("reference", "test_operators", options=("--ops", "^exp$", "--journal", journal))
    chosen = ["--section", "models", "--section", "operators", "--ops", "^(add|exp)$"]
    more = ["--jobs", "2", "--journal", journal, "--json"]
    status = main(["conformance", "reference", *chosen, *more])
    reported = capsys.readouterr()
    assert status == 0, reported
    card = json.loads(reported.out)
    for found, expected in (("points", alone.card.points), ("ops", alone.card.ops)):
        assert sorted(map(repr, card[found])) == sorted(repr(asdict(one)) for one in expected)
    left = len(alone.card.points) + len(alone.card.ops) - 1
    assert f"{left}/{left}" in reported.err


def test_what_an_earlier_run_found_wrong_stays_wrong(tmp_path: Path) -> None:
    wrong = "tests.backends.test_kit_itself:WrongExp"
    journal = ("--journal", str(tmp_path / "run.jsonl"))
    run_ops(wrong, "exp", *journal)
    again = run_ops(wrong, "exp|argmax", *journal)
    assert statuses(again) == {"exp": "wrong", "argmax": "native"}
    assert not again.held
    assert again.status == pytest.ExitCode.TESTS_FAILED


def test_a_journal_of_another_run_is_refused(tmp_path: Path) -> None:
    journal = ("--journal", str(tmp_path / "run.jsonl"))
    assert run_ops("reference", "add", *journal).held
    refused = run_ops("torchscript", "add", *journal)
    assert refused.status == pytest.ExitCode.USAGE_ERROR
    assert "of another run" in refused.output


def test_a_line_cut_short_is_written_again(tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    Journal(path, {"n": 1}).add("a", "op", {"x": 1})
    path.write_text(path.read_text() + '{"key": "b", "ki')
    journal = Journal(path, {"n": 1})
    assert list(journal.records) == ["a"]
    journal.add("b", "op", {"x": 2})
    assert Journal(path, {"n": 1}).of("op") == [{"x": 1}, {"x": 2}]
