"""``torpor replay FILE``: replays a record file on any backend, and finds a wrong node."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torpor.cli import terminal
from torpor.cli.terminal import add_import_argument, import_modules
from torpor.debug.plain_text import printable

if TYPE_CHECKING:
    from torpor.debug.bisect import Fault
    from torpor.debug.replay import Replay

NAME = "replay"
HELP = "replay a torpor.record file, compare the results, find the op that is wrong"
ERRORS = (RuntimeError, IndexError, TypeError, ValueError, ImportError)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "files", metavar="FILE", nargs="+",
        help="a file written by torpor.record; files of all ranks of a run are replayed together",
    )  # fmt: skip
    parser.add_argument(
        "--backend", metavar="NAME", help="a backend, or package.module:factory (default: recorded)"
    )
    parser.add_argument("--graph", metavar="N", type=int, help="only the graph that ran N-th")
    parser.add_argument(
        "--bisect",
        metavar="NAME",
        nargs="+",
        help="A B: find the first node at which B differs from A (A: --backend or reference)",
    )
    parser.add_argument(
        "--out", metavar="FILE.py", type=Path, help="where --bisect writes the reproduction"
    )
    parser.add_argument(
        "--no-data", action="store_true", help="use random data generated from the statistics"
    )
    parser.add_argument(
        "--allow", metavar="NAMESPACE", action="append", default=[], help="also run its ops"
    )
    add_import_argument(parser)
    parser.add_argument(
        "--trust", action="store_true",
        help="the file is your own: also run ops that do not check all of their arguments",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    import_modules(arguments)
    if len(arguments.files) > 1:
        return _together(arguments)
    return _bisect(arguments) if arguments.bisect else _replay(arguments)


def _replay(arguments: argparse.Namespace) -> int:
    from torpor.debug.load import open_record
    from torpor.debug.replay import chosen, replay_record

    data = not arguments.no_data
    with open_record(arguments.files[0], arguments.allow, arguments.trust) as record:
        runs = chosen(record, arguments.graph)
        with terminal.progress("runs", max(len(runs), 1)) as advance:
            report = replay_record(record, arguments.backend, runs, data, advance)
    if arguments.json:
        print(json.dumps(report.to_json(), indent=2))
    else:
        _show(report, arguments.modules)
    return 0 if report.ok else 1


def _together(arguments: argparse.Namespace) -> int:
    from torpor.debug.load import open_record
    from torpor.debug.replay_ranks import replay_ranks

    if arguments.bisect or arguments.no_data or arguments.graph is not None:
        raise ValueError("--bisect, --graph and --no-data are for one file")
    with ExitStack() as opened:
        records = [
            opened.enter_context(open_record(file, arguments.allow, arguments.trust))
            for file in arguments.files
        ]
        runs = sum(len(record.runs) for record in records)
        with terminal.progress("runs", max(runs, 1)) as advance:
            reports = replay_ranks(records, arguments.backend, advance)
    if arguments.json:
        print(json.dumps([report.to_json() for report in reports], indent=2))
    else:
        for report in reports:
            _show(report, arguments.modules)
    return 0 if all(report.ok for report in reports) else 1


def _show(report: Replay, modules: Sequence[str]) -> None:
    terminal.heading(f"{report.path} on {report.backend}")
    for note in report.notes:
        print(printable(note))
    rows = [
        (str(run.number), str(len(run.graph)), str(len(run.results)), run.kind, run.against)
        for run in report.runs
    ]
    if rows:
        terminal.table(("run", "nodes", "results", "verdict", "against"), rows)
    for run in report.runs:
        if "\n" in str(run):
            print(printable(str(run)))
    if not report.ok:
        imports = "".join(f" --import {module}" for module in modules)
        print(f"find the node: torpor replay FILE{imports} --bisect reference {report.backend}")


def _bisect(arguments: argparse.Namespace) -> int:
    from torpor.debug.load import open_record
    from torpor.debug.replay import bisect_record

    trusted, suspect = _names(arguments)
    with open_record(arguments.files[0], arguments.allow, arguments.trust) as record:
        runs = len(record.runs) if arguments.graph is None else 1
        found: Fault | None = None
        number = -1
        with terminal.progress("runs", max(runs, 1)) as advance:
            for run, found in bisect_record(
                record, trusted, suspect, arguments.graph, not arguments.no_data
            ):
                number = run.number
                advance(f"run {number}")
                if found is not None:
                    break
    if found is None:
        return _agreed(arguments, trusted, suspect, runs)
    _print_fault(arguments, found, number)
    return 1


def _names(arguments: argparse.Namespace) -> tuple[str, str]:
    names = arguments.bisect
    if len(names) > 2:
        raise IndexError(f"--bisect takes two backends, not {len(names)}")
    return (arguments.backend or "reference", names[0]) if len(names) == 1 else tuple(names)


def _agreed(arguments: argparse.Namespace, trusted: str, suspect: str, runs: int) -> int:
    facts = {"trusted": trusted, "suspect": suspect, "runs": runs, "differs": None}
    text = f"{suspect} computes what {trusted} does in all of {runs} runs"
    print(json.dumps(facts, indent=2) if arguments.json else text)
    return 0


def _print_fault(arguments: argparse.Namespace, found: Fault, number: int) -> None:
    from torpor.debug.reproduction import write_reproduction

    out = arguments.out or Path(f"{Path(arguments.files[0]).stem}_repro.py")
    written = write_reproduction(found, out, arguments.modules)
    if arguments.json:
        facts: dict[str, Any] = {"trusted": found.trusted.name, "suspect": found.suspect.name}
        facts |= {
            "run": number,
            "differs": found.to_json(),
            "reproduction": str(out) if written else None,
        }
        print(json.dumps(facts, indent=2))
        return
    print(printable(f"run {number}: {found}"))
    print(f"  reproduce:   python {out}" if written else "  no part of the graph shows it alone")
