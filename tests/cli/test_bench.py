"""`torpor bench`: the race, at sizes that take seconds."""

import contextlib
import io
import json
import os
import struct
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

import torpor
from torpor.bench import plot, report, runners, workloads
from torpor.bench.growth import Growth, GrowthCosts
from torpor.bench.measurements import Results, Row, WorkloadOutcome
from torpor.bench.race import Settings, race
from torpor.bench.runners import Spec
from torpor.bench.worker import Racer, WarmUpLimits
from torpor.bench.worker_processes import Worker, WorkerError, command, environment
from torpor.cli import main

QUICK = ["--scale", "tiny", "--rounds", "2", "--round-ms", "2", "--threads", "1", "--keep-caches"]
ROW = {
    "runner", "ms", "spread", "to_eager", "to_compile", "to_best_compile", "recording_ms",
    "page_faults", "single_ms", "tracing_bound", "memory_bytes", "reserved_bytes", "first_s",
    "cold_s", "compiles", "late_compiles", "settled", "loss", "loss_difference",
    "steps_per_round", "samples", "error",
}  # fmt: skip


@dataclass
class Bench:
    """What one run of the command left."""

    printed: str
    numbers: dict
    picture: Path


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    output, numbers, picture = io.StringIO(), folder / "bench.json", folder / "bench.png"
    command = ["bench", "chain", "--device", "cpu", "small-gpt", *QUICK, "--json", str(numbers)]
    command += ["--plot", str(picture), "--runners", "eager,torpor"]
    with contextlib.redirect_stdout(output):
        assert main([*command, "--backends", "reference"]) == 0
    return Bench(output.getvalue(), json.loads(numbers.read_text()), picture)


def png_size(path):
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    return struct.unpack(">II", content[16:24])


def test_the_table_has_a_row_for_each_runner(bench):
    for text in ("30 elementwise ops on 1,000 floats", "2-layer width-16 GPT", "/eager", "cold s"):
        assert text in bench.printed
    for runner in ("eager ", "torpor (reference) "):
        assert sum(line.startswith(runner) for line in bench.printed.splitlines()) == 2


def test_the_json_has_all_numbers(bench):
    known = {"machine", "versions", "device", "threads", "environment"}
    known |= {"date", "rounds", "scale", "load"}
    assert set(bench.numbers) == {*known, "workloads"}
    assert [w["workload"] for w in bench.numbers["workloads"]] == ["chain", "small-gpt"]
    for row in (row for w in bench.numbers["workloads"] for row in w["rows"]):
        assert set(row) == ROW
        assert row["error"] == ""
        assert len(row["samples"]) == 2
        assert row["ms"] > 0
        assert row["to_eager"] > 0
        assert row["to_compile"] is None
        assert row["memory_bytes"] > 2**20


def test_lazy_results_are_eagers(bench):
    for workload in bench.numbers["workloads"]:
        assert [row["loss_difference"] for row in workload["rows"]] == [0.0, 0.0]


def test_a_race_starts_when_nothing_compiles_any_more(bench):
    rows = [row for workload in bench.numbers["workloads"] for row in workload["rows"]]
    assert all(row["settled"] and row["late_compiles"] == 0 for row in rows)
    assert all(row["compiles"] for row in rows if row["runner"] != "eager")


def test_the_picture_is_a_png_of_sensible_size(bench):
    width, height = png_size(bench.picture)
    assert 800 < width < 2500
    assert 300 < height < 2500


