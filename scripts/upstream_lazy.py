"""Run PyTorch's own tests of lazy tensors on torpor: python -m scripts.upstream_lazy CHECKOUT [...]

CHECKOUT is a checkout of PyTorch, of which `test/lazy` and `ts_native_functions.yaml` are read. In
copies of the tests `torpor.compat.torch_lazy` stands in the place of `torch._lazy`, and results may
be of a class derived from eager's, as lazy tensors are; nothing else is changed. What follows
CHECKOUT goes to pytest. docs/torch_lazy_names.md says what fails.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CHANGES = {
    "torch._lazy": "torpor.compat.torch_lazy",
    "self.assertEqual(type(a), type(b))": "self.assertIsInstance(a, type(b))",
}
LISTS = Path("aten/src/ATen/native/ts_native_functions.yaml")
TESTS = Path("test/lazy")
CONFTEST = """
import torch

import torpor.compat.torch_lazy

torch._lazy = torpor.compat.torch_lazy  # op_db asks for a step in the samples of random ops
"""


def main(argv: list[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    if not given or not (Path(given[0]) / TESTS).is_dir():
        print(__doc__, file=sys.stderr)
        return 2
    checkout, *options = given
    with tempfile.TemporaryDirectory() as folder:
        files = copy(Path(checkout), Path(folder))
        return max(_run(file, options) for file in files)


def copy(checkout: Path, folder: Path) -> list[Path]:
    """The tests with other imports, and the list of ops that one of them reads."""
    for path in (LISTS, TESTS):
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(checkout / LISTS, folder / LISTS)
    (folder / TESTS).mkdir()
    (folder / TESTS / "conftest.py").write_text(CONFTEST, encoding="utf-8")
    made = []
    for test in sorted((checkout / TESTS).glob("test_*.py")):
        text = test.read_text(encoding="utf-8")
        for theirs, ours in CHANGES.items():
            text = text.replace(theirs, ours)
        made.append(folder / TESTS / test.name)
        made[-1].write_text(text, encoding="utf-8")
    return made


def _run(file: Path, options: list[str]) -> int:
    """One file in a process of its own: some count what happens from the start."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=line",
               "-W", "default", "--rootdir", str(file.parent), *options, str(file)]  # fmt: skip
    path = os.pathsep.join([str(ROOT / "src"), os.environ.get("PYTHONPATH", "")])
    print(f"\n== {file.name} ==", flush=True)
    return subprocess.run(
        command, cwd=file.parent, env={**os.environ, "PYTHONPATH": path}
    ).returncode


if __name__ == "__main__":
    raise SystemExit(main())
