"""Shared by commands: tables and progress bars, with rich or in plain text."""

from __future__ import annotations

import argparse
import importlib
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

try:
    import rich.box
    import rich.console
    import rich.progress
    import rich.table
    import rich.text

    HAVE_RICH = True
except ImportError:
    HAVE_RICH = False

Advance = Callable[[str], None]  # called after each step, with a status text
Row = Sequence[str]
_NONE = ("", "–")  # for a missing number
_NUMBER = re.compile(r"[-+±<>≤]?\s?\d")  # matches the start of a numeric cell


def add_import_argument(parser: argparse.ArgumentParser) -> None:
    """Add `--import`, for commands that may need third-party ops or backends."""
    parser.add_argument(
        "--import", metavar="MODULE", action="append", default=[], dest="modules",
        help="import this module first; it defines ops or a backend",
    )  # fmt: skip


def import_modules(arguments: argparse.Namespace) -> None:
    """Import the modules given by `--import`."""
    for module in arguments.modules:
        importlib.import_module(module)


def heading(text: str) -> None:
    if HAVE_RICH:
        rich.console.Console(highlight=False).print(f"\n[bold]{text}[/bold]")
    else:
        print(f"\n{text}")


def paragraphs(texts: Sequence[str]) -> None:
    """Print texts, wrapped to the terminal's width with a hanging indent."""
    width = min(shutil.get_terminal_size().columns, 100)
    for text in texts:
        print(textwrap.fill(text, width, subsequent_indent="  ", break_long_words=False))


def table(columns: Row, rows: Sequence[Row]) -> None:
    """Print a table; numeric columns are right-aligned."""
    if HAVE_RICH:
        _rich_table(columns, rows)
    else:
        print(plain_table(columns, rows))


def plain_table(columns: Row, rows: Sequence[Row]) -> str:
    widths = [max(map(len, cells)) for cells in zip(columns, *rows)]
    right = _right_aligned(rows) or [False] * len(columns)
    lines = (columns, ["-" * width for width in widths], *rows)
    return "\n".join(_plain_row(row, widths, right) for row in lines)


def _plain_row(row: Row, widths: Sequence[int], right: Sequence[bool]) -> str:
    cells = zip(row, widths, right, strict=True)
    return "  ".join(c.rjust(w) if at_right else c.ljust(w) for c, w, at_right in cells).rstrip()


def _right_aligned(rows: Sequence[Row]) -> list[bool]:
    """For each column, whether it is numeric, ignoring missing numbers."""
    columns = zip(*rows, strict=True)
    return [all(_NUMBER.match(cell) for cell in cells if cell not in _NONE) for cells in columns]


def _rich_table(columns: Row, rows: Sequence[Row]) -> None:
    drawn = rich.table.Table(box=rich.box.SIMPLE, pad_edge=False)
    right = _right_aligned(rows) or [False] * len(columns)
    for i, column in enumerate(columns):
        drawn.add_column(column, justify="right" if right[i] else "left", no_wrap=True)
    for row in rows:
        drawn.add_row(*map(rich.text.Text, row))
    console = rich.console.Console(highlight=False)
    plain = plain_table(columns, rows)
    if len(plain.splitlines()[1]) + 2 * len(columns) < console.width:
        console.print(drawn)
    else:  # rich would truncate cells
        print(plain)


@contextmanager
def progress(label: str, total: int) -> Iterator[Advance]:
    """A progress bar on stderr, so that stdout stays machine-readable."""
    bar = _rich_bar if HAVE_RICH and sys.stderr.isatty() else _plain_bar
    with bar(label, total) as advance:
        yield advance


@contextmanager
def _rich_bar(label: str, total: int) -> Iterator[Advance]:
    columns = (
        rich.progress.TextColumn("{task.description:<9}"),
        rich.progress.BarColumn(),
        rich.progress.MofNCompleteColumn(),
        rich.progress.TextColumn("{task.fields[status]}"),
        rich.progress.TimeElapsedColumn(),
    )
    console = rich.console.Console(file=sys.stderr)  # fixed now, in case it is redirected later
    with rich.progress.Progress(*columns, console=console) as bars:
        task = bars.add_task(label, total=total, status="")
        yield lambda status: bars.update(task, advance=1, status=status)


@contextmanager
def _plain_bar(label: str, total: int) -> Iterator[Advance]:
    """On a terminal one line is redrawn; in a log a line is printed for every quarter."""
    stream, redraw = sys.stderr, sys.stderr.isatty()
    done = 0

    def advance(status: str) -> None:
        nonlocal done
        done += 1
        if not redraw and done * 4 // total == (done - 1) * 4 // total:
            return
        filled = 30 * done // total
        bar = "#" * filled + "." * (30 - filled)
        start, end = ("\r", "") if redraw else ("", "\n")
        line = f"{start}{label:<9} [{bar}] {done}/{total}  {status}"
        print(line, end=end, file=stream, flush=True)

    yield advance
    if redraw:
        print(file=stream)
