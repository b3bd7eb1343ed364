"""The commands answer people in tables and programs in JSON."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import torpor
from torpor.cli import demo, info, main

TINY = ["--steps", "12", "--batch", "2", "--layers", "1", "--width", "8"]


@pytest.mark.parametrize("command", ["info", "demo", "bench"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as stop:
        main([command, "--help"])
    assert stop.value.code == 0
    assert "--json" in capsys.readouterr().out


def test_no_command_is_a_usage_error(capsys):
    with pytest.raises(SystemExit) as stop:
        main([])
    assert stop.value.code == 2
    assert "usage: torpor" in capsys.readouterr().err


def test_the_package_runs_as_a_module():
    command = [sys.executable, "-m", "torpor", "info", "--json"]
    environment = {**os.environ, "PYTHONPATH": str(Path(torpor.__file__).parents[1])}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["versions"]["torch"] == torch.__version__


def test_info_lists_every_backend(capsys):
    assert main(["info", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert set(facts) == {"versions", "backends", "devices", "config"}
    assert set(facts["backends"]) == set(torpor.backends())
    assert "reference" in facts["backends"]


def test_info_tells_how_an_op_is_recorded(capsys):
    assert main(["info", "--op", "aten.add_.Tensor"]) == 0
    text = capsys.readouterr().out
    for fact in ("aten::add_.Tensor(", "trace/recorder.py", "writes self", "def record("):
        assert fact in text
    assert main(["info", "--op", "aten.copy_.default", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert "overrides/special.py:" in facts["op"]["recorded by"]
    assert main(["info", "--op", "aten.bernoulli.default", "--json"]) == 0
    assert "mode random" in json.loads(capsys.readouterr().out)["op"]["recorded by"]


def test_a_reader_that_has_seen_enough_is_no_error():
    command = [sys.executable, "-m", "torpor", "info", "--op", "aten.add.Tensor"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, text=True, timeout=120)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, "")


def test_info_of_no_op_names_the_near_ones(capsys):
    assert main(["info", "--op", "aten.add.Tenso"]) == 2
    assert "aten.add.Tensor" in capsys.readouterr().err
    assert main(["info", "--op", "aten.softmx.int"]) == 2
    assert "aten.softmax" in capsys.readouterr().err


@pytest.mark.parametrize(
    "name", ["add", "aten.add", "aten::add", "torch.add", "torch.Tensor.add", "torch.ops.aten.add"]
)
def test_info_of_an_op_without_its_overload_names_all_of_them(name, capsys):
    assert main(["info", "--op", name]) == 2
    assert "do you mean aten.add.Scalar, aten.add.Scalar_out, aten.add.Tensor" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize("name", ["relu", "aten.relu", "torch.nn.functional.relu"])
def test_info_of_an_op_with_one_overload_besides_out_shows_it(name, capsys):
    assert main(["info", "--op", name]) == 0
    assert "aten::relu(Tensor self)" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", ".", "torch", "torch.", "no_such.op", "aten.", "aten.relu.x"])
def test_info_of_what_is_no_op_is_one_line(name, capsys):
    assert main(["info", "--op", name]) == 2
    assert len(capsys.readouterr().err.splitlines()) == 1


def test_info_prints_the_same_facts_as_tables(capsys):
    assert main(["info"]) == 0
    printed = capsys.readouterr().out
    for section in info.collect().values():
        assert all(name in printed for name in section)


def test_info_shows_flags_and_nothing_else_of_a_config():
    class Config:
        strict = False
        limit = 10
        _hidden = 1

        def method(self): ...

    assert info.settings(Config()) == {"strict": False, "limit": 10}


def test_demo_losses_are_eagers(capsys):
    with torpor.using("reference"):
        assert main(["demo", "--json", *TINY]) == 0
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert list(runs) == ["eager", "reference"]
    assert runs["reference"]["losses"] == runs["eager"]["losses"]
    comparison = runs["reference"]["comparison"]
    assert comparison["equal_losses"] == 12
    assert comparison["equal_parameters"] == comparison["all_parameters"] > 0
    assert comparison["same_sample"]


def test_demo_trains_on_another_backend_and_on_the_reference(capsys):
    with torpor.using("reference"):
        assert main(["demo", "--json", "--backend", "torchscript", *TINY]) == 0
    outcome = json.loads(capsys.readouterr().out)
    assert list(outcome["runs"]) == ["eager", "torchscript", "reference"]
    assert outcome["verdict"][0].startswith("torpor on torchscript is ")
    assert outcome["explain"]["balance"]["traces"] > 0


def test_demo_reuses_the_graph_of_a_step(capsys):
    assert main(["demo", "--json", *TINY]) == 0
    recorded = json.loads(capsys.readouterr().out)["runs"]["reference"]["recorded"]
    assert recorded["ops_per_step"] > 0
    assert recorded["graphs_compiled"] < 12
    assert recorded["cache_hits"] > 0
    assert recorded["steps_uncompiled"] < 12


def test_demo_prints_losses_times_and_what_to_do_next(capsys):
    assert main(["demo", *TINY]) == 0
    printed = capsys.readouterr()
    reported = ("eager", "reference", "bit for bit", "time of a step", "explain()", "and so")
    for expected in (*reported, "torpor bench --wild", "docs/walk.md"):
        assert expected in printed.out
    assert "12/12" in printed.err
    assert max(map(len, printed.out.splitlines())) <= 120


def test_demo_says_so_when_runs_differ():
    eager = demo.DemoRun("eager", losses=[1.0, 2.0], parameters={"w": torch.ones(2)}, sample="a")
    lazy = demo.DemoRun("lazy", losses=[1.0, 2.5], parameters={"w": torch.zeros(2)}, sample="b")
    comparison = demo.Comparison.of(eager, lazy)
    assert comparison == demo.Comparison(1, (2, 0.5), (2, 0.5), 0, 1, False)
    answers = dict(demo.equality_rows(2, comparison))
    assert answers["losses"] == "1 of 2"
    assert answers["  first difference"] == "5.0e-01, step 2"
    assert answers["parameters"] == "0 of 1 tensors"
    assert answers["generated text"] == "another"


def reported(name="inductor", ms=10.0, seconds=20.0, uncompiled=0, record=1e-3, run=9e-3):
    """What the demo says of a run beside one of eager's, 10 s of 1,000 steps."""
    plan, eager = demo.DemoPlan(steps=1000), demo.DemoRun("eager", step_ms=[10.0], seconds=10.0)
    lazy = demo.DemoRun(name, step_ms=[ms], seconds=seconds, uncompiled=uncompiled)
    balance = replace(lazy.explanation.balance, record=record, run=run)
    lazy.explanation = replace(lazy.explanation, balance=balance)
    return " ".join(demo.verdict(plan, eager, lazy))


