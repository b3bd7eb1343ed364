"""NCCL with one rank: collectives of a graph on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import torpor
from torpor.distributed.sharded import shard_parameters

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def _train(lazy: bool) -> list[float]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3)).cuda()
    together = DistributedDataParallel(torpor.lazy(model) if lazy else model)
    optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(step)).cuda()
        optimizer.zero_grad()
        loss = together(torpor.lazy(x) if lazy else x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def alone() -> Iterator[None]:
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()


@pytest.mark.usefixtures("alone")
def test_data_parallel_on_nccl_equals_eager() -> None:
    expected = _train(lazy=False)
    with torpor.using("reference"):
        assert _train(lazy=True) == expected


@pytest.mark.usefixtures("alone")
def test_data_parallel_on_nccl_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", 1)
    expected = _train(lazy=False)
    torpor.metrics.reset()
    with torpor.using("inductor"):
        assert _train(lazy=True) == pytest.approx(expected, rel=1e-5)
    assert torpor.metrics.counters()["UncachedCompile"] >= 1


@pytest.mark.usefixtures("alone")
def test_shards_on_nccl_equal_eager() -> None:
    found = []
    for lazy in (False, True):
        torch.manual_seed(0)
        model = shard_parameters(nn.Linear(8, 3).cuda(), init_device_mesh("cuda", (1,)))
        model = torpor.lazy(model) if lazy else model
        with torpor.using("reference"):
            loss = model(torch.ones(4, 8, device="cuda")).pow(2).mean()
            loss.backward()
            found.append((loss.item(), [p.grad.full_tensor().tolist() for p in model.parameters()]))  # type: ignore[union-attr]  # DTensors
    assert found[0] == found[1]
