"""The pages under docs/ are true: their code runs, shows what they say, and no link is dead."""

import doctest
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import torpor

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
EXECUTED = [
    "docs/walk.md",
    "docs/explain.md",
    "docs/replay.md",
    "docs/backends/writing-one.md",
    "docs/codegen.md",
    "README.md",
]
DEFAULTS = {
    "docs/walk.md": {"TORPOR_NATIVE": "on"},
    "README.md": {"TORPOR_BACKEND": "", "TORPOR_CACHE": "1"},
}
"""Pages that show what is installed: tests switch it off for themselves. A cache is empty."""
END_OF_BLOCK = "=== end of a block ==="

FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")


def blocks(page: Path) -> list[tuple[str, str | None]]:
    """Every Python block of a page, with the output block that follows it at once, if one does."""
    text = page.read_text(encoding="utf-8")
    found: list[tuple[str, str | None]] = []
    end_of_code = -1
    for fence in FENCE.finditer(text):
        language, body = fence.groups()
        if language == "python":
            found.append((body, None))
            end_of_code = fence.end()
        elif language == "text" and not text[end_of_code : fence.start()].strip():
            found[-1] = (found[-1][0], body)
    return found


def run(script: Path, **variables: str) -> str:
    """What a script prints in a process of its own: nodes keep the line that made them first."""
    source = Path(torpor.__file__).resolve().parents[1]
    path = os.pathsep.join(filter(None, [str(source), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        capture_output=True,
        text=True,
        env=environment,
        cwd=script.parent,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.parametrize("name", EXECUTED)
def test_python_blocks_of_a_page_run_in_order_and_print_what_it_shows(name, tmp_path):
    page = ROOT / name
    pairs = blocks(page)
    # One line between two blocks, as a reader who copies them into one file has it.
    script = tmp_path / f"{page.stem.lower()}.py"
    script.write_text("".join(f"{code}print({END_OF_BLOCK!r})\n" for code, _ in pairs))
    own = DEFAULTS.get(name, {})
    if "TORPOR_CACHE" in own:
        own = {**own, "TORPOR_CACHE_DIR": str(tmp_path / "cache")}
    printed = run(script, **own).split(f"{END_OF_BLOCK}\n")[:-1]
    assert len(printed) == len(pairs)
    for (code, shown), got in zip(pairs, printed, strict=True):
        if shown is not None:
            assert_shown(shown, got, code)


def assert_shown(shown: str, got: str, code: str) -> None:
    """`...` on a page stands for anything."""
    checker, flags = doctest.OutputChecker(), doctest.ELLIPSIS
    if not checker.check_output(shown, got, flags):
        difference = checker.output_difference(doctest.Example(code, shown), got, flags)
        pytest.fail(f"{code}\n{difference}")


def test_the_walk_shows_outputs():
    assert sum(shown is not None for _, shown in blocks(ROOT / "docs/walk.md")) >= 5


def test_the_essay_runs_and_is_under_500_lines(tmp_path):
    essay = ROOT / "docs/from_scratch.py"
    assert len(essay.read_text(encoding="utf-8").splitlines()) < 500
    assert "everything equals eager" in run(essay)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_of_a_page_is_dead(page):
    prose = FENCE.sub("", page.read_text(encoding="utf-8"))
    links = [link for link in LINK.findall(prose) if "://" not in link]
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_files_a_page_names_exist(page):
    named = re.findall(r"`((?:src|tests|docs|scripts|benchmarks)/[\w/.]+)`", page.read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []
