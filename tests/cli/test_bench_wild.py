"""`torpor bench --wild`: ordinary programs, at sizes that take seconds."""

import contextlib
import io
import json
import struct
from itertools import pairwise
from pathlib import Path

import pytest

from scripts import wild_figures
from torpor.bench import plot
from torpor.bench.wild import report, soak
from torpor.bench.wild.loop import GRACE, Loop, LoopEnded, Mark
from torpor.bench.wild.measure import fresh_caches
from torpor.bench.wild.outcome import (
    Losses,
    ProgramOutcome,
    ProgramRow,
    ProgramRun,
    Wild,
    geometric_mean,
)
from torpor.bench.wild.programs import ALL, PROGRAMS, SOAK, find
from torpor.cli import main

QUICK = ["--threads", "1", "--runners", "eager,torpor"]


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """What the command printed, its numbers and its picture; two small programs, few steps."""
    folder = tmp_path_factory.mktemp("wild")
    output, numbers, picture = io.StringIO(), folder / "wild.json", folder / "wild.png"
    command = ["bench", "--wild", "--only", "makemore,policy", "--steps", "4", *QUICK]
    with contextlib.redirect_stdout(output):
        assert main([*command, "--json", str(numbers), "--plot", str(picture)]) == 0
    return output.getvalue(), json.loads(numbers.read_text()), picture


def test_every_program_has_its_row_in_both_tables(bench):
    lines = bench[0].splitlines()
    for name in ("makemore ", "policy "):
        assert sum(line.lstrip().startswith(name) for line in lines) == 2


def test_the_json_has_all_numbers(bench):
    _, numbers, _ = bench
    assert {"machine", "versions", "threads", "date", "load", "rounds"} <= set(numbers)
    assert [program["program"] for program in numbers["programs"]] == ["makemore", "policy"]
    for program in numbers["programs"]:
        assert program["steps"] == 4
        for runner in ("eager", "torpor"):
            row = program["runners"][runner]
            assert (row["error"], row["steps"]) == ("", 4)
            assert row["step_ms"] > 0
            assert row["total_s"] > 0
            assert row["memory"] > 2**20
        assert program["losses"]["compared"] > 0
        assert program["losses"]["agree"]


def test_the_picture_is_drawn(bench):
    content = bench[2].read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    assert min(struct.unpack(">II", content[16:24])) > 200


def test_the_figures_become_markdown(bench, tmp_path, monkeypatch, capsys):
    page, numbers = tmp_path / "page.md", tmp_path / "wild.json"
    numbers.write_text(json.dumps(bench[1]))
    page.write_text(f"before\n{wild_figures.BEGIN}\nold\n{wild_figures.END}\nafter\n")
    for options in ([], ["--brief"], ["--write", str(page)]):
        monkeypatch.setattr("sys.argv", ["wild_figures", str(numbers), *options])
        wild_figures.main()
    printed = capsys.readouterr().out
    assert printed.count("| `makemore` |") == printed.count("| geometric mean |") == 2
    text = page.read_text()
    assert text.startswith("before\n")
    assert text.endswith("\nafter\n")
    assert "old" not in text
    assert "| `policy` |" in text


def test_a_soak_compares_steps_and_memory(tmp_path, capfd):
    numbers = tmp_path / "soak.json"
    assert main(["bench", "--soak", "6", "--threads", "1", "--json", str(numbers)]) == 0
    assert "growth MiB" in capfd.readouterr().out
    rows = json.loads(numbers.read_text())["programs"][0]["runners"]
    assert [row["steps"] for row in rows.values()] == [6, 6]


def test_an_unknown_program_is_refused_with_the_nearest(capsys):
    assert main(["bench", "--wild", "--only", "minst"]) == 2
    assert "did you mean 'mnist'?" in capsys.readouterr().err


def test_a_runner_of_other_races_is_refused(capsys):
    assert main(["bench", "--wild", "--runners", "torch-lazy"]) == 2
    assert "run by eager, torpor, compile, not by torch-lazy" in capsys.readouterr().err


def test_there_are_twelve_programs_and_each_can_be_loaded():
    assert len(ALL) == len(PROGRAMS) == 12
    assert all(callable(program.load()) for program in (*ALL, SOAK))
    assert find("supernet") is SOAK


@pytest.mark.parametrize("program", [*ALL, SOAK], ids=lambda program: program.name)
def test_a_program_trains_eagerly(program, tmp_path):
    loop = Loop(2, tmp_path)
    with pytest.raises(LoopEnded):
        program.load()(loop)
    assert loop.done == 2
    assert all(loss == loss for _, loss in loop.losses)


def marked(*ms, group=10, compiled=0, resident=0):
    """Marks of a run whose groups of steps took so many milliseconds a step."""
    marks, now = [Mark(0, 0.0, 0.0, 0.0, 0, 0)], 0.0
    for place, each in enumerate(ms, 1):
        now += each * group / 1e3
        ran = place * group * compiled
        marks.append(Mark(place * group, now, now, now, place * resident, ran))
    return marks


def outcome_of(eager, ours, **options):
    steps = 10 * len(eager)
    rows = {
        "eager": ProgramRow(
            "eager", [ProgramRun(marked(*eager), steps=steps, total_s=1.0, memory=1)]
        ),
        "torpor": ProgramRow(
            "torpor", [ProgramRun(marked(*ours, **options), steps=steps, total_s=2.0, memory=1)]
        ),
    }
    return ProgramOutcome("made-up", "of marks", steps, rows)