def test_json_to_standard_output_is_all_that_is_there(capsys):
    arguments = ["bench", *QUICK, "--device", "cpu", "--json", "-", "mlp", "--runners", "eager"]
    assert main(arguments) == 0
    assert json.loads(capsys.readouterr().out)["workloads"][0]["workload"] == "mlp"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["smal-gpt"], "no workload 'smal-gpt': there are chain, conv"),
        (["smal-gpt"], "did you mean 'small-gpt'?"),
        (["chain", "--runners", "eagre"], "no runner 'eagre'"),
        (["chain", "--runners", "eagre"], "did you mean 'eager'?"),
        (["nowhere.py"], "there is no script nowhere.py"),
        (["--growth", "gpt"], "--growth has a workload of its own"),
    ],
)
def test_a_mistake_is_told_with_what_was_meant(arguments, said, capsys):
    assert main(["bench", *arguments]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("jobs", [1, 3])
def test_a_runner_that_fails_costs_its_row(jobs):
    limits = WarmUpLimits(round_ms=1)
    settings = Settings("cpu", 1, 1, "tiny", 100, limits, keep_caches=True, warm_jobs=jobs)
    specs = [Spec("torpor-lazy", "cpu", "reference"), Spec("torpor", "cpu", "nonsense")]
    specs.append(Spec("torch-lazy", "cuda"))
    said = []
    outcome = race("mlp", specs, settings, said.append)
    working, torpor, torch_lazy = outcome.rows
    assert working.ms is not None
    assert torpor.error.startswith("BackendError: no backend 'nonsense'")
    assert torch_lazy.error.startswith("RuntimeError: torch._lazy")
    assert len(said) == 4
    assert any("(failed)" in text for text in said)
    columns, rows = report.table(outcome)
    assert [dict(zip(columns, row))["note"] for row in rows][1:] == [torpor.error, torch_lazy.error]


def crashing(code):
    return Worker([sys.executable, "-c", code], dict(os.environ), timeout=20)


def test_a_process_that_crashes_is_told_by_its_signal():
    with (
        crashing("import os, sys; print('oh', file=sys.stderr); os.abort()") as worker,
        pytest.raises(WorkerError, match="killed by SIGABRT: oh"),
    ):
        worker.ask("round")


def test_a_process_that_hangs_is_given_up():
    with crashing("import time; time.sleep(60)") as worker:
        worker.timeout = 0.2
        with pytest.raises(WorkerError, match=r"no answer within 0\.2 s"):
            worker.ask("round")


def test_a_process_that_measures_eager_is_without_torpor(tmp_path):
    (tmp_path / "look.py").write_text(
        "import sys, torch, torpor.bench.worker\n"
        "print('torpor.trace' in sys.modules, torch.nn.Module.__call__.__name__)\n"
    )
    found = []
    for with_torpor in (False, True):
        variables = environment(1, "cpu") | {"PYTHONPATH": f"{tmp_path}"}
        if with_torpor:
            variables["PYTHONPATH"] += os.pathsep + environment(1, "cpu")["PYTHONPATH"]
        run = command("look", with_torpor)
        done = subprocess.run(run, env=variables, capture_output=True, text=True, timeout=120)
        found.append(done.stdout.strip())
    assert found == ["False _wrapped_call_impl", "True _wrapped_call_impl"]


@pytest.mark.parametrize("name", workloads.TINY)
def test_every_workload_steps(name):
    for library in {"gpt2": ["transformers"], "resnet50": ["torchvision"]}.get(name, []):
        pytest.importorskip(library)
    racer = Racer(Spec("eager", "cpu"), workloads.TINY[name])
    racer.step()
    first = racer.program.result.clone()
    racer.step()
    assert torch.isfinite(first.float()).all()
    trains = isinstance(racer.program, workloads.Training)
    assert trains == (not torch.equal(first, racer.program.result))


def test_a_library_that_is_absent_is_named():
    with pytest.raises(RuntimeError, match="no_such_library is not installed"):
        workloads._library("no_such_library")


def test_every_size_of_one_scale_has_its_tiny_twin():
    assert list(workloads.FULL) == list(workloads.TINY)
    assert {name for names in workloads.BY_DEVICE.values() for name in names} == set(workloads.FULL)


def test_each_backend_has_a_runner_of_its_own():
    found = runners.specs(["eager", "torpor"], ["inductor", "reference"], "cpu", {"rng": "exact"})
    assert [spec.label for spec in found] == ["eager", "torpor", "torpor (reference)"]
    assert found[1].options == (("rng", "exact"),)


def outcome(**rows):
    return WorkloadOutcome("chain", "a chain", [Row(runner, **row) for runner, row in rows.items()])


def test_ratios_are_to_the_fastest_that_ran():
    found = outcome(
        eager={"samples": [4.0, 2.0, 3.0]},
        compile={"samples": [2.0]},
        torpor={"samples": [1.0]},
        broken={"error": "no"},
    )
    torpor, broken = found.rows[2], found.rows[3]
    assert found.ratio(torpor, "eager") == pytest.approx(1 / 3)
    assert found.ratio(torpor, "eager", "compile", "absent") == 0.5
    assert found.ratio(torpor, "absent") is None
    assert found.ratio(broken, "eager") is None


@pytest.mark.parametrize(
    ("records", "recording", "bound"), [(True, 9.1, True), (True, 8.0, False), (False, 9.9, False)]
)
def test_a_step_that_is_all_recording_is_named(records, recording, bound):
    found = outcome(torpor={"samples": [10.0], "recording": [recording], "records": records})
    assert ("tracing-bound" in report.notes(found, found.rows[0])) == bound


@pytest.mark.parametrize(
    ("losses", "note"),
    [
        ([1.0, 2.0], []),
        ([1.0, 2.01, 9.0], []),  # eager has no third loss
        ([1.0, 2.1], ["result off by 5.0%"]),
        ([1.0, float("nan")], ["result off by inf%"]),
    ],
)
def test_a_result_that_is_not_eagers_is_told(losses, note):
    found = outcome(eager={"losses": [1.0, 2.0]}, torpor={"losses": losses, "samples": [1.0]})
    assert report.notes(found, found.rows[1]) == note


def test_a_long_error_is_cut_to_a_line():
    assert report.shortened("a\n b  c") == "a b c"
    assert len(report.shortened("x" * 500)) == 100


def test_what_took_part_and_failed_has_no_bar(tmp_path):
    results = Results("cpu", 1, 1)
    results.outcomes = [outcome(eager={"error": "no"}, torpor={"samples": [1.0]})]
    with pytest.raises(plot.NoPicture, match="no runner could be compared"):
        plot.race(results, tmp_path / "none.png")
    assert not list(tmp_path.iterdir())


def test_without_matplotlib_nothing_is_measured_for_a_picture(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "chain", "--plot", "x.png"]) == 2
    said = capsys.readouterr().err
    assert "matplotlib is not installed" in said
    assert "torpor[bench]" in said


