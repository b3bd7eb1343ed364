"""``torpor new-backend NAME``: write a package with a working backend, to be made one's own."""

from __future__ import annotations

import argparse
import json
import keyword
import sys
from collections.abc import Iterator
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

import torpor

NAME = "new-backend"
HELP = "write an installable package with a working backend"
SUFFIX = ".txt"  # of every file of the skeleton: they are no modules of torpor's


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", metavar="NAME", help="of the backend: torpor.use('NAME')")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="folder to write to (default: torpor-NAME)"
    )
    parser.add_argument("--json", action="store_true", help="print the written files as JSON")


def run(arguments: argparse.Namespace) -> int:
    out = arguments.out or Path(f"torpor-{arguments.name}")
    problem = problem_with(arguments.name, out)
    if problem is not None:
        print(f"torpor new-backend: {problem}", file=sys.stderr)
        return 2
    try:
        written = write(arguments.name, out)
    except OSError as error:
        print(f"torpor new-backend: cannot write to {out}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps({"name": arguments.name, "out": str(out), "files": written}, indent=2))
    else:
        _show(arguments.name, out, written)
    return 0


def problem_with(name: str, out: Path) -> str | None:
    """Why no backend of that name can be written there; None if one can."""
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


def write(name: str, out: Path) -> list[str]:
    """Write the skeleton with its names filled in; the files, relative to `out`."""
    written = []
    for path, text in skeleton():
        target = Path(path.replace("NAME", name).removesuffix(SUFFIX))
        (out / target).parent.mkdir(parents=True, exist_ok=True)
        (out / target).write_text(_filled(text, name), encoding="utf-8")
        written.append(str(target))
    return sorted(written)


def skeleton() -> Iterator[tuple[str, str]]:
    """Every file of the skeleton: its path and its text."""
    yield from _files(resources.files("torpor.cli") / "skeleton", "")


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _files(item, f"{prefix}{item.name}/")
        elif item.name.endswith(SUFFIX):
            yield f"{prefix}{item.name}", item.read_text(encoding="utf-8")


def _filled(text: str, name: str) -> str:
    camel = "".join(part.capitalize() for part in name.split("_")) or name
    return text.replace("{{name}}", name).replace("{{Name}}", camel)


def _show(name: str, out: Path, written: list[str]) -> None:
    print(f"wrote {len(written)} files to {out}:")
    for path in written:
        print(f"  {path}")
    print("\nnext:")
    print(f"  pip install -e '{out}[test]'")
    print(f"  pytest {out}")
    print(f"  torpor conformance {name} --html report.html")
