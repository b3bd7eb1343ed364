"""Count the lines of src/torpor, package by package: ``python scripts/layout.py [--check]``.

Without arguments (`make layout`) it rewrites the tables between two comments of docs/layout.md.
With ``--check`` (`make check`) it writes nothing, and fails where

- the tables are out of date. Lines may be off by `DRIFT_LINES` or `DRIFT` (whichever is more),
  files by `DRIFT_FILES`: exact numbers would make every commit edit the page, and two branches
  conflict there; rounded ones still change whenever a count crosses a boundary. All other cells
  are exact.
- a limit is exceeded. Each has a `target` and what is `allowed` until the target is reached. What
  is counted may shrink and never grow above `allowed`: lower that number when it has shrunk.
- a target is reached and `allowed` is still above it: set it to the target, to stay there.

Lines are physical lines, with comments and blank ones. Hand-written are Python and C++; generated
text and the built page are counted apart from them.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "src" / "torpor"
PAGE = ROOT / "docs" / "layout.md"
BEGIN = "<!-- written by `make layout`: begin -->"
END = "<!-- written by `make layout`: end -->"

# All paths are relative to src/torpor; a folder stands for everything in it.
ENGINE = ("ir", "ops", "execute", "trace")
GENERATED_FOLDER = "_generated"
GENERATED_FILES = ("codegen/op_db.json",)
ASSETS = "debug/view/page"
ASSETS_PURPOSE = "The page of `torpor view`, built from `web/` by `make page`."
HAND_WRITTEN_SUFFIXES = (".py", ".pyi", ".h", ".cpp")
GENERATED_SUFFIXES = (".py", ".pyi", ".json", ".h", ".cpp")

DRIFT_LINES, DRIFT_FILES, DRIFT = 100, 2, 0.05


@dataclass(frozen=True)
class Limit:
    """How many lines something may have: `allowed` now, `target` in the end."""

    target: int
    allowed: int


ENGINE_LIMIT = Limit(target=4_500, allowed=4_500)
GENERATED_LIMIT = Limit(target=10_000, allowed=10_000)
HAND_WRITTEN_LIMIT = Limit(target=35_700, allowed=68_800)


@dataclass(frozen=True)
class File:
    path: PurePosixPath  # relative to src/torpor
    lines: int
    kind: str  # "hand-written", "generated" or "assets"


@dataclass(frozen=True)
class Row:
    """One line of the first table: a package, without the packages inside it."""

    name: str
    purpose: str
    files: int
    lines: int

    def __str__(self) -> str:
        return f"| {self.name} | {self.purpose} | {self.files:,} | {self.lines:,} |"


@dataclass(frozen=True)
class Count:
    """One line of the second table: something that has a limit."""

    name: str
    files: int
    lines: int
    limit: Limit

    def __str__(self) -> str:
        numbers = self.files, self.lines, self.limit.allowed, self.limit.target
        return f"| {self.name} | " + " | ".join(f"{number:,}" for number in numbers) + " |"

    def problem(self) -> str | None:
        """Why the check fails; None if it does not."""
        target, allowed = self.limit.target, self.limit.allowed
        if self.lines > allowed:
            return f"{self.name}: {self.lines:,} lines, {self.lines - allowed:,} more than allowed"
        if self.lines <= target < allowed:
            return f"{self.name}: the target is reached; set what is allowed to {target:,}"
        return None

    def summary(self) -> str:
        above = self.lines - self.limit.target
        state = f"{above:,} above" if above > 0 else "within"
        numbers = f"{self.lines:,} lines, allowed {self.limit.allowed:,}"
        return f"{self.name}: {numbers}; {state} the target of {self.limit.target:,}"


def files_of(package: Path = PACKAGE) -> list[File]:
    """Every counted file of a package, in order."""
    found = (p for p in sorted(package.rglob("*")) if p.is_file() and "__pycache__" not in p.parts)
    counted = []
    for file in found:
        path = PurePosixPath(file.relative_to(package).as_posix())
        if kind := _kind(path):
            counted.append(File(path, len(file.read_bytes().splitlines()), kind))
    return counted


def _kind(path: PurePosixPath) -> str | None:
    if _inside(path, [ASSETS]):
        return "assets"
    if GENERATED_FOLDER in path.parts or str(path) in GENERATED_FILES:
        return "generated" if path.suffix in GENERATED_SUFFIXES else None
    return "hand-written" if path.suffix in HAND_WRITTEN_SUFFIXES else None


def _inside(path: PurePosixPath, folders: Iterable[str]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)


def rows(files: Sequence[File], package: Path = PACKAGE) -> Iterator[Row]:
    """The hand-written packages, then generated text, then the built page."""
    by_package: dict[str, list[File]] = {}
    for file in (file for file in files if file.kind == "hand-written"):
        by_package.setdefault(_package_of(file.path, package), []).append(file)
    for name in sorted(by_package):
        init = package / name / "__init__.py"
        title = f"`{name}/`" if name != "." else f"`{package.name}`, modules outside a package"
        yield _row(title, first_sentence(init), by_package[name])
    generated = [file for file in files if file.kind == "generated"]
    yield _row("generated", "Written by `make codegen` and `scripts/op_db_ops.py`.", generated)
    assets = [file for file in files if file.kind == "assets"]
    yield _row(f"`{ASSETS}/`", ASSETS_PURPOSE, assets)


def _row(name: str, purpose: str, files: Sequence[File]) -> Row:
    return Row(name, purpose, len(files), sum(file.lines for file in files))


def _package_of(path: PurePosixPath, package: Path) -> str:
    """The innermost package a file is in: "." for torpor itself."""
    return next(str(p) for p in path.parents if (package / p / "__init__.py").exists())


def first_sentence(init: Path) -> str:
    """What a package is for, in the words of its docstring."""
    text = ast.get_docstring(ast.parse(init.read_text(encoding="utf-8")))
    if not text:
        raise SystemExit(f"{init}: a package needs a docstring: what is inside, who may import it")
    paragraph = " ".join(text.split("\n\n")[0].split())
    return re.split(r"(?<=\.) (?=[A-Z`])", paragraph)[0].replace("|", "\\|")


def counts(files: Sequence[File]) -> list[Count]:
    """What has a limit."""
    hand_written = [file for file in files if file.kind == "hand-written"]
    for part in ENGINE:
        if not any(_inside(file.path, [part]) for file in hand_written):
            raise SystemExit(f"scripts/layout.py: ENGINE names {part!r}, which is not there")
    engine = [file for file in hand_written if _inside(file.path, ENGINE)]
    generated = [file for file in files if file.kind == "generated"]
    parts = ", ".join(f"`{part}`" for part in ENGINE)
    return [
        _count(f"the engine ({parts})", engine, ENGINE_LIMIT),
        _count("generated text", generated, GENERATED_LIMIT),
        _count("hand-written, all", hand_written, HAND_WRITTEN_LIMIT),
    ]


def _count(name: str, files: Sequence[File], limit: Limit) -> Count:
    return Count(name, len(files), sum(file.lines for file in files), limit)


def tables(rows: Iterable[Row], counts: Iterable[Count]) -> str:
    """The text between the two comments."""
    first = ["| package | what it is for | files | lines |", "|---|---|--:|--:|", *map(str, rows)]
    head = "| limit | files | lines | allowed now | target |"
    second = [head, "|---|--:|--:|--:|--:|", *map(str, counts)]
    return "\n".join([BEGIN, *first, "", *second, END])


def with_tables(page: str, tables: str) -> str:
    """The page, with the text between its two comments replaced."""
    return page.replace(_tables_in(page), tables)


def _tables_in(page: str) -> str:
    begin, end = page.find(BEGIN), page.find(END)
    if begin < 0 or end < begin:
        raise SystemExit(f"{PAGE.relative_to(ROOT)} has lost its comments: {BEGIN} ... {END}")
    return page[begin : end + len(END)]


def out_of_date(page: str, tables: str) -> bool:
    """Whether the page says something else than the new tables, but for numbers that drifted."""
    old, new = _tables_in(page).splitlines(), tables.splitlines()
    return len(old) != len(new) or not all(_same_lines(old, new))


def _same_lines(old: Iterable[str], new: Iterable[str]) -> Iterator[bool]:
    columns: list[str] = []
    for was, now in zip(map(_cells, old), map(_cells, new), strict=True):
        columns = now if "lines" in now else columns  # the head of a table
        yield len(was) == len(now)
        yield from map(_same_cell, columns, was, now) if len(now) == len(columns) else [was == now]


def _cells(line: str) -> list[str]:
    return line.strip("| ").split(" | ")


def _same_cell(column: str, was: str, now: str) -> bool:
    if was == now or column not in ("files", "lines"):
        return was == now
    old, new = (int(number.replace(",", "")) for number in (was, now))
    drift = DRIFT_FILES if column == "files" else max(DRIFT_LINES, DRIFT * new)
    return abs(old - new) <= drift


def main(argv: Sequence[str]) -> int:
    files = files_of()
    counted = counts(files)
    page, new = PAGE.read_text(encoding="utf-8"), tables(rows(files), counted)
    for count in counted:
        print(count.summary())
    if not argv:
        PAGE.write_text(with_tables(page, new), encoding="utf-8")
        return 0
    problems = [problem for count in counted if (problem := count.problem())]
    if out_of_date(page, new):
        problems.append(f"{PAGE.relative_to(ROOT)} is out of date; run: make layout")
    for problem in problems:
        print(problem)
    return 1 if problems else 0


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--check"]):
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1:]))