def test_growth_is_drawn(tmp_path):
    points = [Growth(n, n, n / 9, 3 * n, 2.0 * n, 1, n << 27) for n in (1, 2, 4)]
    plot.growth([*points, Growth(8, error="no")], tmp_path / "growth.png")
    width, height = png_size(tmp_path / "growth.png")
    assert 1.5 < width / height < 3


def test_the_ratio_of_syncs_is_of_wall_and_cpu_time():
    costs = GrowthCosts(sync_ms={"1000": (2.0, 1.0), "10000": (3.0, 1.1)})
    assert costs.sync_ratio == (1.5, pytest.approx(1.1))
    assert GrowthCosts().sync_ratio is None


def test_growth_is_measured_and_told(tmp_path, capsys):
    target = tmp_path / "growth.json"
    arguments = ["bench", "--growth", "--max-layers", "1", "--rounds", "2", "--threads", "1"]
    arguments += ["--backends", "reference", "--device", "cpu", "--json", str(target)]
    assert main(arguments) == 0
    numbers = json.loads(target.read_text())
    assert [point["layers"] for point in numbers["growth"]] == [1]
    for point in numbers["growth"]:
        assert point["error"] == ""
        assert min(point["trace_ms"], point["sync_ms"], point["step_ms"]) > 0
    assert set(numbers["sync_ms"]) == {"1000", "10000"}
    assert numbers["schedule_late_compiles"] <= numbers["schedule_compiles"]
    printed = capsys.readouterr().out
    assert "10,000 against 1,000 nodes" in printed
    assert "schedule, clipping, loss scaling" in printed


def test_a_run_on_the_thread_that_records_is_not_recording(monkeypatch):
    monkeypatch.setattr(torpor.config, "async_queue", False)
    racer = Racer(Spec("torpor", "cpu", "reference"), workloads.TINY["small-gpt"])
    before = racer.runner.waited()
    racer.warm_up(WarmUpLimits(least_steps=4, round_ms=1))
    assert racer.runner.waited() > before
    racer.runner = replace(racer.runner, waited=iter([0.0, 1000.0]).__next__)
    assert racer.round().recording_ms == pytest.approx(-1e6, rel=0.1)


def test_a_backend_may_be_named_with_options():
    plain, other = runners.specs(["torpor"], ["inductor", "inductor+a=false+b=x"], "cpu", {"b": 1})
    assert (plain.label, plain.options) == ("torpor", (("b", 1),))
    assert other.label == "torpor (inductor+a=false+b=x)"
    assert other.backend == "inductor"
    assert dict(other.options) == {"a": False, "b": "x"}
    with pytest.raises(ValueError, match="name=value"):
        runners.specs(["torpor"], ["inductor+a"], "cpu", {})
