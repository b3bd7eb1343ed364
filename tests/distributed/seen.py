"""What ranks see of their collectives, and record: what the tests of that compare."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import torpor
from tests.distributed.programs import group_of
from tests.distributed.training import GPT, batches, copies, train
from torpor.debug.ranks import GroupTraffic
from torpor.observe.events import EVENTS


def straggle(size: int) -> tuple[list[GroupTraffic], list[str], str] | None:
    """Rank 1 takes longer: what each is told, and what is on its timeline."""
    group = group_of(size)
    if group is None:
        return None
    weight = torpor.lazy(torch.ones(256))
    with torpor.using("reference"):
        for step in range(14):
            if step == 2:
                torpor.metrics.reset()
            if dist.get_rank() == 1:
                time.sleep(0.05)
            total = weight * 1
            dist.all_reduce(total, group=group)
            total.sum().item()
        dist.barrier(group=group)
        time.sleep(0.3)  # the others have said what they waited for at the last look
        weight = weight * 1
        dist.all_reduce(weight, group=group)
        torpor.sync(wait=True)
        dist.barrier(group=group)
        found = torpor.explain()
    own = [one for one in found.collectives if one.group == group.group_name]
    return own, [event.name for event in EVENTS if event.kind == "collective"], str(found)


def record(folder: Path) -> None:
    """Two steps of data parallel training, each rank to its file."""
    torch.manual_seed(0)
    model: Any = copies(torpor.lazy(GPT(1, width=16)), None)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = list(batches(3, 8, dist.get_rank(), dist.get_world_size()))
    with torpor.using("reference"):
        train(model, optimizer, data[:1])
        with torpor.record(folder / "steps.torpor"):
            train(model, optimizer, data[1:])
