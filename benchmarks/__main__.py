"""``make bench``: one run, one report, ratios."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from benchmarks import cold, counting, imports, report, tracing
from benchmarks.bars import bars
from benchmarks.results import Results, load
from benchmarks.worker import ROOT, environment
from torpor.cli import terminal

Part = Callable[[Results, argparse.Namespace], None]


def trace_part(results: Results, arguments: argparse.Namespace) -> None:
    with terminal.progress("tracing", tracing.turns(arguments.repeat)) as advance:
        results.subjects = tracing.measure(
            arguments.repeat, arguments.threads, _size(arguments), advance
        )
    for row in results.subjects:
        _note_subject(results, row)


def _note_subject(results: Results, row: tracing.Subject) -> None:
    name = f"{report.TITLES[row.system]} with {row.optimizer}"
    if row.error:
        results.notes.append(f"{name}: {row.error}")
    elif row.fallbacks:
        results.notes.append(
            f"{name} runs {row.fallbacks} ops a step eagerly (fallbacks), each of which computes"
            " the trace so far: its tracing time contains that"
        )
    if row.every > 1 and row.steps:
        results.notes.append(f"{name}: medians of {len(row.steps)}, as a step takes seconds")


def cold_part(results: Results, arguments: argparse.Namespace) -> None:
    with terminal.progress("cold", 2 * arguments.processes) as advance:
        results.cold = cold.measure(arguments.processes, _size(arguments), advance)


def import_part(results: Results, arguments: argparse.Namespace) -> None:
    processes = 2 * arguments.processes + 1
    with terminal.progress("imports", processes) as advance:
        results.imports = imports.measure(processes, advance)


def ops_part(results: Results, arguments: argparse.Namespace) -> None:
    size = json.dumps(_size(arguments))
    results.ops = _measured("ops", "benchmarks.micro", arguments, "--size", size)


def recorders_part(results: Results, arguments: argparse.Namespace) -> None:
    results.recorders = _measured("recorders", "benchmarks.recorders", arguments)


def _measured(name: str, module: str, arguments: argparse.Namespace, *more: str) -> Any:
    """What a module prints that measures in a process of its own."""
    with terminal.progress(name, 1) as advance:
        command = [sys.executable, "-m", module, "--rounds", str(arguments.repeat), *more]
        done = subprocess.run(
            command, cwd=ROOT, env=environment(threads=1), check=True, stdout=subprocess.PIPE
        )
        advance("")
    return json.loads(done.stdout)


def instructions_part(results: Results, arguments: argparse.Namespace) -> None:
    size = json.dumps(_size(arguments) | {"layers": 2})  # the ops are those of any depth
    with terminal.progress("instructions", 2) as advance:
        try:
            output, counter = counting.run("benchmarks.micro", "--instructions", "--size", size)
            results.instructions, results.counter = json.loads(output), counter
            advance("")
            output, _ = counting.run("benchmarks.recorders", "--instructions")
            results.recorder_instructions = json.loads(output)
        except counting.Unavailable as why:
            results.notes.append(f"instructions not counted: {why}")
        advance("")


PARTS: dict[str, Part] = {
    "tracing": trace_part,
    "cold": cold_part,
    "imports": import_part,
    "ops": ops_part,
    "recorders": recorders_part,
    "instructions": instructions_part,
}


def _size(arguments: argparse.Namespace) -> dict[str, Any]:
    return {"fused_attention": arguments.fused_attention}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument(
        "--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART",
        help=f"measure these alone: {', '.join(PARTS)}",
    )  # fmt: skip
    parser.add_argument("--repeat", type=int, default=15, help="rounds; the median counts")
    parser.add_argument("--processes", type=int, default=3, help="fresh processes of each kind")
    parser.add_argument(
        "--threads", type=int, default=1,
        help="torch's threads; with more than one, only the wall clock sees all of eager's work",
    )  # fmt: skip
    parser.add_argument("--fused-attention", action="store_true", help="one op for attention")
    parser.add_argument("--write-docs", action="store_true", help="update docs/benchmarks.md")
    parser.add_argument("--check", action="store_true", help="exit status 1 if a bar is missed")
    return parser.parse_args()


def main() -> int:
    arguments = _arguments()
    results = Results(load=[load()], repeat=arguments.repeat, threads=arguments.threads)
    for name in arguments.only:
        try:
            PARTS[name](results, arguments)
        except (RuntimeError, subprocess.CalledProcessError) as error:
            results.notes.append(f"{name} failed: {error}")  # the other parts are still worth it
    results.load.append(load())
    print(f"\n{report.text(results)}\n")
    print(f"numbers: {report.write_json(results).relative_to(ROOT)}")
    print(report.plot(results))
    if arguments.write_docs:
        print(f"table: {report.write_docs(results).relative_to(ROOT)}")
    missed = any("failed" in n for n in results.notes) or not all(b.passed for b in bars(results))
    return int(arguments.check and missed)


if __name__ == "__main__":
    sys.exit(main())
