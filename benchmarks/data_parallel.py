"""A step of data parallel training on several ranks: ``python -m benchmarks.data_parallel``.

Eager DistributedDataParallel, `torch.compile` of it, and torpor, on the same ranks in one run, in
turns. Ratios are medians over turns; below 1 torpor takes less. Also what agreement takes of
torpor's step, on its own thread, and whether the losses are eager's.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import wraps
from statistics import median
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from benchmarks.clock import no_gc
from benchmarks.gpt import GPT, Size

SYSTEMS = ("eager", "compile", "torpor")
Step = Callable[[int], torch.Tensor]


def _together(module: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(module, bucket_cap_mb=1)


def _step_of(system: str, size: Size) -> Step:
    """One training step of a model of its own, on this rank's batch of that number."""
    import torpor

    torch.manual_seed(0)
    model: Any = GPT(size)
    model = _together(torpor.lazy(model) if system == "torpor" else model)
    parameters = list(model.parameters())
    model = torch.compile(model) if system == "compile" else model
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    shape = (size.batch, size.length + 1)
    rank, world = dist.get_rank(), dist.get_world_size()

    def step(number: int) -> torch.Tensor:
        draws = torch.Generator().manual_seed(number * world + rank)
        tokens = torch.randint(size.vocabulary, shape, generator=draws)
        scores = model(tokens[:, :-1])
        loss = cross_entropy(scores.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def _agreement_seconds() -> list[float]:
    """A cell to which each agreement of this process adds what it takes."""
    from torpor.distributed import agreement

    spent = [0.0]

    def timed(function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any) -> Any:
            start = time.perf_counter()
            try:
                return function(*args)
            finally:
                spent[0] += time.perf_counter() - start

        return call

    agreement.CollectiveStream.enter = timed(agreement.CollectiveStream.enter)  # type: ignore[method-assign]  # to time it
    agreement.entries_of = timed(agreement.entries_of)
    return spent


class Turn(NamedTuple):
    """Seconds of a step, on the clock and of this rank's processor; the last loss."""

    wall: float
    cpu: float
    loss: float


def _turn(step: Step, first: int, steps: int) -> Turn:
    """Some steps in a row; ranks begin together."""
    dist.barrier()
    start, busy = time.perf_counter(), time.process_time()
    for number in range(first, first + steps):
        loss = step(number)
    last = float(loss)
    wall, cpu = time.perf_counter() - start, time.process_time() - busy
    return Turn(wall / steps, cpu / steps, last)


def _rank(rank: int, folder: str, options: argparse.Namespace, size: Size) -> None:
    import torpor

    torch.set_num_threads(options.threads)
    torpor.config.compile_async = False  # all is compiled before the first turn
    store = f"file://{folder}/store"
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=options.ranks)
    chosen = [system for system in SYSTEMS if system not in options.without]
    steps = {system: _step_of(system, size) for system in chosen}
    spent = _agreement_seconds()
    turns: dict[str, list[Turn]] = {system: [] for system in chosen}
    with no_gc():
        for turn in range(options.warm + options.turns):
            if turn == options.warm:
                torpor.metrics.reset()
                spent[0] = 0.0
            for system, step in steps.items():
                turns[system].append(_turn(step, turn * options.steps, options.steps))
    if rank == 0:
        _show(turns, spent[0], options)
    dist.barrier()
    dist.destroy_process_group()


def _show(turns: dict[str, list[Turn]], agreeing: float, options: argparse.Namespace) -> None:
    import torpor

    counters = torpor.metrics.counters()
    total = options.turns * options.steps
    took = {system: of[options.warm :] for system, of in turns.items()}
    for system, of in took.items():
        wall, cpu = (median(getattr(turn, clock) for turn in of) for clock in ("wall", "cpu"))
        print(f"{system:8} {wall * 1e3:9.2f} ms a step, {cpu * 1e3:9.2f} ms of processor time")
    for system in [system for system in took if system != "torpor"]:
        pairs = list(zip(took["torpor"], took[system], strict=True))
        wall, cpu = (
            median(a.wall / b.wall for a, b in pairs),
            median(a.cpu / b.cpu for a, b in pairs),
        )
        print(f"torpor / {system:8} {wall:.3f}, {cpu:.3f} of processor time")
    share = agreeing / sum(turn.wall for turn in took["torpor"]) / options.steps
    print(f"agreement: {agreeing / total * 1e6:.0f} us a step, {share:.3%} of it")
    graphs = counters.get("CachedCompile", 0) + counters.get("UncachedCompile", 0)
    print(f"graphs: {graphs / total:g} a step, {counters.get('InterpretedGraph', 0)} interpreted")
    losses = [(a.loss, b.loss) for a, b in zip(turns["torpor"], turns["eager"], strict=True)]
    print(f"losses: {max(abs(a / b - 1) for a, b in losses):.1e} off eager's at most")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--turns", type=int, default=15, help="that are measured")
    parser.add_argument("--warm", type=int, default=5, help="turns before those")
    parser.add_argument("--steps", type=int, default=5, help="of a turn")
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--without", choices=("compile",), nargs="*", default=())
    options = parser.parse_args()
    size = replace(Size(), layers=6, width=options.width, batch=options.batch)
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_rank, args=(folder, options, size), nprocs=options.ranks)


if __name__ == "__main__":
    main()
