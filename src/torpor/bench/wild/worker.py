"""Runs one program with one runner, in a process of its own: `worker SETTINGS`, which is JSON.

The clock starts when torch is loaded, so it includes torpor's startup time.
"""

from __future__ import annotations

import json
import sys
import time
import traceback
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from torpor.bench import bare

START = time.perf_counter()


def _torpor() -> dict[str, Any]:
    """What a program's author adds (two lines), and the benchmark's hooks."""
    bare.forget()
    torpor = import_module("torpor")
    torpor.enable()
    counters = torpor.metrics.counters
    return {"finish": torpor.wait, "compiled_runs": lambda: counters().get("CachedCompile", 0)}


def _loop_options(runner: str) -> dict[str, Any]:
    if runner == "torpor":
        return _torpor()
    return {"compile": torch.compile} if runner == "compile" else {}


def _compiles_and_graphs(runner: str) -> tuple[int, int]:
    if runner == "torpor":
        counters = import_module("torpor").metrics.counters()
        return counters.get("UncachedCompile", 0), import_module("torpor.execute.sync").PLANS.serial
    graphs = import_module("torpor._torch").dynamo_graphs() if runner == "compile" else 0
    return graphs, graphs


def run(runner: str, program: str, steps: int, folder: str, most_s: float) -> dict[str, Any]:
    """Run the program; returns all measurements."""
    options = _loop_options(runner)
    loops = import_module("torpor.bench.wild.loop")
    loop = loops.Loop(steps, Path(folder), most_s=most_s, start=START, **options)
    error = ""
    try:
        import_module("torpor.bench.wild.programs").find(program).load()(loop)
    except loops.LoopEnded:
        pass
    except Exception as failure:
        traceback.print_exc()
        error = import_module("torpor.bench.worker").one_line(failure)
    compiles, graphs = _compiles_and_graphs(runner)
    return {
        "marks": [vars(mark) for mark in loop.marks], "losses": loop.losses, "steps": loop.done,
        "memory": import_module("torpor.bench.worker").peak("cpu"), "start": START,
        "compiles": compiles, "graphs": graphs, "error": error,
    }  # fmt: skip


def main() -> None:
    """Run as told by the settings, which contain the path for the answer."""
    settings = json.loads(sys.argv[1])
    answer = Path(settings.pop("answer"))
    found = run(**settings)
    answer.write_text(json.dumps(found))
    sys.exit(bool(found["error"]))


if __name__ == "__main__":
    main()
