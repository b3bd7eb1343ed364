"""Python processes that work for the program while it goes on: of low priority, and never waited
for. The native library is built in one, and graphs are compiled in one."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import torch

from torpor import config

_QUIET: Final = {"TORPOR_NATIVE": "off", "TORPOR_VIEW": "0", "TORPOR_EXPLAIN": "0"}
"""Settings that are the program's own affair."""

_STEP_ASIDE: Final = (
    "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)) "
    "if hasattr(os, 'SCHED_IDLE') else os.nice(19); "
)
"""Run when a core has nothing else to do. Any other priority takes turns with the threads of a
parallel loop, all of which wait for the one whose turn it is not: at nice 10, a program with as
many threads as cores ran 10 % slower. What comes of it only when the program stops is late; it is
waited for where that pays (`worth`)."""

LEAVE: Final = "import os; os.fork() and os._exit(0); "
"""Code that leaves the rest to a process nobody has to wait for: its parent ends at once."""


def interpreter() -> str | None:
    """The Python to start; None inside another program, whose executable would start that."""
    name = sys.executable or ""
    is_python = "python" in os.path.basename(name).lower() and not getattr(sys, "frozen", False)
    return name if is_python else None


def command(
    python: str, code: str, *arguments: str, detached: bool = False, idle: bool = True
) -> list[str]:
    """Runs `code`, which finds torpor and torch as this process did, at low priority.

    `idle`: the program has nothing to gain by it soon.
    """
    before = LEAVE if detached else "import os; "
    aside = _STEP_ASIDE if idle else "os.nice(10); "
    if config.background_priority == "normal":
        aside = ""
    return [python, "-P", "-c", f"{before}{aside}{code}", *arguments]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The variables of such a process."""
    own, torchs = Path(__file__).parents[2], Path(torch.__file__).parents[1]
    path = os.pathsep.join(dict.fromkeys([str(own), str(torchs), *_python_path()]))
    return {**os.environ, **_QUIET, "PYTHONPATH": path, **more}


def _python_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def step_back() -> None:
    """Let this process be the first to go if memory gets short."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
