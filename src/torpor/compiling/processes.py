"""Low-priority Python processes that work in the background and are never waited for: one builds
the native library, one compiles graphs."""

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
"""Settings that such a process must not inherit."""

_STEP_ASIDE: Final = (
    "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0)) "
    "if hasattr(os, 'SCHED_IDLE') else os.nice(19); "
)
"""Runs only if a core is idle. With any other priority, it takes turns with the threads of a
parallel loop, all of which then wait for the thread that lost its turn: at nice 10, a program with
as many threads as cores ran 10 % slower. If the program never leaves a core idle, results come late
or never, so they are waited for where that pays (`worth`)."""

LEAVE: Final = "import os; os.fork() and os._exit(0); "
"""Code that continues in a detached process: its parent exits immediately."""


def interpreter() -> str | None:
    """The Python to start; None if Python is embedded in another program."""
    name = sys.executable or ""
    is_python = "python" in os.path.basename(name).lower() and not getattr(sys, "frozen", False)
    return name if is_python else None


def command(
    python: str, code: str, *arguments: str, detached: bool = False, idle: bool = True
) -> list[str]:
    """A command line that runs `code` at low priority, with this process's torpor and torch.

    `idle`: the program gains nothing from an early result.
    """
    before = LEAVE if detached else "import os; "
    aside = _STEP_ASIDE if idle else "os.nice(10); "
    if config.background_priority == "normal":
        aside = ""
    return [python, "-P", "-c", f"{before}{aside}{code}", *arguments]


def environment(more: Mapping[str, str]) -> dict[str, str]:
    """The environment variables of such a process."""
    own, torchs = Path(__file__).parents[2], Path(torch.__file__).parents[1]
    path = os.pathsep.join(dict.fromkeys([str(own), str(torchs), *_python_path()]))
    return {**os.environ, **_QUIET, "PYTHONPATH": path, **more}


def _python_path() -> list[str]:
    return [folder for folder in os.environ.get("PYTHONPATH", "").split(os.pathsep) if folder]


def step_back() -> None:
    """Make this process the first to be killed when memory runs out."""
    with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")
