"""`torpor new-backend`: the package it writes installs, runs and passes the kit."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from pathlib import Path

import pytest

import torpor
from torpor.cli import main

SOURCE = Path(torpor.__file__).resolve().parents[1]


@pytest.mark.parametrize("name", ["", "9lives", "a-b", "class", "a b", "é", "Acme", "../x"])
def test_a_name_that_cannot_be_a_module_is_refused(name, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new-backend", name]) == 2
    assert repr(name) in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["dynamo", "inductor", "reference", "torchscript"])
def test_the_name_of_a_known_backend_is_refused(name, tmp_path, capsys):
    assert main(["new-backend", name, "--out", str(tmp_path / "out")]) == 2
    assert "already" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_folder_that_is_not_empty_is_left_alone(tmp_path, capsys):
    (tmp_path / "mine.txt").write_text("mine")
    assert main(["new-backend", "acme", "--out", str(tmp_path)]) == 2
    assert "not empty" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


def test_a_file_in_the_place_of_the_folder_is_left_alone(tmp_path, capsys):
    (tmp_path / "out").write_text("mine")
    assert main(["new-backend", "acme", "--out", str(tmp_path / "out")]) == 2
    assert "is a file" in capsys.readouterr().err
    assert (tmp_path / "out").read_text() == "mine"


def test_an_empty_folder_is_filled_and_the_files_are_listed(tmp_path, capsys):
    assert main(["new-backend", "acme_2", "--out", str(tmp_path), "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    found = [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()]
    assert sorted(found) == reported["files"]
    for part in ("lowering", "compile", "runtime"):
        assert f"src/torpor_acme_2/{part}.py" in found


def test_no_placeholder_is_left_and_every_module_parses(tmp_path):
    assert main(["new-backend", "two_words", "--out", str(tmp_path), "--buffers", "own"]) == 0
    for path in tmp_path.rglob("*"):
        if path.is_file():
            text = path.read_text(encoding="utf-8")
            assert "{{" not in text, path
            if path.suffix == ".py":
                ast.parse(text)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["torpor.backends"] == {
        "two_words": "torpor_two_words:TwoWordsBackend"
    }


@pytest.fixture(scope="module", params=["torch", "own"])
def installed(request, tmp_path_factory) -> dict[str, str]:
    """An environment in which a fresh package is installed, with pip and nothing from outside."""
    folder = tmp_path_factory.mktemp("new_backend")
    package, target = folder / "torpor-acme", folder / "site"
    reported = ["--out", str(package), "--buffers", request.param]
    assert main(["new-backend", "acme", *reported]) == 0
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    done = subprocess.run([*pip, *offline, str(package)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    path = os.pathsep.join([str(target), str(SOURCE)])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "PACKAGE": str(package)}


def run(environment: dict[str, str], *command: str) -> str:
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        env=environment,
        cwd=environment["PACKAGE"],
        timeout=500,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_installed_backend_is_found_by_name_and_computes(installed):
    program = """
import torch, torpor
assert torpor.backends()["acme"] == "available"
torpor.use("acme")
x = torch.tensor([1.0, -2.0]).to("lazy")
print((x * 3 + x).relu().tolist(), torpor.backend.get_backend().metrics()["acme.runs"])
"""
    assert run(installed, "-W", "error", "-c", program).strip() == "[4.0, 0.0] 1"


def test_the_installed_backend_passes_the_kit(installed):
    kit = [f"torpor.testing.test_{part}" for part in ("contract", "laziness", "errors")]
    options = ["-q", "-p", "no:cacheprovider", "-p", "torpor.testing.plugin", "--backend", "acme"]
    reported = run(installed, "-m", "pytest", "--pyargs", *kit, *options)
    assert "contract" in reported
    assert "failed" not in reported


def test_the_tests_of_the_package_pass(installed):
    few = ["-k", "lowering or operators or models-lazy"]
    reported = run(installed, "-m", "pytest", "-q", "-p", "no:cacheprovider", *few)
    assert "passed" in reported


ADDED = {
    "aten.cat.default": ("cat", "lambda xs, dim=0: numpy.concatenate(xs, dim)"),
    "aten.cumsum.default": ("cumsum", "lambda x, dim, dtype=None: numpy.cumsum(x, dim)"),
    "aten.flip.default": ("flip", "lambda x, dims: numpy.flip(x, tuple(dims))"),
    "aten.full.default": ("full", "lambda size, value, *rest: numpy.full(size, value)"),
    "aten.gt.Scalar": ("gt", "lambda x, y: x > y"),
    "aten.max.dim": ("max", "lambda x, dim, keep: (x.max(dim), x.argmax(dim))"),
    "aten.permute.default": ("permute", "lambda x, dims: x.transpose(dims)"),
    "aten.sum.dim_IntList": ("sum", "lambda x, dims, keep, dtype=None: x.sum(tuple(dims))"),
}
"""Ops of every form: lists, flags, sizes, several outputs, other dtypes, views."""


def test_ops_of_any_form_are_added_by_a_line_in_each_table(installed, tmp_path):
    package = tmp_path / "src" / "torpor_acme"
    shutil.copytree(Path(installed["PACKAGE"]) / "src" / "torpor_acme", package)
    _insert(
        package / "lowering.py", "NATIVE = {", (f'"{op}": "{n}",' for op, (n, _) in ADDED.items())
    )
    _insert(package / "runtime.py", "] = {", (f'"{n}": {code},' for n, code in ADDED.values()))
    program = """
import torch, torpor
torpor.use("acme")
x = torch.tensor([[1.0, -2.0, 3.0], [4.0, 5.0, -6.0]])
def compute(x):
    best, place = (x.permute(1, 0) + 1).max(1)
    filled = torch.full((2, 3), 3.0, device=x.device)
    joined = torch.cat([x.flip(1), filled * x], 1).cumsum(1)
    return x > 0, joined, joined.sum(0), (x > 0).sum(1), best, place, x.permute(1, 0).flip(0) - 1
for got, expected in zip(compute(x.to("lazy")), compute(x), strict=True):
    assert got.dtype == expected.dtype and got.stride() == expected.stride()
    assert torch.equal(got.cpu(), expected), (got, expected)
print([name for name in torpor.metrics.counters() if name.startswith("fallback::")])
"""
    path = os.pathsep.join([str(tmp_path / "src"), installed["PYTHONPATH"]])
    assert run({**installed, "PYTHONPATH": path}, "-W", "error", "-c", program).strip() == "[]"


def _insert(file: Path, after: str, lines: Iterable[str]) -> None:
    before, found, rest = file.read_text(encoding="utf-8").partition(after + "\n")
    assert found
    file.write_text(before + found + "\n".join(lines) + "\n" + rest, encoding="utf-8")
