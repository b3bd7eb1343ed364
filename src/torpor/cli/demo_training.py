"""The demo's training loop, and the data kept of a run."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from statistics import median

import torch
from torch import Tensor

import torpor
from torpor.cli import terminal
from torpor.cli.char_gpt import CharGPT, Shape, Text, learning_rate_scale
from torpor.debug.explain import Explanation

READ_EVERY = 10  # steps between reads of the loss, as in logging


@dataclass(frozen=True)
class DemoPlan:
    """What to train, and for how long."""

    steps: int = 300
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
class DemoRun:
    """The results of one training run."""

    name: str
    losses: list[float] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)  # mean of each group of READ_EVERY steps
    parameters: dict[str, Tensor] = field(default_factory=dict)
    counters: dict[str, int] = field(default_factory=dict)
    uncompiled: int = 0  # steps not run by a compiled graph
    sample: str = ""
    seconds: float = 0.0
    explanation: Explanation = field(default_factory=torpor.explain)  # before sampling

    @property
    def first_ms(self) -> float:
        return self.step_ms[0]

    @property
    def steady_ms(self) -> float:
        """The median of the second half."""
        return median(self.step_ms[len(self.step_ms) // 2 :])


class DemoTraining:
    """An ordinary training loop, unaware of whether it runs lazily."""

    def __init__(self, device: str, plan: DemoPlan, text: Text) -> None:
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
    """Run one small step, so that no run is charged for torch's lazy initialization."""
    DemoTraining(
        device, DemoPlan(layers=1, width=4, batch=1, length=4), Text.encode("warm up")
    ).step()


def train(name: str, device: str, plan: DemoPlan, text: Text) -> DemoRun:
    """Train from scratch on a device, reading the losses every few steps."""
    training = DemoTraining(device, plan, text)
    outcome, before = DemoRun(name), torpor.metrics.counters()
    start = time.perf_counter()
    with terminal.progress(name, plan.steps) as advance:
        while len(outcome.losses) < plan.steps:
            group = min(READ_EVERY, plan.steps - len(outcome.losses))
            _train_group(training, group, outcome, advance)
    outcome.seconds = time.perf_counter() - start
    outcome.counters = _difference(torpor.metrics.counters(), before)
    outcome.explanation = torpor.explain()
    outcome.parameters = training.parameters()
    outcome.sample = training.sample()
    return outcome


def _train_group(
    training: DemoTraining, steps: int, outcome: DemoRun, advance: terminal.Advance
) -> None:
    start, compiled = time.perf_counter(), _compiled_runs()
    losses = []
    for _ in range(steps):
        losses.append(training.step())
        advance(f"loss {outcome.losses[-1]:.4f}" if outcome.losses else "")
    outcome.losses += [loss.item() for loss in losses]
    outcome.step_ms.append((time.perf_counter() - start) * 1e3 / steps)
    outcome.uncompiled += max(0, steps - (_compiled_runs() - compiled))


def _compiled_runs() -> int:
    return torpor.metrics.counters().get("CachedCompile", 0)


def _difference(after: dict[str, int], before: dict[str, int]) -> dict[str, int]:
    return {name: count - before.get(name, 0) for name, count in after.items()}


@dataclass(frozen=True)
class Comparison:
    """How far two runs differ."""

    equal_losses: int
    first_difference: tuple[int, float] | None  # step, and difference of the losses
    largest_difference: tuple[int, float] | None
    equal_parameters: int
    all_parameters: int
    same_sample: bool

    @classmethod
    def of(cls, eager: DemoRun, lazy: DemoRun) -> Comparison:
        gaps = [(step, abs(a - b)) for step, (a, b) in enumerate(zip(eager.losses, lazy.losses), 1)]
        apart = [(step, gap) for step, gap in gaps if gap != 0]
        same = [
            name in lazy.parameters and torch.equal(p, lazy.parameters[name])
            for name, p in eager.parameters.items()
        ]
        return cls(
            equal_losses=len(gaps) - len(apart),
            first_difference=apart[0] if apart else None,
            largest_difference=max(apart, key=lambda each: each[1], default=None),
            equal_parameters=sum(same),
            all_parameters=len(same),
            same_sample=eager.sample == lazy.sample,
        )
