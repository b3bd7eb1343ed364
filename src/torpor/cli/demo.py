"""``torpor demo``: trains one small GPT eagerly and lazily, and compares losses and speed.

All runs use the same seed and the same batches. They differ only in the device that the model and
the batches are moved to, and the backend behind it: the default one, and the reference, which runs
eager's own kernels and is bit-identical.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass

import torch

import torpor
from torpor.cli import terminal
from torpor.cli.char_gpt import Text, make_text
from torpor.cli.demo_training import READ_EVERY, Comparison, DemoPlan, DemoRun, train, warm_up
from torpor.debug.explain import Explanation

NAME = "demo"
HELP = "train a small character GPT eagerly and lazily; compare losses and speed"

EXACT = "reference"
ROUNDED = (
    "What {} compiles is rounded in another order, and every step of a training adds to that; "
    "eager's bits are kept where eager's kernels run."
)
NEXT = (
    ("TORPOR_VIEW=1 torpor demo", "the same with a page: graphs, timeline, memory"),
    ("torpor bench --wild", "twelve ordinary programs: torpor, eager, torch.compile"),
    ("torpor bench train.py", "a script of yours, untouched"),
    ("docs/walk.md", "one op through the system, in ten minutes"),
)


@dataclass(frozen=True)
class Demo:
    """All runs; `lazy` is on the default backend, `exact` on the reference."""

    plan: DemoPlan
    eager: DemoRun
    lazy: DemoRun
    exact: DemoRun | None  # None if `lazy` is on the reference

    @property
    def others(self) -> list[DemoRun]:
        return [self.lazy, *([self.exact] if self.exact else [])]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan = DemoPlan()
    parser.add_argument("--steps", type=positive, default=plan.steps, help="training steps")
    parser.add_argument("--batch", type=positive, default=plan.batch, help="windows per step")
    parser.add_argument("--layers", type=positive, default=plan.layers)
    parser.add_argument("--width", type=positive, default=plan.width, help="a multiple of 4")
    parser.add_argument("--seed", type=int, default=plan.seed)
    add_threads_argument(parser)
    parser.add_argument("--eager-device", default=None, help="default: same as the lazy run's")
    parser.add_argument("--lazy-device", default="lazy")
    parser.add_argument("--backend", help="in addition to reference; default: torpor's default")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_threads_argument(parser: argparse.ArgumentParser) -> None:
    """Default: one thread, as more only contend in kernels this small on a busy machine."""
    parser.add_argument("--threads", type=positive, default=1, help="torch threads, for both runs")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def run(arguments: argparse.Namespace) -> int:
    plan = DemoPlan(
        steps=arguments.steps,
        batch=arguments.batch,
        layers=arguments.layers,
        width=arguments.width,
        seed=arguments.seed,
    )
    if arguments.backend:
        torpor.use(arguments.backend)
    eager_device = arguments.eager_device or physical_device()
    with threads(arguments.threads):
        found = _train_all(plan, eager_device, arguments.lazy_device)
    if arguments.json:
        print(json.dumps(_as_json(found), indent=2))
    else:
        _show(found)
    return 0


def _train_all(plan: DemoPlan, eager_device: str, lazy_device: str) -> Demo:
    text, backend = Text.encode(make_text()), torpor.backend.get_backend().name
    warm_up(eager_device)
    eager = train("eager", eager_device, plan, text)
    torpor.metrics.reset()  # `explain` reports from here on
    with compiled_soon():
        lazy = train(backend, lazy_device, plan, text)
    if backend == EXACT:
        return Demo(plan, eager, lazy, None)
    with torpor.using(EXACT):
        return Demo(plan, eager, lazy, train(EXACT, lazy_device, plan, text))


@contextmanager
def compiled_soon() -> Iterator[None]:
    """Compile graphs in the foreground within the body, after a few runs.

    By default, torpor compiles in the background what has run long enough to be worth it: a
    training as short as this one would be over by then.
    """
    before = torpor.config.compile_after
    if before < 0:
        torpor.config.compile_after = torpor.backend.get_backend().compile_after
    try:
        yield
    finally:
        torpor.config.compile_after = before


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def physical_device() -> str:
    """The default device of lazy tensors."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def verdict(plan: DemoPlan, eager: DemoRun, lazy: DemoRun) -> list[str]:
    """Which is faster, and by how much; if torpor is not, why not."""
    ratio = lazy.steady_ms / eager.steady_ms
    if ratio < 1.0:
        return [
            f"torpor on {lazy.name} is ahead: a step takes {ratio:.2f} of eager's time.",
            _won_back(plan, eager, lazy),
        ]
    return [
        f"torpor on {lazy.name} is not ahead: a step takes {ratio:.2f} times as long as eager's.",
        _why_not(plan, lazy),
    ]


def _won_back(plan: DemoPlan, eager: DemoRun, lazy: DemoRun) -> str:
    """The cost of compiling, and after how many steps it is recovered."""
    behind = lazy.seconds - eager.seconds
    if behind <= 0:
        return f"The whole training took {lazy.seconds:.1f} s; eager's took {eager.seconds:.1f} s."
    steps = behind * 1e3 / (eager.steady_ms - lazy.steady_ms)
    return (
        f"The whole training took {behind:.1f} s longer, for compiling at once, as the demo asks "
        f"for: won back after about {_round(plan.steps + steps):,} steps. The next process finds "
        "it compiled; a program that asks for nothing goes on meanwhile, and compiles what pays."
    )


