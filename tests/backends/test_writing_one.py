"""The page about writing a backend is true: its commands run, and its smallest backend conforms."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torpor
from tests.api.test_docs import blocks
from torpor.backend import Backend

PAGE = Path(__file__).resolve().parents[2] / "docs" / "backends" / "writing-one.md"
SOURCE = Path(torpor.__file__).resolve().parents[1]
SECTIONS = ("contract", "buffers", "laziness", "errors", "models")


def commands() -> list[str]:
    found = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    return [line for block in found for line in block.splitlines()]


def environment(folder: Path) -> dict[str, str]:
    """One in which `pip install` goes to a folder of its own and needs nothing from outside."""
    return {
        **os.environ,
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        "PYTHONPATH": os.pathsep.join([str(folder / "site"), str(folder), str(SOURCE)]),
        "OMP_NUM_THREADS": "1",
        "PIP_TARGET": str(folder / "site"),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        "PIP_NO_BUILD_ISOLATION": "false",  # pip reads this one the wrong way round
        "PIP_DISABLE_PIP_VERSION_CHECK": "1",
    }


def run(folder: Path, *command: str) -> str:
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=folder, env=environment(folder), timeout=500
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
    return done.stdout


def test_the_smallest_backend_is_under_30_lines_and_conforms(tmp_path: Path) -> None:
    code = blocks(PAGE)[0][0]
    assert len(code.splitlines()) < 30
    (tmp_path / "smallest_backend.py").write_text(code)
    kit = [f"torpor.testing.test_{section}" for section in SECTIONS]
    reported = run(
        tmp_path, sys.executable, "-m", "pytest", "-q", "-p", "torpor.testing.plugin",
        "--pyargs", *kit, "--backend", "smallest_backend:Smallest",
    )  # fmt: skip
    held = re.findall(r"^(\w+) +(\d+) of (\d+) points held", reported, re.MULTILINE)
    assert [section for section, _, _ in held] == list(SECTIONS)
    assert all(int(one) == int(other) > 0 for _, one, other in held)


def test_the_commands_of_the_page_run_one_after_the_other(tmp_path: Path) -> None:
    lines = commands()
    assert [line.split()[0] for line in lines] == ["torpor", "pip", "torpor", "pytest", "torpor"]
    outputs = [run(tmp_path, "bash", "-c", line) for line in lines]
    assert re.search(r"acme\s+available", outputs[2])
    assert re.search(r"contract +(\d+) of \1 points held", outputs[3])
    assert "conforms" in outputs[4].splitlines()[-1]
    report = (tmp_path / "report.html").read_text(encoding="utf-8")
    assert "acme" in report
    assert not re.search(r'(?:src|href)="(?!#)', report), "the report needs something from outside"


@pytest.mark.parametrize("name", sorted(n for n in vars(Backend) if not n.startswith("_")))
def test_every_method_of_the_interface_is_on_the_page(name: str) -> None:
    assert f"`{name}" in PAGE.read_text() or f"`{name}`" in PAGE.read_text()
