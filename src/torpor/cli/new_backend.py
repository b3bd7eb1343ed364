"""``torpor new-backend NAME``: writes a package with a working backend, as a starting point."""

from __future__ import annotations

import argparse
import json
import keyword
import sys
from pathlib import Path

import torpor
from torpor.codegen import files

NAME = "new-backend"
HELP = "generate an installable package with a working backend"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="name of the backend: torpor.use('NAME')")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to (default: torpor-NAME)"
    )
    parser.add_argument(
        "--buffers",
        choices=("torch", "own"),
        default="torch",
        help="the backend's data: torch tensors (default), or its own buffers",
    )
    parser.add_argument("--json", action="store_true", help="print the written files as JSON")


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or Path(f"torpor-{arguments.name}")
    problem = problem_with(arguments.name, out)
    if problem is not None:
        print(f"torpor new-backend: {problem}", file=sys.stderr)
        return 2
    try:
        written = write(arguments.name, out, arguments.buffers)
    except OSError as error:
        print(f"torpor new-backend: cannot write to {out}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"name": arguments.name, "out": str(out), "files": written}, indent=2))
    else:
        _show(arguments.name, out, written)
    return 0


def problem_with(name: str, out: Path) -> str | None:
    """Why a backend with that name cannot be written there; None if it can."""
    if not name.isidentifier() or not name.isascii() or keyword.iskeyword(name):
        return f"{name!r} is no Python identifier, and a backend's name is part of a module's"
    if name != name.lower():
        return f"{name!r} has capital letters; try {name.lower()!r}"
    if name in {known.partition(":")[0] for known in torpor.backends()}:
        return f"there is a backend {name!r} already; choose another name"
    if out.exists() and not out.is_dir():
        return f"{out} is a file"
    if out.is_dir() and any(out.iterdir()):
        return f"{out} is not empty; choose another folder with --out"
    return None


def write(name: str, out: Path, buffers: str = "torch") -> list[str]:
    """Write the skeleton with names filled in; returns the files, relative to `out`."""
    camel = "".join(part.capitalize() for part in name.split("_")) or name
    names = {"name": name, "Name": camel, "files": ""}
    made: dict[str, str] = {}
    if buffers == "own":
        what = "say what data are, and how they get in and out of torch"
        names["files"] = f"| `src/torpor_{name}/buffers.py` | {what} |\n"
    for folder in ("skeleton", "skeleton_own")[: 1 + (buffers == "own")]:
        made |= files.skeleton("torpor.cli", folder, names)
    return files.write(out, files.changes(out, made))


def _show(name: str, out: Path, written: list[str]) -> None:
    print(f"wrote {len(written)} files to {out}:")
    for path in written:
        print(f"  {path}")
    print("\nnext:")
    print(f"  pip install -e '{out}[test]'")
    print(f"  pytest {out}")
    print(f"  torpor conformance {name} --html report.html")