def _round(steps: float) -> int:
    """Round to two significant digits."""
    return int(float(f"{steps:.2g}"))


def _why_not(plan: DemoPlan, lazy: DemoRun) -> str:
    balance = lazy.explanation.balance
    if lazy.name == EXACT:
        return (
            "The reference runs eager's kernels one by one, so recording is only added to them; "
            "`torpor info` says which backends could compile here."
        )
    if 2 * lazy.uncompiled > plan.steps:
        return f"Still compiling: {lazy.uncompiled} of {plan.steps} steps ran uncompiled."
    record, run = balance.record * 1e3, balance.run * 1e3
    if record > run:
        return (
            f"Recording a step takes {record:.1f} ms, running it {run:.1f} ms: Python sets the "
            "pace; the native library records faster (`torpor native build`)."
        )
    return (
        f"Running a step takes {run:.1f} ms, recording it {record:.1f} ms: they add up where they "
        "do not overlap."
    )


def _recorded(run: DemoRun, steps: int) -> dict[str, int]:
    counts = run.counters
    return {
        "ops_recorded": counts.get("OpsRecorded", 0),
        "ops_per_step": round(counts.get("OpsRecorded", 0) / steps),
        "graphs_compiled": counts.get("UncachedCompile", 0),
        "cache_hits": counts.get("CachedCompile", 0),
        "steps_uncompiled": run.uncompiled,
    }


def _as_json(found: Demo) -> dict[str, object]:
    def about(run: DemoRun) -> dict[str, object]:
        return {
            "losses": run.losses,
            "first_ms": run.first_ms,
            "steady_ms": run.steady_ms,
            "seconds": run.seconds,
            "recorded": _recorded(run, found.plan.steps),
            "comparison": asdict(Comparison.of(found.eager, run)),
            "sample": run.sample,
        }

    return {
        "plan": asdict(found.plan),
        "runs": {run.name: about(run) for run in (found.eager, *found.others)},
        "explain": json.loads(found.lazy.explanation.to_json()),
        "verdict": verdict(found.plan, found.eager, found.lazy),
    }


def _show(found: Demo) -> None:
    runs, steps = [found.eager, *found.others], found.plan.steps
    names = [run.name for run in runs]
    terminal.heading(f"loss of a character GPT: eager, and lazy on {' and '.join(names[1:])}")
    terminal.table(("step", *names), _loss_rows(steps, runs))
    terminal.heading("equal to eager's, bit for bit")
    compared = [dict(equality_rows(steps, Comparison.of(runs[0], run))) for run in runs[1:]]
    rows = [(what, *(each[what] for each in compared)) for what in compared[0]]
    terminal.table(("what", *names[1:]), rows)
    if found.exact is not None and compared[0]["  first difference"] != "none":
        terminal.paragraphs([ROUNDED.format(found.lazy.name)])
    terminal.heading("time of a step")
    terminal.table(("ms", *names), _time_rows(runs))
    terminal.heading(f"what torpor.explain() says of {found.lazy.name}")
    terminal.paragraphs(_explained(found.lazy.explanation))
    terminal.heading(f"what it has learnt ({found.lazy.name})")
    print(found.lazy.sample)
    terminal.heading("and so")
    terminal.paragraphs(verdict(found.plan, found.eager, found.lazy))
    terminal.heading("where to look next")
    widest = max(len(name) for name, _ in NEXT)
    for name, what in NEXT:
        print(f"{name:<{widest}}   {what}")


def _explained(explanation: Explanation) -> list[str]:
    """The head of an explanation, and its most expensive finding with line and advice."""
    head = str(explanation).partition("\n\n")[0].splitlines()
    for finding in explanation.findings[:1]:
        head += [f"{finding.title}, at {finding.line}", f"-> {finding.advice}"]
    return head


def _loss_rows(steps: int, runs: list[DemoRun]) -> list[terminal.Row]:
    shown = sorted({*range(0, steps, max(1, steps // 8)), steps - 1})
    return [(str(i + 1), *(f"{run.losses[i]:.9f}" for run in runs)) for i in shown]


def equality_rows(steps: int, comparison: Comparison) -> list[tuple[str, str]]:
    """How much of a run is bit-identical to eager, and the differences of the rest."""
    return [
        ("losses", f"{comparison.equal_losses} of {steps}"),
        ("  first difference", _difference(comparison.first_difference)),
        ("  largest difference", _difference(comparison.largest_difference)),
        ("parameters", f"{comparison.equal_parameters} of {comparison.all_parameters} tensors"),
        ("generated text", "the same" if comparison.same_sample else "another"),
    ]


def _difference(found: tuple[int, float] | None) -> str:
    return f"{found[1]:.1e}, step {found[0]}" if found else "none"


def _time_rows(runs: list[DemoRun]) -> list[terminal.Row]:
    eager = runs[0].steady_ms
    return [
        (f"first steps (up to {READ_EVERY})", *(f"{run.first_ms:.1f}" for run in runs)),
        ("later half (median)", *(f"{run.steady_ms:.1f}" for run in runs)),
        ("  as a multiple of eager's", *(f"{run.steady_ms / eager:.2f}" for run in runs)),
        ("whole training, s", *(f"{run.seconds:.1f}" for run in runs)),
    ]