def test_demo_says_when_compiling_has_paid():
    assert "a step takes 0.50 of eager's" in reported(ms=5.0)
    assert "10.0 s longer, for compiling at once" in reported(ms=5.0)
    assert "won back after about 3,000 steps" in reported(ms=5.0)
    assert "whole training took 5.0 s; eager's took 10.0 s" in reported(ms=5.0, seconds=5.0)


def test_demo_says_why_torpor_is_not_ahead():
    assert "2.00 times as long as eager's" in reported(ms=20.0)
    assert "Still compiling: 800 of 1000 steps ran uncompiled" in reported(ms=20.0, uncompiled=800)
    assert "Recording a step takes 15.0 ms, running it 9.0" in reported(ms=20.0, record=15e-3)
    assert "Running a step takes 9.0 ms" in reported(ms=20.0)
    assert "eager's kernels one by one" in reported(name="reference", ms=20.0)


def test_a_parameter_missing_from_one_run_is_a_difference():
    eager = demo.DemoRun("eager", losses=[1.0], parameters={"w": torch.ones(2)})
    lazy = demo.DemoRun("lazy", losses=[1.0], parameters={"v": torch.ones(2)})
    assert demo.Comparison.of(eager, lazy).equal_parameters == 0


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_demo_refuses_to_train_for_no_steps(steps, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--steps", steps])
    assert "not a positive number" in capsys.readouterr().err
