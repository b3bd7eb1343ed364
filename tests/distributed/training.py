"""What ranks run in the tests of this folder: each program eagerly, and lazily in several ways."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import torpor
from torpor.distributed.sharded import shard_parameters
from torpor.execute.sync import PLANS
from torpor.observe.events import EVENTS

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))  # scripts: they import each other

from small_gpt import GPT, batches, train
from tensor_parallel import split

STEPS = 5
Spread = Callable[[nn.Module, Any], nn.Module]
"""Puts a model onto the ranks of a mesh."""


def tensor(model: nn.Module, mesh: Any) -> nn.Module:
    """Columns and rows."""
    return split(model, mesh)


def sequence(model: nn.Module, mesh: Any) -> nn.Module:
    """Columns and rows, and the sequence between them."""
    return split(model, mesh, sequence=True)


def copies(model: nn.Module, mesh: Any) -> nn.Module:
    """The whole of it on every rank, in buckets as they are in use."""
    return DistributedDataParallel(model, bucket_cap_mb=0.1)


def sharded(model: nn.Module, mesh: Any) -> nn.Module:
    """Shards, gathered by redistribution."""
    return shard_parameters(model, mesh)


def fsdp(model: nn.Module, mesh: Any) -> nn.Module:
    """Shards, gathered by `fully_shard`."""
    for block in model.blocks:  # type: ignore[union-attr]  # of a GPT
        fully_shard(block, mesh=mesh)  # type: ignore[arg-type]  # a module
    return fully_shard(model, mesh=mesh)


class Outcome(NamedTuple):
    """What a rank found in training."""

    losses: list[float]
    made: list[int]  # graphs compiled in each step
    run: list[int]  # graphs run in each step
    lazy: bool
    shards: bool  # `module.weight` is what `parameters()` has
    parameters: list[torch.Tensor]


def trained(spread: Spread, how: str, backend: str = "reference", layers: int = 2) -> Outcome:
    """Train a GPT: `how` is eager, or where torpor comes in."""
    with torpor.using(backend):
        return _trained(spread, how, layers)


def _trained(spread: Spread, how: str, layers: int) -> Outcome:
    torch.manual_seed(0)
    model: nn.Module = GPT(layers, width=32)
    model = torpor.lazy(model) if how == "lazy first" else model
    model = model.to("lazy") if how == "device" else model
    mesh = init_device_mesh("lazy" if how == "device" else "cpu", (dist.get_world_size(),))
    model = spread(model, mesh)
    model = torpor.lazy(model) if how == "lazy" else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if how == "enable":
        torpor.enable()
    try:
        losses, made, run = _counted(model, optimizer, _data(spread, how))
    finally:
        torpor.disable()
    whole = [torpor.eager(_whole(p).detach()).cpu() for p in model.parameters()]
    lazy = any(map(torpor.is_lazy, model.parameters()))
    head = getattr(model, "module", model).head
    shards = head.weight is dict(head.named_parameters())["weight"]
    return Outcome(losses, made, run, lazy, shards, whole)


def _whole(parameter: Any) -> torch.Tensor:
    whole: torch.Tensor = getattr(parameter, "full_tensor", lambda: parameter)()
    return whole


def _data(spread: Spread, how: str) -> Iterable[torch.Tensor]:
    """Ranks that share one model see the same data."""
    part = (0, 1) if spread in (tensor, sequence) else (dist.get_rank(), dist.get_world_size())
    return [t.to("lazy") if how == "device" else t for t in batches(STEPS, 8, *part)]


def _counted(
    model: nn.Module, optimizer: Any, data: Iterable[torch.Tensor]
) -> tuple[list[float], list[int], list[int]]:
    losses: list[float] = []
    made, run = [], []
    for tokens in data:
        torpor.metrics.reset()
        losses += train(model, optimizer, [tokens])
        counters = torpor.metrics.counters()
        made.append(counters.get("UncachedCompile", 0))
        run.append(made[-1] + counters.get("CachedCompile", 0))
    return losses, made, run


def all_trained(
    runs: list[tuple[Spread, str]], backend: str = "reference", layers: int = 2
) -> dict[tuple[str, str], Outcome]:
    """Outcomes by name and how."""
    return {(spread.__name__, how): trained(spread, how, backend, layers) for spread, how in runs}


def trained_in_buckets() -> tuple[list[float], list[float], int, int]:
    """Losses of sharded training as eager has them, and in buckets; collectives run in both."""
    found = []
    for torpor.config.bucket_bytes in (0, 1 << 20):
        torpor.metrics.reset()
        PLANS.clear()  # those of the other setting
        losses = trained(sharded, "lazy").losses
        events = [event for event in EVENTS if event.kind == "collective"]
        found.append((losses, len(events)))
    torpor.config.bucket_bytes = 0
    (one, many), (other, few) = found
    return one, other, many, few