def test_a_step_is_the_median_of_the_later_half():
    assert ProgramRun(marked(9, 9, 9, 1, 2, 3)).step_ms == pytest.approx(2)
    assert ProgramRun().step_ms is None


def test_a_run_stopped_in_its_first_half_has_no_step_after_warm_up():
    marks = marked(9, 9, 9, 1, 2, 3)
    assert ProgramRun(marks, steps=60, planned=120).step_ms == pytest.approx(2)
    assert ProgramRun(marks, steps=60, planned=130).step_ms is None
    assert ProgramRun(marks, steps=60, planned=130).step_cpu_ms is None


def test_the_bookkeeping_of_a_mark_is_not_the_programs():
    marks = [Mark(0, 0.0, 5.0, 0.0, 0, 0), Mark(10, 6.0, 6.0, 0.0, 0, 0)]
    assert ProgramRun(marks).ms() == [100.0]


def test_slow_steps_are_those_after_the_first_fifty_without_a_compiled_graph():
    eager, ours = [1.0] * 8, [5.0] * 7 + [1.0]
    assert outcome_of(eager, ours).slow_steps() == 20  # 51 to 70
    assert outcome_of(eager, ours, compiled=1).slow_steps() == 0
    assert outcome_of(eager, [1.05] * 8).slow_steps() == 0


def test_a_group_in_which_eager_is_slow_too_is_not_slow():
    eager = [1.0] * 6 + [5.0] + [1.0] * 3
    assert outcome_of(eager, eager).slow_steps() == 0


def test_a_loop_marks_its_groups_the_fiftieth_step_and_its_end():
    loop = Loop(4000)
    with pytest.raises(LoopEnded):
        while True:
            loop.step()
    assert [mark.steps for mark in loop.marks[:3]] == [GRACE, 100, 200]
    assert loop.marks[-1].steps == 4000
    assert all(a.resumed >= a.seconds <= b.seconds for a, b in pairwise(loop.marks))


def test_a_loop_that_takes_too_long_is_stopped_at_the_end_of_a_step():
    loop = Loop(10_000, most_s=1e-9)
    with pytest.raises(LoopEnded):
        while True:
            loop.step()
    assert loop.done == GRACE


def test_losses_are_equal_within_rounding_or_off():
    eager = [(step, 1.0) for step in range(100)]
    rounded = [(step, 1.0 if step < 60 else 1.00001) for step in range(100)]
    drifted = [(step, loss if step < 90 else 1.5) for step, loss in rounded]
    wrong = [(step, loss if step != 65 else 1.5) for step, loss in rounded]
    assert str(Losses.of(eager, eager, 20)) == "equal"
    assert str(Losses.of([], [], 20)) == "none read"
    assert Losses.of(eager, rounded, 20).agree
    assert Losses.of(eager, rounded, 20).equal == 60
    assert Losses.of(eager, drifted, 20).agree  # a rounding error has grown for over twenty steps
    assert Losses.of(eager, drifted, 20).final > 0.1
    assert not Losses.of(eager, wrong, 20).agree
    assert not Losses.of([(0, 1.0)], [(0, float("nan"))], 20).agree


def test_missed_bars_are_told():
    wild = Wild([outcome_of([1.0] * 8, [2.0] * 8)])
    assert report.failures(wild) == [
        "made-up: step 2.00 × eager, at most 1.05",
        "made-up: total 2.00 × eager, at most 1.2",
        "made-up: 30 slow steps without a compiled graph after the first 50 steps",
        "geometric mean of steps: 2.00 × eager, at most 0.95",
    ]


def test_a_program_that_fails_costs_its_row_and_a_bar():
    outcome = outcome_of([1.0] * 8, [1.0] * 8)
    outcome.rows["torpor"] = ProgramRow("torpor", [ProgramRun(error="RuntimeError: no")])
    wild = Wild([outcome])
    assert report.notes(wild) == ["made-up, torpor: RuntimeError: no"]
    assert "made-up: no step" in report.failures(wild)
    assert report.step_table(wild)[1][0][2:4] == ["–", "–"]


def test_memory_that_grows_fails_a_soak():
    flat = outcome_of([1.0] * 8, [1.0] * 8)
    growing = outcome_of([1.0] * 8, [1.0] * 8, resident=8 << 20)
    assert soak.failures(flat) == []
    assert soak.failures(growing) == ["memory grew by 48 MiB more than eager's"]


def test_the_geometric_mean_is_of_those_that_are_there():
    assert geometric_mean([2.0, None, 8.0]) == pytest.approx(4.0)
    assert geometric_mean([None]) is None


def test_caches_are_fresh_but_for_the_native_library(tmp_path):
    variables = fresh_caches(tmp_path)
    assert {Path(folder).parent for folder in variables.values()} == {tmp_path}
    kept = Path(variables["TORPOR_CACHE_DIR"])
    assert [path.name for path in kept.iterdir()] == ["native"]
    assert kept.stat().st_mode & 0o077 == 0


def test_no_picture_is_drawn_of_nothing(tmp_path):
    with pytest.raises(plot.NoPicture):
        plot.wild(Wild(), tmp_path / "none.png")
