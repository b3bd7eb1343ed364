"""``torpor demo``: train one small GPT twice, eagerly and lazily, and compare every loss.

Both runs start from the same seed and see the same batches. The only difference between them is
the device the model and the batches are moved to.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from statistics import median

import torch
from torch import Tensor

import torpor
from torpor.cli import terminal
from torpor.cli.char_gpt import CharGPT, Shape, Text, learning_rate_scale, make_text

NAME = "demo"
HELP = "train a small character GPT lazily and eagerly and compare every loss"

READ_EVERY = 10  # steps between two readings of the loss, as a training script logs


@dataclass(frozen=True)
class Plan:
    """What is trained, and for how long."""

    steps: int = 400
    batch: int = 8
    layers: int = 3
    width: int = 96
    length: int = 48
    dropout: float = 0.05
    learning_rate: float = 5e-3
    seed: int = 1337
    sample: int = 120

    @property
    def warm_up(self) -> int:
        return max(1, self.steps // 10)


@dataclass
class Run:
    """What one of the two trainings left behind."""

    device: str
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)  # of each group of READ_EVERY steps
    parameters: dict[str, Tensor] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    sample: str = ""
    seconds: float = 0.0

    @property
    def first_ms(self) -> float:
        return self.step_ms[0]

    @property
    def steady_ms(self) -> float:
        return median(self.step_ms[1:] or self.step_ms)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    plan = Plan()
    parser.add_argument("--steps", type=positive, default=plan.steps, help="training steps")
    parser.add_argument("--batch", type=positive, default=plan.batch, help="windows per step")
    parser.add_argument("--layers", type=positive, default=plan.layers)
    parser.add_argument("--width", type=positive, default=plan.width, help="a multiple of 4")
    parser.add_argument("--seed", type=int, default=plan.seed)
    add_threads_argument(parser)
    parser.add_argument("--eager-device", default=None, help="default: what lazy runs on")
    parser.add_argument("--lazy-device", default="lazy")
    parser.add_argument(
        "--backend", default="reference", help="default: reference, which has eager's bits"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def add_threads_argument(parser: argparse.ArgumentParser) -> None:
    """One thread by default: on kernels this small, two wait for each other on a busy machine."""
    parser.add_argument("--threads", type=positive, default=1, help="torch's threads, both runs")


def positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is not a positive number")
    return value


def run(arguments: argparse.Namespace) -> int:
    plan = Plan(
        steps=arguments.steps,
        batch=arguments.batch,
        layers=arguments.layers,
        width=arguments.width,
        seed=arguments.seed,
    )
    text = Text.encode(make_text())
    torpor.use(arguments.backend)
    eager_device = arguments.eager_device or physical_device()
    with threads(arguments.threads):
        warm_up(eager_device)
        eager = train("eager", eager_device, plan, text)
        lazy = train("lazy", arguments.lazy_device, plan, text)
    if arguments.json:
        print(json.dumps(_as_json(plan, eager, lazy), indent=2))
    else:
        _show(plan, eager, lazy)
    return 0


@contextmanager
def threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def physical_device() -> str:
    """The device that lazy tensors run on when nothing else is said."""
    return "cuda" if torch.cuda.is_available() else "cpu"


class Training:
    """An ordinary training loop. Nothing in it says whether it runs lazily."""

    def __init__(self, device: str, plan: Plan, text: Text) -> None:
        self.device, self.plan, self.text = device, plan, text
        torch.manual_seed(plan.seed)
        shape = Shape(
            len(text.characters),
            plan.layers,
            width=plan.width,
            length=plan.length,
            dropout=plan.dropout,
        )
        self.model = CharGPT(shape).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=plan.learning_rate)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, self._rate_scale)
        self.batches = torch.Generator().manual_seed(plan.seed)

    def _rate_scale(self, step: int) -> float:
        return learning_rate_scale(step, self.plan.warm_up, self.plan.steps)

    def step(self) -> Tensor:
        tokens, targets = self.text.batch(self.plan.batch, self.plan.length, self.batches)
        loss = self.model.loss(tokens.to(self.device), targets.to(self.device))
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return loss.detach()

    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().cpu() for name, p in self.model.named_parameters()}

    def sample(self) -> str:
        prompt = self.text.tokens[None, : self.plan.length].to(self.device)
        return self.text.decode(self.model.continue_text(prompt, self.plan.sample))


def warm_up(device: str) -> None:
    """Let torch load what it loads at its first step, so that neither run pays for it."""
    Training(device, Plan(layers=1, width=4, batch=1, length=4), Text.encode("warm up")).step()


def train(label: str, device: str, plan: Plan, text: Text) -> Run:
    """Train from scratch on a device, reading the losses every few steps."""
    training = Training(device, plan, text)
    outcome, before = Run(device), torpor.metrics.counters()
    start = time.perf_counter()
    with terminal.progress(label, plan.steps) as advance:
        while len(outcome.losses) < plan.steps:
            group = min(READ_EVERY, plan.steps - len(outcome.losses))
            _train_group(training, group, outcome, advance)
    outcome.seconds = time.perf_counter() - start
    outcome.counters = _difference(torpor.metrics.counters(), before)
    outcome.parameters = training.parameters()
    outcome.sample = training.sample()
    return outcome


def _train_group(training: Training, steps: int, outcome: Run, advance: terminal.Advance) -> None:
    start = time.perf_counter()
    losses = []
    for _ in range(steps):
        losses.append(training.step())
        advance(f"loss {outcome.losses[-1]:.4f}" if outcome.losses else "")
    outcome.losses += [loss.item() for loss in losses]
    outcome.step_ms.append((time.perf_counter() - start) * 1e3 / steps)


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}


@dataclass(frozen=True)
class Comparison:
    """How far apart two runs ended."""

    equal_losses: int
    largest_loss_difference: float
    equal_parameters: int
    all_parameters: int
    same_sample: bool

    @classmethod
    def of(cls, eager: Run, lazy: Run) -> Comparison:
        pairs = list(zip(eager.losses, lazy.losses))
        same = [
            name in lazy.parameters and torch.equal(p, lazy.parameters[name])
            for name, p in eager.parameters.items()
        ]
        return cls(
            equal_losses=sum(a == b for a, b in pairs),
            largest_loss_difference=max(abs(a - b) for a, b in pairs),
            equal_parameters=sum(same),
            all_parameters=len(same),
            same_sample=eager.sample == lazy.sample,
        )


def _recorded(run: Run, steps: int) -> dict[str, int]:
    counts = run.counters
    return {
        "ops_recorded": counts.get("OpsRecorded", 0),
        "ops_per_step": round(counts.get("OpsRecorded", 0) / steps),
        "graphs_compiled": counts.get("UncachedCompile", 0),
        "cache_hits": counts.get("CachedCompile", 0),
    }


def _as_json(plan: Plan, eager: Run, lazy: Run) -> dict[str, object]:
    def timing(run: Run) -> dict[str, float]:
        return {"first_ms": run.first_ms, "steady_ms": run.steady_ms, "seconds": run.seconds}

    return {
        "plan": asdict(plan),
        "losses": {"eager": eager.losses, "lazy": lazy.losses},
        "comparison": asdict(Comparison.of(eager, lazy)),
        "recorded": _recorded(lazy, plan.steps),
        "time": {"eager": timing(eager), "lazy": timing(lazy)},
        "sample": lazy.sample,
    }


def _show(plan: Plan, eager: Run, lazy: Run) -> None:
    terminal.heading(f"loss, eager on {eager.device} and lazy on {lazy.device}")
    terminal.table(("step", "eager", "lazy", "equal"), _loss_rows(plan.steps, eager, lazy))
    comparison = Comparison.of(eager, lazy)
    terminal.heading("equal bit for bit")
    terminal.table(("what", "answer"), equality_rows(plan.steps, comparison))
    terminal.heading("recorded")
    recorded = _recorded(lazy, plan.steps)
    names = {name: name.replace("_", " ") for name in recorded}
    terminal.table(("what", "count"), [(names[name], f"{n:,}") for name, n in recorded.items()])
    terminal.heading("time per step")
    terminal.table(("ms", "eager", "lazy", "lazy/eager"), _time_rows(eager, lazy))
    terminal.heading("what it has learnt (lazy)")
    print(lazy.sample)


def _loss_rows(steps: int, eager: Run, lazy: Run) -> list[terminal.Row]:
    shown = sorted({*range(0, steps, max(1, steps // 10)), steps - 1})
    rows: list[terminal.Row] = []
    for i in shown:
        a, b = eager.losses[i], lazy.losses[i]
        rows.append((str(i + 1), f"{a:.9f}", f"{b:.9f}", "yes" if a == b else f"{b - a:+.1e}"))
    return rows


def equality_rows(steps: int, comparison: Comparison) -> list[terminal.Row]:
    equal, of = comparison.equal_parameters, comparison.all_parameters
    losses = f"{_verdict(comparison.equal_losses, steps)} ({comparison.equal_losses} of {steps})"
    if comparison.equal_losses < steps:
        losses += f", largest difference {comparison.largest_loss_difference:.1e}"
    return [
        ("losses", losses),
        ("parameters", f"{_verdict(equal, of)} ({equal} of {of} tensors)"),
        ("generated text", "yes" if comparison.same_sample else "no"),
    ]


def _verdict(count: int, of: int) -> str:
    return "yes" if count == of else "no"


def _time_rows(eager: Run, lazy: Run) -> list[terminal.Row]:
    pairs = {
        f"first steps (up to {READ_EVERY})": (eager.first_ms, lazy.first_ms),
        "after that (median)": (eager.steady_ms, lazy.steady_ms),
    }
    return [(name, f"{a:.1f}", f"{b:.1f}", f"{b / a:.2f}") for name, (a, b) in pairs.items()]
