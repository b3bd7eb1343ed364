"""Runs a module of this package in a process where torpor itself is not loaded.

`python -P bare.py torpor.bench.worker ARGS`. torpor hooks into `nn.Module.__call__` and registers
kernels for torch's dispatch key `Lazy`; a process that measures eager, torch.compile or torch._lazy
must not load it. Here `torpor` is a package object with the same path, whose `__init__` has not
run.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import ModuleType


def forget() -> None:
    """Make `import torpor` import the real package."""
    for name in [name for name in sys.modules if name.split(".")[0] == "torpor"]:
        del sys.modules[name]


def main() -> None:
    """Run the module named by the first argument, with the rest as its arguments."""
    package = ModuleType("torpor")
    package.__path__ = [str(Path(__file__).resolve().parents[1])]
    sys.modules["torpor"] = package
    del sys.argv[0]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
