"""The stub of `torpor.ops.nodes`: what codegen's model says of every op, and what checkers read."""

from __future__ import annotations

import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

import torpor
from torpor.codegen import own_ops, stubs
from torpor.codegen.emit_nodes import node_class
from torpor.codegen.model import LazyIrSchema
from torpor.codegen.torch_schemas import schemas, target_of
from torpor.ops import nodes

NODES = "torpor-stubs/ops/nodes.pyi"


def test_classes_have_the_names_and_ops_of_native_functions_yaml() -> None:
    named = {schema.class_name: schema.name for schema in own_ops.nodes()}
    assert len(named) == len(own_ops.nodes()) > 2500
    assert {name: nodes.OPS.get(name) for name in named} == named
    beyond = set(nodes.OPS.values()) - set(named.values())
    assert not beyond & set(schemas())  # ops that torch defines elsewhere


def test_the_stub_of_every_class_is_that_of_native_functions_yaml() -> None:
    for schema in own_ops.nodes():
        printed = LazyIrSchema.parse(str(target_of(schema)._schema))
        reported, read = node_class(printed).splitlines(), node_class(schema).splitlines()
        assert reported[1:] == read[1:]
        assert reported[0].partition("  #")[0] == read[0].partition("  #")[0]


def test_every_class_is_in_the_stub_once() -> None:
    found = re.findall(r"^class (\w+)\(TypedNode\):", stubs.files()[NODES], re.MULTILINE)
    assert sorted(found) == sorted(nodes.OPS)


PROGRAM = """\
from torpor.ir.node import Value
from torpor.ops.nodes import AddTensor, Cat

def next_dim(node: Cat) -> str:
    return f"{node.dim + 1}"

def good(x: Value) -> str:
    return next_dim(Cat.create([AddTensor.create(x, x, alpha=2).outputs[0]], dim=1))

def bad(x: Value) -> object:
    return AddTensor.create(x, x, alpha='two')
"""
SETTINGS = """\
[mypy]
strict = true
cache_dir = cache
[mypy-torch.*]
ignore_missing_imports = true
"""


def test_type_checkers_find_the_stub_among_the_installed_packages(tmp_path: Path) -> None:
    """Without it every name and every argument is accepted."""
    pytest.importorskip("mypy", reason="mypy is not installed")
    site = installed_torpor(tmp_path / "environment")
    program = tmp_path / "program.py"
    program.write_text(PROGRAM, encoding="utf-8")
    assert errors_in(program, tmp_path) == []
    stubs.write(site)
    (error,) = errors_in(program, tmp_path)
    assert error.startswith('program.py:11: error: Argument "alpha" to "create" of "AddTensor" has')
    assert errors_in(site / NODES, tmp_path) == []


def installed_torpor(folder: Path) -> Path:
    """Make an environment in which torpor is installed as an editable package."""
    venv.create(folder, symlinks=True)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(folder)}))
    (site / "torpor.pth").write_text(str(Path(torpor.__file__).resolve().parents[1]))
    return site


def errors_in(file: Path, folder: Path) -> list[str]:
    """What mypy says of a file in the environment in `folder`."""
    (folder / "mypy.ini").write_text(SETTINGS, encoding="utf-8")
    python = Path(sysconfig.get_path("scripts", "venv", {"base": "environment"})) / "python"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--python-executable", str(python), str(file)],
        capture_output=True, text=True, cwd=folder, timeout=600,
    )  # fmt: skip
    assert "checked 1 source file" in done.stdout or "no issues found" in done.stdout, done
    return [line for line in done.stdout.splitlines() if "error:" in line]
