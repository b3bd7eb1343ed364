"""Tests that failed run once more, alone."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from scripts.pytest_again import MOST

ROOT = Path(__file__).parents[3]
PASSES_ALONE = """
import pathlib
def test_it():
    seen = pathlib.Path(__file__).with_suffix(".seen")
    was_here, _ = seen.exists(), seen.touch()
    assert was_here
"""


def _run(folder: Path, text: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    (folder / "test_sample.py").write_text(text)
    command = [sys.executable, "-m", "scripts.pytest_again", "-q", *arguments]
    command += ["-c", "/dev/null", "--rootdir", str(folder), str(folder)]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [(), ("-n", "2")])
def test_a_test_that_passes_alone_is_named(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    run = _run(tmp_path, PASSES_ALONE, *arguments)
    assert run.returncode == 0, run.stdout
    assert "FLAKY, failed once and passed alone: test_sample.py::test_it" in run.stdout


def test_a_test_that_fails_twice_fails(tmp_path: Path) -> None:
    run = _run(tmp_path, "def test_it(): assert False\ndef test_other(): pass\n")
    assert run.returncode == 1
    assert "FLAKY" not in run.stdout
    assert "1 failed, 1 passed" in run.stdout
    assert "1 failed in" in run.stdout  # the second run: only what failed


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    run = _run(tmp_path, "\n".join(f"def test_{n}(): assert False" for n in range(MOST + 1)))
    assert run.returncode == 1
    assert "again" not in run.stdout


def test_passing_tests_and_other_exits_are_left_alone(tmp_path: Path) -> None:
    assert _run(tmp_path, "def test_it(): pass\n").returncode == 0
    assert _run(tmp_path, "").returncode == 5  # pytest's status for no tests


def test_a_worker_that_crashes_is_run_again(tmp_path: Path) -> None:
    crash = PASSES_ALONE.replace("assert was_here", "was_here or __import__('os')._exit(3)")
    run = _run(tmp_path, crash, "-n", "2")
    assert run.returncode == 0, run.stdout
    assert "FLAKY" in run.stdout
