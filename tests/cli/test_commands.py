"""The commands answer people in tables and programs in JSON."""

import json
import os
import subprocess
import sys
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
    outcome = json.loads(capsys.readouterr().out)
    assert outcome["losses"]["lazy"] == outcome["losses"]["eager"]
    comparison = outcome["comparison"]
    assert comparison["equal_losses"] == 12
    assert comparison["equal_parameters"] == comparison["all_parameters"] > 0
    assert comparison["same_sample"]


def test_demo_reuses_the_graph_of_a_step(capsys):
    assert main(["demo", "--json", *TINY]) == 0
    recorded = json.loads(capsys.readouterr().out)["recorded"]
    assert recorded["ops_per_step"] > 0
    assert recorded["graphs_compiled"] < 12
    assert recorded["cache_hits"] > 0


def test_demo_prints_losses_counts_and_times(capsys):
    assert main(["demo", *TINY]) == 0
    printed = capsys.readouterr()
    for expected in ("eager", "lazy", "ops recorded", "graphs compiled", "cache hits", "per step"):
        assert expected in printed.out
    assert "12/12" in printed.err


def test_demo_says_so_when_runs_differ():
    eager = demo.Run("cpu", losses=[1.0, 2.0], parameters={"w": torch.ones(2)}, sample="a")
    lazy = demo.Run("lazy", losses=[1.0, 2.5], parameters={"w": torch.zeros(2)}, sample="b")
    comparison = demo.Comparison.of(eager, lazy)
    assert comparison == demo.Comparison(1, 0.5, 0, 1, False)
    answers = dict(demo.equality_rows(2, comparison))
    assert answers["losses"] == "no (1 of 2), largest difference 5.0e-01"
    assert answers["parameters"] == "no (0 of 1 tensors)"
    assert answers["generated text"] == "no"


def test_a_parameter_missing_from_one_run_is_a_difference():
    eager = demo.Run("cpu", losses=[1.0], parameters={"w": torch.ones(2)})
    lazy = demo.Run("lazy", losses=[1.0], parameters={"v": torch.ones(2)})
    assert demo.Comparison.of(eager, lazy).equal_parameters == 0


@pytest.mark.parametrize("steps", ["0", "-3"])
def test_demo_refuses_to_train_for_no_steps(steps, capsys):
    with pytest.raises(SystemExit):
        main(["demo", "--steps", steps])
    assert "not a positive number" in capsys.readouterr().err
