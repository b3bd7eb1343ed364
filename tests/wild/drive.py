"""Programs, eagerly and then lazily, in a process that is as their users' are.

    python -m tests.wild.drive enable mnist vae [--backend reference] [--json]

The eager runs are made by a child that is forked before anything of torpor is imported; the lazy
runs are the process itself. What differs is printed, and the exit status is then 1. Several
programs in one process are like cells of a notebook: each finds what those before it left.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import torch

from tests.wild.placements import LAZY_PLACEMENTS, Placement, Program, find


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.backend:
        os.environ["TORPOR_BACKEND"] = options.backend
    programs = [find(name) for name in options.programs]
    importlib.import_module("torch._dynamo")  # as the first optimizer does: once for both runs
    with tempfile.TemporaryDirectory() as folder:
        expected = _eager(programs, Path(folder))
        different = 0
        if options.change_every:
            importlib.import_module("tests.forced").force(options.change_every)
        for report in _lazy(programs, options.way, Path(folder), expected):
            print(json.dumps(report) if options.json else _text(report), flush=True)
            different += bool(report["differences"])
    return 1 if different else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("way", choices=LAZY_PLACEMENTS)
    parser.add_argument("programs", nargs="+")
    parser.add_argument("--backend", default="", help="the default one unless given")
    parser.add_argument(
        "--change-every", type=int, default=0, help="steps after which it becomes eager, or lazy"
    )
    parser.add_argument("--json", action="store_true", help="a line of JSON for each program")
    return parser


def _text(report: dict[str, Any]) -> str:
    head = (
        f"{report['program']} {report['way']}: {'DIFFERS' if report['differences'] else 'ok'}, "
        f"eager {report['eager_s']:.1f} s, lazy {report['lazy_s']:.1f} s, "
        f"{report['compiled']} graphs compiled"
    )
    notes = [f"warned: {text}" for text in report["warnings"]]
    return "\n".join([head, *notes, *report["differences"]])


# -- the two runs ------------------------------------------------------------------------------


def _eager(programs: list[Program], folder: Path) -> dict[str, Any]:
    """What eager runs give, by a child that shares no state with the lazy ones."""
    file = folder / "expected.pt"
    child = os.fork()
    if not child:
        status = 1
        try:
            found = {
                p.name: _run(p, Placement("eager", _new(folder / f"eager-{p.name}")))
                for p in programs
            }
            torch.save(found, file)
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise SystemExit("a program fails eagerly")
    expected: dict[str, Any] = torch.load(file, weights_only=False)
    return expected


def _lazy(
    programs: list[Program], way: str, folder: Path, expected: dict[str, Any]
) -> Iterator[dict[str, Any]]:
    import torpor

    if way == "enable":
        torpor.enable()
    for program in programs:
        torpor.metrics.reset()
        begun = time.perf_counter()
        try:
            got = _run(program, Placement(way, _new(folder / f"{way}-{program.name}")))
            torpor.wait()
            differing = _differing(expected[program.name], got)
        except Exception:
            got = {"warnings": [], "seconds": time.perf_counter() - begun}
            differing = [traceback.format_exc()]
        yield {
            "program": program.name,
            "way": way,
            "differences": differing,
            "warnings": sorted(set(got["warnings"]) - set(expected[program.name]["warnings"])),
            "eager_s": round(expected[program.name]["seconds"], 2),
            "lazy_s": round(got["seconds"], 2),
            "compiled": torpor.metrics.counters().get("UncachedCompile", 0),
        }


def _differing(expected: dict[str, Any], got: dict[str, Any]) -> list[str]:
    import torpor
    from tests.wild.compare import differences

    exact = torpor.backend.get_backend().name == "reference"
    found = differences(expected["found"], torpor.eager(got["found"]), exact)
    return found + [text for text in got["warnings"] if "could not compile" in text]


def _run(program: Program, way: Placement) -> dict[str, Any]:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = program.run(way)
    found["generator"] = torch.get_rng_state()
    reported = [
        f"{w.category.__name__}: {w.message}".replace(str(way.folder), "FOLDER") for w in caught
    ]
    return {"found": found, "warnings": reported, "seconds": time.perf_counter() - begun}


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
