"""Figures of `torpor bench --wild --json FILE` as Markdown: `python -m scripts.wild_figures FILES`.

`--write docs/benchmarks.md` puts them there, between two comments. Several files (of programs
chosen with `--only`) become one table. `--brief`: steps and totals, nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from torpor.bench.wild.outcome import geometric_mean

BEGIN, END = "<!-- ordinary programs -->", "<!-- end of ordinary programs -->"
FULL = (
    "program", "eager ms", "torpor", "CPU", "torch.compile", "eager s", "torpor", "torch.compile",
    "graphs", "compiled", "slow steps", "MiB", "losses",
)  # fmt: skip
BRIEF = ("program", "step: torpor", "torch.compile", "whole run: torpor", "torch.compile")

Program = dict[str, Any]


def main() -> None:
    arguments = _arguments()
    runs = [json.loads(path.read_text()) for path in arguments.files]
    programs = [program for run in runs for program in run["programs"]]
    text = "\n".join([*_facts(runs), "", *_table(programs, arguments.brief)])
    if arguments.write:
        _write(arguments.write, text)
    else:
        print(text)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--brief", action="store_true")
    parser.add_argument("--write", type=Path, metavar="FILE.md")
    return parser.parse_args()


def _facts(runs: list[dict[str, Any]]) -> list[str]:
    """When and on what, and how busy that was."""
    first, loads = runs[0], [load for run in runs for load in run["load"]]
    versions = ", ".join(f"{name} {version}" for name, version in first["versions"].items())
    rounds = f"{first['rounds']} round{'s' * (first['rounds'] > 1)}"
    return [
        f"{first['date']}, {first['machine']}, {versions}, torch threads: {first['threads']}, "
        f"{rounds}; load average {min(loads):.1f} to {max(loads):.1f}. "
        "Steps and whole runs as multiples of eager's:"
    ]


def _table(programs: list[Program], brief: bool) -> list[str]:
    columns, cells = (BRIEF, _brief) if brief else (FULL, _full)
    rows = [columns, ["---", *["--:"] * (len(columns) - 1)], *map(cells, programs)]
    rows.append(_means(programs, brief))
    return ["| " + " | ".join(row) + " |" for row in rows]


def _full(program: Program) -> list[str]:
    eager, ours = (program["runners"].get(name, {}) for name in ("eager", "torpor"))
    return [
        f"`{program['program']}`",
        _number(eager.get("step_ms")),
        _ratio(program, "torpor", "step_ms"),
        _ratio(program, "torpor", "step_cpu_ms"),
        _ratio(program, "compile", "step_ms"),
        _number(eager.get("total_s")),
        (">" if program["stopped"] else "") + _ratio(program, "torpor", "total_s"),
        _ratio(program, "compile", "total_s"),
        f"{ours.get('graphs', 0):,}",
        f"{ours.get('compiles', 0):,}",
        f"{program['slow_steps'] or 0:,}",
        f"{(ours.get('memory') or 0) / 2**20:,.0f}",
        _losses(program),
    ]


def _brief(program: Program) -> list[str]:
    ratios = [
        _ratio(program, runner, what)
        for what in ("step_ms", "total_s")
        for runner in ("torpor", "compile")
    ]
    return [f"`{program['program']}`", *ratios]


def _means(programs: list[Program], brief: bool) -> list[str]:
    def mean(runner: str, what: str) -> str:
        return _two(geometric_mean(_value(program, runner, what) for program in programs))

    steps = [mean("torpor", "step_ms"), mean("compile", "step_ms")]
    totals = [mean("torpor", "total_s"), mean("compile", "total_s")]
    if brief:
        return ["geometric mean", *steps, *totals]
    cpu = mean("torpor", "step_cpu_ms")
    return ["geometric mean", "", steps[0], cpu, steps[1], "", *totals, *[""] * 5]


def _value(program: Program, runner: str, what: str) -> float | None:
    found: float | None = program["runners"].get(runner, {}).get(f"{what}_to_eager")
    return found


def _ratio(program: Program, runner: str, what: str) -> str:
    return _two(_value(program, runner, what))


def _two(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:,.1f}" if value >= 10 else f"{value:.2f}"


def _losses(program: Program) -> str:
    losses = program["losses"]
    if not losses:
        return "–"
    if losses["equal"] == losses["compared"]:
        return "equal"
    return f"{'±' if losses['agree'] else 'off by '}{losses['difference']:.0e}"


def _write(path: Path, text: str) -> None:
    before, found, rest = path.read_text().partition(BEGIN)
    _, ended, after = rest.partition(END)
    if not found or not ended:
        sys.exit(f"{path} has no place for it: {BEGIN} … {END}")
    path.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}")


if __name__ == "__main__":
    main()
