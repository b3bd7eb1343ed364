"""``torpor replay`` answers people and programs; its status says whether the numbers agree."""

import importlib
import json
import subprocess
import sys

import pytest
import torch

import torpor
from torpor.backend import registry
from torpor.cli import main

PLANTED = "tests.unit.debug.planted:Planted"


@pytest.fixture
def file(tmp_path):
    torpor.use("reference")
    x = torch.randn(13, 7).to("lazy")
    with torpor.record(tmp_path / "step.torpor"):
        torch.tanh(x * 2).tolist()
        (x + 1).sum().item()
    return tmp_path / "step.torpor"


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["replay", "--help"])
    shown = capsys.readouterr().out
    for option in ("--backend", "--graph", "--bisect", "--out", "--no-data", "--json", "--allow"):
        assert option in shown


def test_a_table_of_runs(file, capsys):
    assert main(["replay", str(file)]) == 0
    shown = capsys.readouterr().out
    assert "same bits" in shown
    assert shown.count("the recorded results") == 2


def test_json(file, capsys):
    assert main(["replay", str(file), "--json", "--graph", "1"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["ok"] is True
    assert [run["run"] for run in facts["runs"]] == [1]
    assert facts["recorded_with"]["torch"] == torch.__version__


def test_a_wrong_backend(file, capsys):
    assert main(["replay", str(file), "--backend", PLANTED]) == 1
    shown = capsys.readouterr().out
    assert "different" in shown
    assert "--bisect reference" in shown


def test_made_up_numbers(file, capsys):
    assert main(["replay", str(file), "--no-data"]) == 0
    assert "made up" in capsys.readouterr().out


def test_bisect_writes_a_program_that_fails(file, tmp_path, capsys):
    out = tmp_path / "repro.py"
    assert main(["replay", str(file), "--bisect", "reference", PLANTED, "--out", str(out)]) == 1
    shown = capsys.readouterr().out
    assert "run 0" in shown
    assert "aten.tanh.default" in shown
    assert f"python {out}" in shown
    environment = {"PYTHONPATH": ":".join(sys.path)}
    assert subprocess.run([sys.executable, str(out)], env=environment, check=False).returncode == 1


OWN_BACKEND = """
from tests.unit.debug.planted import Planted
from torpor.backend import register

register("wrong_in_a_module", Planted)
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module that registers a backend, which this process then has imported."""
    (tmp_path / "own_backend.py").write_text(OWN_BACKEND)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(registry, "_factories", dict(registry._factories))
    yield "own_backend"
    sys.modules.pop("own_backend", None)


def reproduced(out):
    """The status and the errors of a reproduction in a process of its own."""
    environment = {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(
        [sys.executable, out], env=environment, capture_output=True, text=True, check=False
    )
    return done.returncode, done.stderr


def test_a_reproduction_imports_what_the_replay_imported(file, tmp_path, module, capsys):
    out = tmp_path / "repro.py"
    options = ["--import", module, "--bisect", "reference", "wrong_in_a_module", "--out", str(out)]
    assert main(["replay", str(file), *options]) == 1
    assert "aten.tanh.default" in capsys.readouterr().out
    assert reproduced(out) == (1, "")
    (tmp_path / "own_backend.py").write_text(OWN_BACKEND.replace("Planted", "Sound"))
    assert reproduced(out) == (0, "")
    (tmp_path / "own_backend.py").unlink()
    status, errors = reproduced(out)
    assert (status, errors.splitlines()) == (
        2, ["cannot be run: ModuleNotFoundError: No module named 'own_backend'"],
    )  # fmt: skip


def test_a_reproduction_that_does_not_find_its_backend(file, tmp_path, module):
    importlib.import_module(module)
    out = tmp_path / "repro.py"
    assert main(["replay", str(file), "--bisect", "wrong_in_a_module", "--out", str(out)]) == 1
    status, errors = reproduced(out)
    assert status == 2
    assert len(errors.splitlines()) == 1
    assert "no backend 'wrong_in_a_module'" in errors


def test_the_next_command_has_the_same_imports(file, module, capsys):
    assert main(["replay", str(file), "--import", module, "--backend", "wrong_in_a_module"]) == 1
    shown = capsys.readouterr().out
    assert "FILE --import own_backend --bisect reference wrong_in_a_module" in shown


def test_bisect_in_json_with_one_name(file, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["replay", str(file), "--json", "--bisect", PLANTED]) == 1
    facts = json.loads(capsys.readouterr().out)
    assert (facts["trusted"], facts["suspect"], facts["run"]) == ("reference", PLANTED, 0)
    assert facts["differs"]["op"] == "aten.tanh.default"
    assert (tmp_path / facts["reproduction"]).exists()


def test_bisect_of_what_is_right(file, capsys):
    sound = PLANTED.replace("Planted", "Sound")
    assert main(["replay", str(file), "--bisect", "reference", sound]) == 0
    assert "in all of 2 runs" in capsys.readouterr().out
    assert main(["replay", str(file), "--json", "--bisect", "reference", sound]) == 0
    assert json.loads(capsys.readouterr().out)["differs"] is None


@pytest.mark.parametrize(
    ("arguments", "what"),
    [
        (["nowhere.torpor"], "No such file"),
        (["{file}", "--graph", "9"], "there is no run 9"),
        (["{file}", "--backend", "acme"], "no backend 'acme'"),
        (["{file}", "--bisect", "a", "b", "c"], "two backends"),
        (["{file}", "--import", "no_such_module"], "no_such_module"),
    ],
)
def test_mistakes_are_told_in_one_line(file, capsys, arguments, what):
    assert main(["replay", *(a.format(file=file) for a in arguments)]) == 2
    reported = capsys.readouterr().err
    assert what in reported
    assert "Traceback" not in reported


def test_a_damaged_file_is_told_in_one_line(file, capsys):
    file.write_bytes(file.read_bytes()[:-10])
    assert main(["replay", str(file)]) == 2
    assert "cut off" in capsys.readouterr().err


@pytest.mark.parametrize("options", [[], ["--json"], ["--graph", "0"], ["--bisect", PLANTED]])
def test_a_file_without_runs_is_told_in_one_line(tmp_path, capsys, options):
    with pytest.warns(torpor.errors.TorporWarning, match="no runs"):
        torpor.record(tmp_path / "empty").start().stop()
    assert main(["replay", str(tmp_path / "empty"), *options]) == 2
    shown = capsys.readouterr()
    assert "no runs to replay" in shown.err
    assert len(shown.err.splitlines()) == 1
    assert shown.out == ""


def test_files_of_ranks_without_runs_are_told_in_one_line(tmp_path, capsys):
    files = [tmp_path / f"empty.rank{rank}" for rank in range(2)]
    for rank, file in enumerate(files):
        recording = torpor.record(file).start()
        recording.ranks = {"rank": rank, "groups": {}}
        with pytest.warns(torpor.errors.TorporWarning, match="no runs"):
            recording.stop()
    assert main(["replay", *map(str, files)]) == 2
    assert "no runs to replay" in capsys.readouterr().err
