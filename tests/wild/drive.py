"""One program, eagerly and then lazily, in a process that is as its users' are.

    python -m tests.wild.drive mnist enable [--backend reference] [--json]

The eager run is made by a child that is forked before anything of torpor is imported; the lazy run
is the process itself. What differs is printed, one line each, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
import warnings
from pathlib import Path
from typing import Any

import numpy
import torch
import torch._dynamo  # what the first optimizer imports, once for both runs

from tests.wild.ways import LAZY_WAYS, Program, Way, find


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    if options.backend:
        os.environ["TORPOR_BACKEND"] = options.backend
    program = find(options.program)
    with tempfile.TemporaryDirectory() as folder:
        expected = _eager(program, Path(folder))
        report = _lazy(program, options.way, Path(folder), expected)
    print(json.dumps(report) if options.json else _text(report))
    return 1 if report["differences"] else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("program")
    parser.add_argument("way", choices=LAZY_WAYS)
    parser.add_argument("--backend", default="", help="the default one unless given")
    parser.add_argument("--json", action="store_true")
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


def _eager(program: Program, folder: Path) -> dict[str, Any]:
    """What an eager run gives, by a child that shares no state with the lazy run."""
    file = folder / "expected.pt"
    child = os.fork()
    if not child:
        status = 1
        try:
            torch.save(_run(program, Way("eager", _new(folder / "eager"))), file)
            status = 0
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    if os.waitpid(child, 0)[1]:
        raise SystemExit(f"{program.name} fails eagerly")
    found: dict[str, Any] = torch.load(file, weights_only=False)
    return found


def _lazy(program: Program, way: str, folder: Path, expected: dict[str, Any]) -> dict[str, Any]:
    import torpor
    from tests.wild.compare import differences

    if way == "enable":
        torpor.enable()
    got = _run(program, Way(way, _new(folder / way)))
    torpor.wait()
    torpor.disable()
    counters = torpor.metrics.counters()
    exact = torpor.backend.get_backend().name == "reference"
    found = differences(expected["found"], torpor.eager(got["found"]), exact)
    if counters.get("CompileFailed"):
        found.append(f"{counters['CompileFailed']} graphs could not be compiled")
    return {
        "program": program.name,
        "way": way,
        "differences": found,
        "warnings": sorted(set(got["warnings"]) - set(expected["warnings"])),
        "eager_s": expected["seconds"],
        "lazy_s": got["seconds"],
        "compiled": counters.get("UncachedCompile", 0),
    }


def _run(program: Program, way: Way) -> dict[str, Any]:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(0)
    begun = time.perf_counter()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = program.run(way)
    found["generator"] = torch.get_rng_state()
    kinds = [f"{w.category.__name__}: {w.message}".replace(str(way.folder), "FOLDER") for w in caught]
    return {
        "found": found,
        "warnings": kinds,
        "seconds": time.perf_counter() - begun,
    }


def _new(folder: Path) -> Path:
    folder.mkdir()
    return folder


if __name__ == "__main__":
    sys.exit(main())
