"""``torpor bench``: whole steps compared with eager, torch.compile and torch._lazy, in one run.

``torpor bench`` runs the default workloads of the device, ``torpor bench gpt conv`` some of them,
``torpor bench train.py ARGS`` a user's script, ``torpor bench --growth`` increasing numbers of
layers, ``torpor bench --cold`` compiling from scratch, ``torpor bench --wild`` ordinary programs.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch

from torpor.bench import cold, growth, plot, report, runners, script, workloads
from torpor.bench.measurements import Results, load
from torpor.bench.race import Settings, race, turns
from torpor.bench.wild import measure as wild
from torpor.bench.wild import report as wild_report
from torpor.bench.wild import soak
from torpor.bench.wild.outcome import Wild
from torpor.bench.wild.programs import PROGRAMS, SOAK, WildProgram, check_names
from torpor.bench.worker import WarmUpLimits
from torpor.cli import terminal
from torpor.cli.demo import physical_device, positive

NAME = "bench"
HELP = "compare whole steps with eager, torch.compile and torch._lazy"
ERRORS = (ValueError, plot.NoPicture)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    _add_options(parser)
    what = parser.add_argument(
        "what", nargs=argparse.PARSER, default=[], metavar="workload | script.py",
        help=f"workloads ({', '.join(workloads.FULL)}; default: those of the device), "
        "or a script followed by its arguments",
    )  # fmt: skip
    what.required = False  # positional arguments are optional


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--device", choices=("cpu", "cuda"), default=physical_device())
    parser.add_argument("--runners", type=_names, help=f"some of {','.join(runners.RUNNERS)}")
    parser.add_argument(
        "--backends", type=_names, default=["inductor"],
        help="run torpor's runners with each of these backends (default: inductor); "
        "with options: inductor+equal_subgraphs=false",
    )  # fmt: skip
    parser.add_argument(
        "--backend-option", type=_option, action="append", default=[], metavar="NAME=VALUE",
        help="an option of torpor's backend, with a JSON value",
    )  # fmt: skip
    parser.add_argument("--scale", choices=workloads.SCALES, default="full")
    parser.add_argument(
        "--rounds", type=positive, help="rounds to take the median of (15; --wild, --soak: 1)"
    )
    parser.add_argument("--round-ms", type=positive, default=100, help="length of a round")
    parser.add_argument("--threads", type=positive, default=torch.get_num_threads())
    parser.add_argument(
        "--timeout", type=positive, default=600, help="maximum warm-up time of a process in seconds"
    )
    parser.add_argument(
        "--warm-jobs", type=positive, default=1, metavar="N",
        help="warm up N runners concurrently; distorts cold-start times",
    )  # fmt: skip
    parser.add_argument(
        "--keep-caches", action="store_true",
        help="do not clear the compilers' disk caches; cold starts are then not cold",
    )  # fmt: skip
    parser.add_argument("--json", metavar="FILE", help="write all figures; - for standard output")
    parser.add_argument("--plot", metavar="FILE.png", type=Path, help="plot (needs matplotlib)")
    parser.add_argument("--growth", action="store_true", help="cost of 1, 2, 4, … layers")
    parser.add_argument(
        "--cold", action="store_true",
        help=f"cold compile times: {cold.MANY} layers against {cold.FEW}, and torch.compile",
    )  # fmt: skip
    parser.add_argument("--max-layers", type=positive, default=64, help="for --growth")
    parser.add_argument(
        "--wild", action="store_true",
        help=f"ordinary programs in the default configuration: {', '.join(PROGRAMS)}",
    )  # fmt: skip
    parser.add_argument(
        "--soak", type=positive, nargs="?", const=SOAK.steps, metavar="N",
        help=f"run N steps of a program whose graphs never repeat (default: {SOAK.steps:,})",
    )  # fmt: skip
    parser.add_argument("--only", type=_names, default=[], help="for --wild: these programs")
    parser.add_argument(
        "--check", action="store_true", help="for --wild, --soak: exit with 1 if a bar is missed"
    )
    parser.add_argument(
        "--steps", type=positive, default=0, help="for a script or --wild: stop after this many"
    )
    parser.add_argument("--verbose", action="store_true", help="for a script: show its output")


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _option(text: str) -> tuple[str, Any]:
    try:
        return runners.option(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def run(arguments: argparse.Namespace) -> int:
    if arguments.what and arguments.what[0].endswith(".py"):
        return _run_script(arguments)
    arguments = _workloads_first(arguments)
    arguments.rounds = arguments.rounds or (1 if arguments.wild or arguments.soak else 15)
    if arguments.wild or arguments.soak:
        return _run_wild(arguments) if arguments.wild else _soak(arguments)
    if arguments.cold:
        return _start_cold(arguments)
    return _grow(arguments) if arguments.growth else _race(arguments)


def _workloads_first(arguments: argparse.Namespace) -> argparse.Namespace:
    """Parse workloads mixed with options."""
    parser = argparse.ArgumentParser(prog="torpor bench")
    _add_options(parser)
    parser.add_argument("workloads", nargs="*")
    return parser.parse_intermixed_args(arguments.what, arguments)


def _race(arguments: argparse.Namespace) -> int:
    names = arguments.workloads or list(workloads.BY_DEVICE[arguments.device])
    for name in names:
        workloads.check_name(name)
    if arguments.plot:
        plot.check()
    settings = _settings(arguments)
    specs = runners.specs(
        arguments.runners or list(runners.BY_DEVICE[arguments.device]),
        arguments.backends,
        arguments.device,
        dict(arguments.backend_option),
    )
    results = Results(
        arguments.device, arguments.threads, arguments.rounds, arguments.scale, load=[load()]
    )
    with terminal.progress("bench", len(names) * turns(specs, settings)) as advance:
        for name in names:
            results.outcomes.append(race(name, specs, settings, advance))
            results.load = [results.load[0], load()]
            _write_json(arguments.json, results.as_json(), final=name == names[-1])
    if arguments.json != "-":
        _show(results)
    if arguments.plot:
        plot.race(results, arguments.plot)
    return 0


def _grow(arguments: argparse.Namespace) -> int:
    if arguments.workloads:
        raise ValueError("--growth has a workload of its own")
    if arguments.plot:
        plot.check()
    plan = growth.GrowthPlan(
        backend=arguments.backends[0],
        most_layers=arguments.max_layers,
        repeat=arguments.rounds,
        **_named(arguments, "device", "threads", "timeout", "keep_caches"),
    )
    with terminal.progress("bench", growth.turns(plan)) as advance:
        costs = growth.measure(plan, advance)
    _write_json(arguments.json, growth.as_json(plan, costs))
    if arguments.json != "-":
        terminal.heading(f"{plan.width} wide GPT, training step, warm; compiled from nothing")
        terminal.table(*growth.table(costs))
        terminal.table(*growth.checks(plan, costs))
    if arguments.plot:
        plot.growth(costs.points, arguments.plot)
    return 0


def _start_cold(arguments: argparse.Namespace) -> int:
    if arguments.workloads:
        raise ValueError("--cold has workloads of its own")
    sizes = (cold.FEW, cold.MANY) if arguments.scale == "full" else (1, 2)
    plan = cold.ColdPlan(
        backend=arguments.backends[0],
        options=tuple(arguments.backend_option),
        few=sizes[0],
        many=sizes[1],
        **_named(arguments, "device", "threads", "scale", "timeout"),
    )
    with terminal.progress("bench", len(plan.starts)) as advance:
        starts = cold.measure(plan, advance)
    _write_json(arguments.json, cold.as_json(plan, starts))
    if arguments.json != "-":
        terminal.heading("training step, compiled from nothing")
        terminal.table(*cold.table(starts))
        terminal.table(*cold.checks(plan, starts))
    return int(any(start.error for start in starts.rows))


def _run_wild(arguments: argparse.Namespace) -> int:
    check_names(arguments.only)
    if arguments.plot:
        plot.check()
    programs = tuple(PROGRAMS[name] for name in arguments.only or PROGRAMS)
    found = _measure_wild(arguments, programs, _wild_runners(arguments.runners), arguments.steps)
    failures = wild_report.failures(found)
    if arguments.json != "-":
        terminal.heading("step after warm-up, median of the later half; × is a multiple of eager's")
        terminal.table(*wild_report.step_table(found))
        terminal.heading("whole run, from the end of `import torch` to the end of the process")
        terminal.table(*wild_report.total_table(found))
        _show_lines(wild_report.notes(found), failures)
    if arguments.plot:
        plot.wild(found, arguments.plot)
    return int(arguments.check and bool(failures))


def _soak(arguments: argparse.Namespace) -> int:
    found = _measure_wild(arguments, (SOAK,), soak.RUNNERS, arguments.soak)
    failures = soak.failures(found.outcomes[0])
    if arguments.json != "-":
        terminal.heading(f"{SOAK.name}: {SOAK.title}")
        terminal.table(*soak.table(found.outcomes[0]))
        _show_lines([], failures)
    return int(arguments.check and bool(failures))


def _measure_wild(
    arguments: argparse.Namespace,
    programs: tuple[WildProgram, ...],
    who: tuple[str, ...],
    steps: int,
) -> Wild:
    """Run the programs; JSON is written after each, the headline printed at the end."""
    if arguments.workloads:
        raise ValueError("--wild and --soak have programs of their own; --only chooses some")
    chosen = _named(arguments, "threads", "rounds", "keep_caches", "timeout")
    plan = wild.WildPlan(programs, who, steps=steps, **chosen)

    def note(found: Wild) -> None:
        final = len(found.outcomes) == len(programs)
        _write_json(arguments.json, wild.as_json(plan, found), final)

    with terminal.progress("bench", plan.turns) as advance:
        found = wild.measure(plan, advance, note)
    if arguments.json != "-":
        print(f"\n{wild_report.headline(plan, found)}")
    return found


def _wild_runners(chosen: list[str] | None) -> tuple[str, ...]:
    if unknown := [name for name in chosen or () if name not in wild.RUNNERS]:
        known = ", ".join(wild.RUNNERS)
        raise ValueError(f"ordinary programs are run by {known}, not by {', '.join(unknown)}")
    return tuple(chosen or wild.RUNNERS)


def _show_lines(notes: list[str], failures: list[str]) -> None:
    if notes:
        print("\n".join(notes))
    terminal.heading(f"bars missed: {len(failures) or 'none'}")
    if failures:
        print("\n".join(failures))


def _run_script(arguments: argparse.Namespace) -> int:
    path = Path(arguments.what[0])
    if not path.is_file():
        raise ValueError(f"there is no script {path}")
    chosen = arguments.runners or list(script.RUNNERS)
    if unknown := [name for name in chosen if name not in script.RUNNERS]:
        known = ", ".join(script.RUNNERS)
        raise ValueError(f"a script is run by {known}, not by {', '.join(unknown)}")
    plan = script.Script(
        path,
        tuple(arguments.what[1:]),
        backend=arguments.backends[0],
        **_named(arguments, "device", "threads", "steps", "timeout", "verbose", "keep_caches"),
    )
    with terminal.progress("bench", len(chosen)) as advance:
        courses = script.run(plan, chosen, advance)
    _write_json(arguments.json, script.as_json(plan, courses))
    if arguments.json != "-":
        terminal.heading(str(path))
        terminal.table(*script.table(courses))
    return int(any(course.error for course in courses.values()))


def _settings(arguments: argparse.Namespace) -> Settings:
    seconds = arguments.timeout / 2  # so that the race starts before a worker times out
    names = ("device", "threads", "rounds", "scale", "timeout", "keep_caches", "warm_jobs")
    limits = WarmUpLimits(seconds=seconds, round_ms=arguments.round_ms)
    return Settings(limits=limits, **_named(arguments, *names))


def _named(arguments: argparse.Namespace, *names: str) -> dict[str, Any]:
    """Arguments that a plan has under the same names."""
    return {name: getattr(arguments, name) for name in names}


def _write_json(target: str | None, content: dict[str, Any], final: bool = True) -> None:
    """Write after each workload, so that an interrupted run leaves partial results."""
    text = json.dumps(content, indent=2)
    if target == "-" and final:
        print(text)
    elif target and target != "-":
        Path(target).write_text(text + "\n")


def _show(results: Results) -> None:
    print(f"\n{report.headline(results)}")
    for outcome in results.outcomes:
        terminal.heading(f"{outcome.workload}: {outcome.title}")
        terminal.table(*report.table(outcome))
