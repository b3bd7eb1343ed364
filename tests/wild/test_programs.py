"""Programs as people write them give what eager gives, in the configuration people install.

In `make test`: every program under `enable()` with nothing else set, the programs of a module in
one process, and a third of them on the reference backend, bit for bit; all of them there while they
change between eager and recorded. In `make sweep-wild`: each
program alone, in every way that makes sense, on both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.wild.placements import MODULES, named, placements_of

ROOT = Path(__file__).resolve().parents[2]
SETTINGS = ("BACKEND", "CACHE", "COMPILE_AFTER", "DYNAMIC", "STRICT", "TEST_DEFAULTS")
"""What other tests set for the processes they start; here everything is as it is by default."""

NEEDS = {
    "hf_trainer": ("transformers", "accelerate"),
    "hf_bert": ("transformers",),
    "accelerated": ("accelerate",),
    "lightning": ("pytorch_lightning",),
    "tensorboard": ("tensorboard",),
}
"""What is not installed everywhere."""

EXACT = [name for module in MODULES for name in named(module)[::3]]
ALONE = [(name, way) for module in MODULES for name in named(module) for way in placements_of(name)]


def drive(way: str, names: list[str], backend: str, folder: Path, *options: str) -> None:
    """Run programs in a process of their own; all that differs is the assertion's message."""
    names = [name for name in names if all(map(find_spec, NEEDS.get(name, ())))]
    if not names:
        pytest.skip("the libraries that these programs use are not installed")
    command = [sys.executable, "-m", "tests.wild.drive", way, *names, "--json", *options]
    done = subprocess.run(
        [*command, *(["--backend", backend] if backend else [])], cwd=ROOT, text=True,
        env=_environment(folder, backend), capture_output=True, check=False,
    )  # fmt: skip
    reports = [
        json.loads(line) for line in done.stdout.splitlines() if line.startswith('{"program')
    ]
    wrong = [f"{r['program']}: {text}" for r in reports for text in r["differences"]]
    missing = set(names) - {r["program"] for r in reports}
    assert not missing, f"{sorted(missing)} did not end: {done.returncode}\n{done.stderr[-4000:]}"
    assert not wrong, "\n".join(wrong)


def _environment(folder: Path, backend: str) -> dict[str, str]:
    """Everything by default and the native library; on the judge without that."""
    unset = {"OMP_NUM_THREADS", "MKL_NUM_THREADS", *(f"TORPOR_{name}" for name in SETTINGS)}
    kept = {name: value for name, value in os.environ.items() if name not in unset}
    folder = Path(kept.get("TORPOR_WILD_CACHE", folder))
    kept.update(TORPOR_CACHE_DIR=str(folder), TORPOR_NATIVE="off" if backend else "on")
    kept.update(TORPOR_COMPILE_AFTER="4")  # as if they ran long enough for compiles to pay
    path = os.pathsep.join((str(ROOT / "src"), str(ROOT), kept.get("PYTHONPATH", "")))
    kept.setdefault("TORCHINDUCTOR_CACHE_DIR", str(folder / "inductor"))
    kept.setdefault("TORPOR_FAILURES_DIR", str(folder / "failures"))
    return {**kept, "PYTHONPATH": path}


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compiled graphs are kept, as they are for users, but not among theirs."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("module", [m for m in MODULES if m != "programs_ranks"])
def test_programs_that_become_eager_and_lazy_all_the_time_give_eagers_bits(
    module: str, cache: Path
) -> None:
    names = [n for n in named(module) if "enable" in placements_of(n)]
    drive("enable", names, "reference", cache, "--change-every", "2")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("module", MODULES)
def test_programs_give_eagers_numbers_under_enable(module: str, cache: Path) -> None:
    drive("enable", [n for n in named(module) if "enable" in placements_of(n)], "", cache)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("half", [0, 1])
def test_a_third_of_the_programs_gives_eagers_bits_on_reference(half: int, cache: Path) -> None:
    drive("enable", EXACT[half::2], "reference", cache)


@pytest.mark.sweep
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("backend", ["", "reference"], ids=["default", "reference"])
@pytest.mark.parametrize(("name", "way"), ALONE)
def test_a_program_alone(name: str, way: str, backend: str, cache: Path) -> None:
    drive(way, [name], backend, cache)
