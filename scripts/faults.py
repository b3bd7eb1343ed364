"""Trains lazily and eagerly side by side while Ctrl-C and bad batches come at random moments.

    python -m scripts.faults --interrupts 200 --bad-batches 50 [--seed N] [--width N] [--json]

After each fault the state of the lazy training has to be that of an eager one that has made the
completed steps: bit for bit on backends with eager's kernels, closely on others. An interrupt in
the middle of `optimizer.step()` may leave some of its writes, as it does in eager: such a state has
to be readable and finite. The exit status is 0 if nothing was lost and nothing differs.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torpor

WORDS = 12
BATCH = 8


class Refused(ArithmeticError):
    """What the custom op of a bad batch raises."""


@torch.library.custom_op("torpor_faults::inspect", mutates_args=())
def inspect(x: torch.Tensor, verdict: torch.Tensor) -> torch.Tensor:
    """`x`, unless the verdict is an error."""
    if verdict.item() == 1:
        raise Refused("a bad batch")
    if verdict.item() == 2:
        raise MemoryError("as if there were no memory left")
    return x.clone()


@inspect.register_fake
def _(x: torch.Tensor, verdict: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


inspect.register_autograd(lambda ctx, grad: (grad, None))

Batch = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


class Training:
    """A small model and its optimizer on one device."""

    def __init__(self, device: str, width: int) -> None:
        torch.manual_seed(0)
        self.device = device
        self.table = nn.Embedding(WORDS, width)
        self.rest = nn.Sequential(
            nn.Linear(width, width, bias=False),  # before the norm its gradient is noise
            nn.BatchNorm1d(width),
            nn.GELU(),
            nn.Linear(width, 1),
        )
        self.model = nn.ModuleList([self.table, self.rest]).to(device)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.inside_optimizer = False

    def step(self, batch: Batch, read_at: str = "") -> torch.Tensor:
        words, target, verdict = (tensor.to(self.device) for tensor in batch)
        self.optimizer.zero_grad()
        loss = (self.rest(inspect(self.table(words), verdict)) - target).square().mean()
        if read_at == "before backward":
            loss.item()
        loss.backward()
        if read_at == "before the optimizer":
            loss.item()
        self.inside_optimizer = True
        self.optimizer.step()
        self.inside_optimizer = False
        if read_at == "after the step":
            loss.item()
        return loss

    def state(self) -> dict[str, torch.Tensor]:
        found = {f"model.{k}": v.detach().cpu().clone() for k, v in self.model.state_dict().items()}
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        for number, parameter in enumerate(parameters):
            for name, tensor in self.optimizer.state.get(parameter, {}).items():
                found[f"optimizer.{number}.{name}"] = torch.as_tensor(tensor).detach().cpu().clone()
        return found

    def take(self, other: Training) -> None:
        """Go on from the state of another one."""
        self.model.load_state_dict({k: v.cpu() for k, v in other.model.state_dict().items()})
        self.optimizer.load_state_dict(_plain(other.optimizer.state_dict()))


def _plain(state: Any) -> Any:
    if isinstance(state, torch.Tensor):
        return state.detach().cpu().clone()
    if isinstance(state, dict):
        return {key: _plain(value) for key, value in state.items()}
    return [_plain(item) for item in state] if isinstance(state, list) else state


READS = ("before backward", "before the optimizer", "after the step", "wait")
BAD = {"index": IndexError, "custom op": Refused, "memory": MemoryError}


class Faults:
    """The faults of one run, and what came of them."""

    def __init__(self, width: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.lazy, self.eager = Training("lazy", width), Training("cpu", width)
        self.exact = torpor.backend.get_backend().exact
        self.counts: Counter[tuple[str, str]] = Counter()
        self.problems: list[str] = []

    def batch(self, bad: str = "") -> Batch:
        words = torch.tensor([self.random.randrange(WORDS) for _ in range(BATCH)])
        if bad == "index":
            words[self.random.randrange(BATCH)] = WORDS + 87
        verdict = torch.tensor({"custom op": 1, "memory": 2}.get(bad, 0))
        return words, torch.full((BATCH, 1), self.random.random()), verdict

    # -- comparing -----------------------------------------------------------------------------

    def differing(self) -> set[str]:
        """The tensors of the lazy training that are not the eager one's."""
        lazy, eager = self.lazy.state(), self.eager.state()
        close = torch.equal if self.exact else _is_close
        same = {name for name in lazy.keys() & eager.keys() if close(lazy[name], eager[name])}
        return {*lazy, *eager} - same

    def good_steps(self, number: int) -> None:
        for _ in range(number):
            batch = self.batch()
            losses = [training.step(batch).detach().cpu() for training in (self.lazy, self.eager)]
            if not _is_close(*losses):
                self.problems.append(f"losses {losses}")

    def judge(self, kind: str, outcome: str, differing: set[str]) -> None:
        if differing:
            self.problems.append(f"{kind}: {', '.join(sorted(differing))} differ")
            outcome = "differs"
        self.counts[kind, outcome] += 1
        self.eager.take(self.lazy)

    # -- bad batches ---------------------------------------------------------------------------

    def bad_batch(self) -> None:
        bad, read_at = self.random.choice(list(BAD)), self.random.choice(READS)
        batch = self.batch(bad)
        raised = []
        for training in (self.lazy, self.eager):
            try:
                training.step(batch, read_at)
                torpor.sync(wait=True)
                raised.append(None)
            except Exception as error:
                raised.append(type(error))
        if raised != [BAD[bad]] * 2:
            self.problems.append(f"{bad} {read_at}: lazy raises {raised[0]}, eager {raised[1]}")
        kind = f"bad batch: {bad}"
        try:
            self.judge(kind, "as before the step", self.differing())
        except Exception as error:
            self.lose(kind, error)
        self.good_steps(2)

    # -- interrupts ----------------------------------------------------------------------------

    def interrupt(self) -> None:
        done: list[Batch] = []
        at_work = self.batch()
        shot = threading.Thread(target=_shoot, args=(self.random.random() * 0.05 + 0.001,))
        try:
            with _Ignored() as ignored:
                shot.start()
                while True:
                    ignored.raise_again()
                    at_work = self.batch()
                    read_at = self.random.choice(READS)
                    self.lazy.step(at_work, read_at)
                    done.append(at_work)
        except KeyboardInterrupt:
            inside, self.lazy.inside_optimizer = self.lazy.inside_optimizer, False
        shot.join()
        for batch in done:
            self.eager.step(batch)
        try:
            self.judge_interrupt(at_work, inside)
        except Exception as error:
            self.lose("interrupt", error)
        self.good_steps(2)

    def judge_interrupt(self, at_work: Batch, inside: bool) -> None:
        """All as before the step or all as after it; buffers, which forward writes, may mix."""
        before = self.differing()
        self.eager.step(at_work)
        after = self.differing()
        buffers = {f"model.{name}" for name, _ in self.lazy.model.named_buffers()}
        if not after:
            self.judge("interrupt", "the step was completed", set())
        elif not (before - buffers or before & after):
            self.judge("interrupt", "as before the step", set())
        elif inside and all(t.isfinite().all() for t in self.lazy.state().values()):
            self.judge("interrupt", "in optimizer.step()", set())
        else:
            self.judge("interrupt", "", before & after or before - buffers)

    def lose(self, kind: str, error: BaseException) -> None:
        self.counts[kind, "lost"] += 1
        self.problems.append(f"{kind}: lost, {type(error).__name__}: {error}"[:300])
        self.lazy = Training("lazy", self.lazy.table.weight.shape[1])
        self.eager.take(self.lazy)


