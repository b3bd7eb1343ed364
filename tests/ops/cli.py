"""`python -m tests.ops.sweep`: a part of the table, quickly, surviving crashes and hangs."""

from __future__ import annotations

import argparse
import fnmatch
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from tests.ops.pool import sweep_in_processes
from tests.ops.results import Result
from tests.ops.subjects import SUBJECTS
from tests.ops.sweep import check_entry, entries
from tests.ops.table import summarise, table


def main(argv: list[str] | None = None) -> int:
    options = _parser().parse_args(argv)
    modes = options.mode or ["lazy", "concrete"]
    jobs = [(name, mode) for name in _chosen(options.op) for mode in modes]
    started = time.monotonic()
    results: list[Result] = []
    stream: Iterator[Result]
    if options.jobs == 0:
        stream = (check_entry(entries()[name], mode) for name, mode in jobs)
    else:
        stream = sweep_in_processes(jobs, options.jobs, options.timeout)
    for result in stream:
        results.append(result)
        _progress(results, len(jobs), started)
        if options.json:
            with Path(options.json).open("a" if len(results) > 1 else "w") as file:
                print(json.dumps(result.to_json()), file=file)
    print(file=sys.stderr)
    results.sort(key=lambda r: (r.mode, r.op))
    print(summarise(results))
    print(table(results))
    print(f"{time.monotonic() - started:.0f} s")
    return int(any(r.failures for r in results))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.ops.sweep", description=__doc__)
    parser.add_argument("--mode", action="append", choices=sorted(SUBJECTS), help="repeatable")
    parser.add_argument("--op", action="append", help="entry name or pattern, repeatable")
    parser.add_argument(
        "--jobs", type=int, default=1, help="processes; 0: in this one, for a debugger"
    )
    parser.add_argument("--timeout", type=float, default=120, help="seconds for one entry")
    parser.add_argument("--json", help="write each result to this file as it comes, one a line")
    return parser


def _chosen(patterns: list[str] | None) -> list[str]:
    names = list(entries())
    if not patterns:
        return names
    chosen = [n for n in names if any(fnmatch.fnmatchcase(n, p) for p in patterns)]
    if not chosen:
        raise SystemExit(f"no op_db entry matches {patterns}")
    return chosen


def _progress(results: list[Result], total: int, started: float) -> None:
    bad = sum(r.status == "failed" for r in results)
    width = 30
    bar = "█" * (width * len(results) // total)
    line = (
        f"{bar:░<{width}} {len(results)}/{total}, {bad} failed, {time.monotonic() - started:.0f} s"
    )
    if sys.stderr.isatty():
        print(f"\r{line} {results[-1].op[:40]:<40}", end="", file=sys.stderr, flush=True)
    elif len(results) % max(1, total // 20) == 0 or len(results) == total:
        print(line, file=sys.stderr, flush=True)
