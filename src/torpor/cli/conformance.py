"""``torpor conformance NAME``: runs the conformance kit on a backend and shows its scorecard."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torpor.cli import terminal

if TYPE_CHECKING:
    from torpor.testing.run import Advance, Outcome
    from torpor.testing.scorecard import Scorecard

NAME = "conformance"
HELP = "run the conformance kit on a backend and show its scorecard"
SECTIONS = ("contract", "buffers", "laziness", "errors", "models", "operators")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("backend", metavar="NAME", help="a backend, or package.module:factory")
    parser.add_argument("--device", choices=("lazy", "concrete"), default="lazy")
    parser.add_argument(
        "--section", action="append", choices=SECTIONS, help="only this section (may be repeated)"
    )
    parser.add_argument("--ops", metavar="REGEX", default="", help="only these operators")
    parser.add_argument("--samples", type=int, default=3, help="samples per operator")
    parser.add_argument("--dtypes", default="float32", help="dtypes of the samples: float32,int64")
    parser.add_argument("--bit-exact", action="store_true", help="allow no difference from eager")
    parser.add_argument("--jobs", type=int, default=1, help="processes (needs pytest-xdist)")
    parser.add_argument(
        "--journal", metavar="FILE", help="log results as they arrive; resume an interrupted run"
    )
    parser.add_argument("--html", metavar="FILE", type=Path, help="write an HTML report")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    try:
        from torpor.testing.report import write_html
        from torpor.testing.run import run_kit
    except ModuleNotFoundError as error:
        print(f"the kit needs {error.name}: pip install 'torpor[testing]'", file=sys.stderr)
        return 2
    with _progress() as advance:
        outcome = run_kit(
            arguments.backend,
            *(f"test_{section}" for section in arguments.section or ()),
            device=arguments.device,
            options=_options(arguments),
            advance=advance,
        )
    if not outcome.card.points and not outcome.card.ops:
        print(outcome.output.strip(), file=sys.stderr)
        return 2
    if arguments.html:
        write_html(outcome.card, arguments.html)
    _show(arguments, outcome)
    return 0 if outcome.held else 1


def _options(arguments: argparse.Namespace) -> list[str]:
    options = ["--ops", arguments.ops, "--samples", str(arguments.samples)]
    options += ["--dtypes", arguments.dtypes]
    if arguments.bit_exact:
        options.append("--bit-exact")
    if arguments.journal:
        options += ["--journal", arguments.journal]
    if arguments.jobs > 1:
        options += ["-n", str(arguments.jobs)]
    return options


@contextmanager
def _progress() -> Iterator[Advance]:
    """A progress bar that starts when the number of tests is known."""
    bar: Any = None
    step: terminal.Advance | None = None

    def advance(total: int, status: str) -> None:
        nonlocal bar, step
        if step is None:
            bar = terminal.progress("tests", total)
            step = bar.__enter__()
        step(status[:60])

    try:
        yield advance
    finally:
        if bar is not None:
            bar.__exit__(None, None, None)


def _show(arguments: argparse.Namespace, outcome: Outcome) -> None:
    card = outcome.card
    if arguments.json:
        print(json.dumps(card.to_json(), indent=2))
        return
    terminal.heading(f"backend {card.backend} on {card.device}")
    _show_sections(card)
    _show_operators(card)
    for point in card.broken:
        print(f"broken: {point.section}: {point.name}\n{_last_line(point.detail)}")
    for result in card.wrong:
        print(f"wrong: {result.op}: {result.detail.splitlines()[0]}")
    if arguments.html:
        print(f"report: {arguments.html}")
    print("conforms" if outcome.held else "does not conform")


def _show_sections(card: Scorecard) -> None:
    rows = [
        (name, str(counts["held"]), str(counts["broken"]), str(counts["skipped"]))
        for name, counts in card.sections().items()
    ]
    if rows:
        terminal.table(("points", "held", "broken", "skipped"), rows)


def _show_operators(card: Scorecard) -> None:
    if card.ops:
        rows = [(status, str(number)) for status, number in card.statuses().items() if number]
        terminal.table(("operators", "number"), rows)
        if late := sum(card.falls_back_later(result) for result in card.ops):
            print(f"{late} of the native ones fall back in their backward")


def _last_line(text: str) -> str:
    lines = [line for line in text.splitlines() if line.startswith("E ")]
    return "\n".join(f"  {line[1:].strip()}" for line in lines[:3])
