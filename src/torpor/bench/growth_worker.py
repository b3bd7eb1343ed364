"""Measures torpor's cost for one size of a program: recording, cutting, compiling, memory.

The automatic cut after an optimizer's step is disabled here, and timed separately.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any

import torch

import torpor
from torpor.backend.registry import get_backend
from torpor.bench.runners import Spec
from torpor.bench.worker import Racer, peak, private_output, reset_peak, serve
from torpor.bench.workloads import SmallGPT
from torpor.execute.queue import queue_of
from torpor.transactions.jobs import Job

MOST_WARM_UP = 60  # steps


def measure_layers(
    layers: int, width: int, device: str, backend: str, repeat: int
) -> dict[str, Any]:
    """Measure a small GPT with that many layers."""
    torpor.config.cut_after_optimizer = False
    racer = Racer(Spec("torpor", device, backend), SmallGPT(layers, width))
    compile_s = _warm_up(racer)
    reset_peak(device)
    traces, cuts, steps = zip(*(_timed_step(racer) for _ in range(repeat)))
    return {
        "trace_ms": median(traces),
        "sync_ms": median(cuts),
        "step_ms": median(steps),
        "compile_s": compile_s,
        "compiles": racer.runner.compiles(),
        "memory": peak(device),
    }


def _warm_up(racer: Racer) -> float:
    """Step until nothing compiles; returns the excess seconds of the steps that compiled."""
    quiet, last = 0, 0.0
    slow = []
    for _ in range(MOST_WARM_UP):
        unsettled, compiles = racer.runner.unsettled(), racer.runner.compiles()
        last = _timed_step(racer)[2] / 1e3
        if racer.runner.compiles() > compiles:
            slow.append(last)
        quiet = quiet + 1 if racer.runner.unsettled() == unsettled else 0
        if quiet >= 3:
            break
    return max(0.0, sum(slow) - len(slow) * last)


def _timed_step(racer: Racer) -> tuple[float, float, float]:
    """Milliseconds until a step is recorded, until the cut has returned, until all is computed.

    Runs on the cutting thread do not count as part of the cut.
    """
    racer.finish()
    start = time.perf_counter()
    racer.program.step()
    recorded, waited = time.perf_counter(), racer.runner.waited()
    torpor.sync()
    cut = time.perf_counter() - (racer.runner.waited() - waited)
    racer.finish()
    done = time.perf_counter()
    return (recorded - start) * 1e3, (cut - recorded) * 1e3, (done - start) * 1e3


def measure_sync(nodes: list[int], device: str, backend: str, repeat: int) -> dict[str, Any]:
    """Time a warm `sync()` of graphs of different sizes, in turns: one leaf, one output."""
    torpor.use(backend)
    x = torpor.lazy(torch.ones(16, device=device))
    times: dict[int, list[tuple[float, float]]] = {count: [] for count in nodes}
    for turn in range(repeat + _WARM_TURNS):
        for count in nodes:
            found = _timed_sync(x, count)
            if turn >= _WARM_TURNS:
                times[count].append(found)
    return {str(count): [median(column) for column in zip(*times[count])] for count in nodes}


_WARM_TURNS = 6  # more runs than any backend waits for before compiling


def _timed_sync(x: torch.Tensor, nodes: int) -> tuple[float, float]:
    """The wall and CPU milliseconds of a `sync`."""
    y = x
    for _ in range(nodes):
        y = y + 1
    torpor.wait()
    with _queue_at_work(x.device):
        start, used = time.perf_counter(), time.thread_time()
        torpor.sync()
        ms = (time.perf_counter() - start) * 1e3, (time.thread_time() - used) * 1e3
    torpor.wait()
    return ms


@contextmanager
def _queue_at_work(device: torch.device) -> Iterator[None]:
    """Block the queue, so that steps cut meanwhile are queued, however short they are."""
    gate = threading.Event()

    def wait() -> None:
        gate.wait()

    queue_of(get_backend().backend_device(device)).submit(Job(wait, []))
    try:
        yield
    finally:
        gate.set()


def measure_recompiles(steps: int, layers: int, device: str, backend: str) -> dict[str, Any]:
    """Count compiles in a training with warm-up and cosine schedule, clipping and loss scaling."""
    torpor.use(backend)
    model = torpor.lazy(torch.nn.Sequential(*_layers(layers)).to(device))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = _schedule(optimizer, steps)
    scaler = torch.amp.GradScaler(device, init_scale=2.0**10, growth_interval=20)
    x = torpor.lazy(torch.randn(8, _WIDTH, device=device))
    early = 0
    for step in range(steps):
        if step == _EARLY:
            early = _compiles()
        loss = model(x).square().mean()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        schedule.step()
    torpor.wait()
    return {"compiles": _compiles(), "late": _compiles() - early}


_WIDTH = 32
_EARLY = 20  # steps after which nothing new should occur


def _compiles() -> int:
    return torpor.metrics.counters().get("UncachedCompile", 0)


def _layers(count: int) -> list[torch.nn.Module]:
    return [torch.nn.Linear(_WIDTH, _WIDTH) for _ in range(count)]


def _schedule(optimizer: torch.optim.Optimizer, steps: int) -> Any:
    rates = torch.optim.lr_scheduler
    warm_up = rates.LinearLR(optimizer, 0.1, total_iters=steps // 10)
    cosine = rates.CosineAnnealingLR(optimizer, T_max=steps - steps // 10)
    return rates.SequentialLR(optimizer, [warm_up, cosine], milestones=[steps // 10])


def main() -> None:
    """Run the worker."""
    answers = private_output()
    commands: dict[str, Callable[..., Any]] = {
        "layers": measure_layers,
        "sync": measure_sync,
        "recompiles": measure_recompiles,
    }
    serve(commands, answers)


if __name__ == "__main__":
    main()