def _shoot(delay: float) -> None:
    time.sleep(delay)
    os.kill(os.getpid(), signal.SIGINT)


class _Ignored:
    """Python ignores what is raised in a weak reference's callback: it is raised a step later."""

    def __enter__(self) -> _Ignored:
        self.seen, self.before = False, sys.unraisablehook
        sys.unraisablehook = self._see
        return self

    def __exit__(self, *error: object) -> None:
        sys.unraisablehook = self.before

    def _see(self, ignored: Any) -> None:
        if ignored.exc_type is KeyboardInterrupt:
            self.seen = True
        else:
            self.before(ignored)

    def raise_again(self) -> None:
        if self.seen:
            raise KeyboardInterrupt


def _is_close(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.allclose(one.float(), other.float(), rtol=1e-3, atol=1e-5)


def run(interrupts: int, bad_batches: int, width: int, seed: int) -> Faults:
    """All faults, in random order."""
    faults = Faults(width, seed)
    faults.good_steps(8)
    todo: list[Callable[[], None]] = [faults.interrupt] * interrupts
    todo += [faults.bad_batch] * bad_batches
    faults.random.shuffle(todo)
    for fault in todo:
        fault()
    return faults


def show(faults: Faults, seconds: float) -> None:
    """A table of what came of them."""
    rows = sorted(faults.counts.items())
    width = max(len(kind) for (kind, _), _ in rows)
    for (kind, outcome), number in rows:
        print(f"{kind:<{width}}  {outcome:<24} {number:>5}")
    for problem in faults.problems[:20]:
        print("PROBLEM", problem)
    print(f"{sum(faults.counts.values())} faults, {len(faults.problems)} problems, {seconds:.0f} s")


def main() -> int:
    """The command."""
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background job ignores it
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--interrupts", type=int, default=200)
    parser.add_argument("--bad-batches", type=int, default=50)
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true")
    reported = parser.parse_args()
    start = time.perf_counter()
    faults = run(reported.interrupts, reported.bad_batches, reported.width, reported.seed)
    if reported.json:
        counts = {f"{kind}: {outcome}": n for (kind, outcome), n in sorted(faults.counts.items())}
        print(json.dumps({"counts": counts, "problems": faults.problems}))
    else:
        show(faults, time.perf_counter() - start)
    return int(bool(faults.problems))


if __name__ == "__main__":
    sys.exit(main())
