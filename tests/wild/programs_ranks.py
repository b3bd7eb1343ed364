"""Two processes that train together."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from tests.wild.placements import Placement, program
from tests.wild.synthetic import clusters


def _worker(rank: int, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    if name == "enable":
        import torpor

        torpor.enable()
    store = f"file://{folder}/store"  # no port that somebody else may take
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=2)
    try:
        found = _train(rank, Placement(name, Path(folder)))
        if rank == 0:
            torch.save(_plain(found, name), Path(folder) / "found.pt")
    finally:
        dist.destroy_process_group()


def _plain(found: dict[str, Any], name: str) -> dict[str, Any]:
    if name == "eager":
        return found
    import torpor

    plain: dict[str, Any] = torpor.eager(found)
    return plain


def _train(rank: int, how: Placement) -> dict[str, Any]:
    points, labels = clusters(96)
    data = TensorDataset(torch.from_numpy(points), torch.from_numpy(labels))
    sampler = DistributedSampler(data, num_replicas=2, rank=rank, shuffle=True, seed=1)
    loader = DataLoader(data, batch_size=8, sampler=sampler)
    torch.manual_seed(rank)
    model = how.model(nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)))
    together = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for x, y in loader:
            optimizer.zero_grad()
            loss = F.cross_entropy(together(x.to(how.device)), y.to(how.device))
            loss.backward()
            optimizer.step()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            losses.append(mean.item() / 2)
    everybodys = [None, None]
    dist.all_gather_object(everybodys, model[0].weight.sum().item())
    dist.barrier()
    return {"losses": losses, "state": model.state_dict(), "same": everybodys[0] == everybodys[1]}


@program(placements=("enable", "lazy"))
def two_ranks(how: Placement) -> dict[str, Any]:
    """DistributedDataParallel on gloo, each rank with its half of the data."""
    mp.spawn(_worker, args=(how.name, str(how.folder)), nprocs=2)
    found: dict[str, Any] = torch.load(how.folder / "found.pt", weights_only=False)
    return found
