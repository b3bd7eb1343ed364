"""``torpor graph`` shows graphs as text, before and after the passes of a backend."""

import io
import json

import pytest
import torch

import torpor
from torpor.cli import main

TEXT = """\
graph(%0 = leaf 0 : float32[4] @cpu) {
  %1 = aten.sin.default(%0) : float32[4] @cpu
  %2 = aten.add_.Tensor(%0, %1) : float32[4] @cpu
  return %1, %2 over %0
}
"""

OVERWRITTEN = """\
graph(%0 = leaf 0 : float32[4] @cpu) {
compiled 0:
  %1 = aten.sin.default(%0) : float32[4] @cpu
  leave %1
commit 0:
  %2 = aten.add_.Tensor(%0, %1) : float32[4] @cpu
  leave %2 over %0
  return %1, %2 over %0
}
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "graph.txt"
    path.write_text(TEXT)
    return str(path)


def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit):
        main(["graph", "--help"])
    shown = capsys.readouterr().out
    for option in ("--after", "--backend", "--list", "--graph", "--import", "--json"):
        assert option in shown


def test_a_graph_as_it_was_recorded(file, capsys):
    assert main(["graph", file]) == 0
    assert capsys.readouterr().out == TEXT


def test_a_graph_after_a_pass(file, capsys):
    assert main(["graph", file, "--backend", "dynamo:eager", "--after", "overwrite"]) == 0
    assert capsys.readouterr().out == OVERWRITTEN
    assert main(["graph", file, "--backend", "dynamo:eager", "--after", "outputs"]) == 0
    assert capsys.readouterr().out == OVERWRITTEN.replace("leave %2 over %0", "leave %2")


def test_what_it_prints_it_reads(tmp_path, capsys):
    path = tmp_path / "after.txt"
    path.write_text(OVERWRITTEN)
    assert main(["graph", str(path)]) == 0
    assert capsys.readouterr().out == OVERWRITTEN


def test_standard_input(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO(TEXT))
    assert main(["graph", "-"]) == 0
    assert capsys.readouterr().out == TEXT


def test_a_record(tmp_path, capsys):
    torpor.use("reference")
    x = torch.randn(17, 3).to("lazy")  # of sizes of its own: nodes keep their first line
    with torpor.record(tmp_path / "step.torpor"):
        torch.tanh(x * 2).tolist()
        (x + 1).sum().item()
    file = str(tmp_path / "step.torpor")
    assert main(["graph", file, "--after", "schedule", "--backend", "dynamo:eager"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("graph(") == 2
    assert shown.count("compiled 0:") == 2
    assert "# test_graph.py" in shown
    assert main(["graph", file, "--graph", "1"]) == 0
    shown = capsys.readouterr().out
    assert "aten.sum.default" in shown
    assert "tanh" not in shown
    assert main(["graph", file, "--graph", "2"]) == 2
    assert "there are 2" in capsys.readouterr().err


def test_the_passes_of_a_backend(capsys):
    assert main(["graph", "--list", "--backend", "inductor"]) == 0
    shown = capsys.readouterr().out
    assert shown.index("expand") < shown.index("schedule") < shown.index("repeats")
    assert main(["graph", "--list", "--backend", "reference", "--json"]) == 0
    (only,) = json.loads(capsys.readouterr().out)
    assert only == {
        "name": "expand",
        "description": "ops that have a lowering or a decomposition, taken apart",
    }


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        (["--after", "overwrit"], "no pass 'overwrit'; did you mean 'overwrite'?"),
        (["--after", "nothing"], "no pass 'nothing': there are expand, schedule, limit, views"),
        (["--backend", "no-such", "--after", "views"], "no backend 'no-such'"),
    ],
)
def test_what_there_is_not(file, arguments, problem, capsys):
    assert main(["graph", file, "--backend", "dynamo:eager", *arguments]) == 2
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize(
    ("contents", "problem"),
    [
        (None, "No such file"),
        (b"\xff\xfe", "neither a graph as text nor a record"),
        (b"hello", "expected 'graph'"),
        (TEXT.replace("aten.sin", "aten.sinn").encode(), "torch has no op aten.sinn.default"),
        (TEXT.replace("%1, %2 over %0", "%0 over %2").encode(), "is no input"),
        (b"torpor record 1\nno more", "torpor graph: "),
    ],
)
def test_files_that_cannot_be_read(tmp_path, contents, problem, capsys):
    path = tmp_path / "file"
    if contents is not None:
        path.write_bytes(contents)
    assert main(["graph", str(path)]) == 2
    assert problem in capsys.readouterr().err


def test_a_file_has_to_be_named(capsys):
    assert main(["graph"]) == 2
    assert "name a file" in capsys.readouterr().err
