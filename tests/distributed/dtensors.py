"""DTensors on ranks: what their tests compare."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

import torpor
from tests.distributed import training

RUNS = [
    *((training.tensor, how) for how in ("eager", "lazy", "lazy first", "enable")),
    *((training.sequence, how) for how in ("eager", "lazy")),
]
LAZY = [(spread.__name__, how) for spread, how in RUNS if how != "eager"]


def _written(x: DTensor) -> DTensor:
    x.mul_(2).add_(1)
    return x


def _gradient(x: DTensor) -> DTensor:
    x = x.detach().requires_grad_()
    (x.redistribute(placements=[Replicate()]).sin() * x).sum().backward()
    assert x.grad is not None
    return x.grad


def _from_plain(x: DTensor) -> DTensor:
    """A plain part meets a lazy one."""
    local = torpor.eager(x.to_local().detach())
    return x + DTensor.from_local(local, x.device_mesh, x.placements, run_check=False)


RESULTS: Final[dict[str, Callable[[DTensor], DTensor]]] = {
    "elementwise": lambda x: x.exp() + 1,
    "shard to shard": lambda x: x.redistribute(placements=[Shard(1)]),
    "shard to replicate": lambda x: x.redistribute(placements=[Replicate()]),
    "replicate to shard": lambda x: x.redistribute(placements=[Replicate()]).redistribute(
        placements=[Shard(1)]
    ),
    "partial to replicate": lambda x: x.sum(0).redistribute(placements=[Replicate()]),
    "partial to shard": lambda x: DTensor.from_local(
        x.to_local(), x.device_mesh, [Partial()], run_check=False
    ).redistribute(placements=[Shard(0)]),
    "matmul": lambda x: x @ x.t(),
    "view": lambda x: x.view(6, 2, 2).transpose(0, 1) * 2,
    "write": _written,
    "gradient": _gradient,
    "a plain part": _from_plain,
    "clone": lambda x: x.clone(),
    "norm": lambda x: torch.linalg.vector_norm(x),
}
READS: Final[dict[str, Callable[[DTensor], Any]]] = {
    "item": lambda x: x.sum().full_tensor().item(),
    "item of a partial sum": lambda x: x.sum().item(),
    "tolist": lambda x: x.full_tensor().tolist(),
    "numpy": lambda x: x.full_tensor().numpy().tolist(),
    "equal": lambda x: torch.equal(x, x + 0),
    "repr": lambda x: repr(x),
    "bool": lambda x: bool((x.sum() > 0).full_tensor()),
}


def compare_all() -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    whole = torch.randn(6, 4, generator=torch.Generator().manual_seed(3))
    found: dict[str, Any] = {"trained": training.all_trained(RUNS)}
    for name, function in RESULTS.items():
        eager, lazy = (function(_make(whole, mesh, how)) for how in (False, True))
        facts = torpor.is_lazy(lazy), torpor.is_pending(lazy), eager.placements == lazy.placements
        found[name] = (*facts, torch.equal(eager.to_local(), torpor.eager(lazy).to_local()))
    for name, function in READS.items():
        found[name] = tuple(function(_make(whole, mesh, how)) for how in (False, True))
    found["conversions"] = _conversions(_make(whole, mesh, False))
    return found


def _make(whole: torch.Tensor, mesh: Any, lazy: bool) -> DTensor:
    made = distribute_tensor(whole.clone(), mesh, [Shard(0)], src_data_rank=None)
    converted: DTensor = torpor.lazy(made) if lazy else made
    return converted


def _conversions(x: DTensor) -> dict[str, bool]:
    lazy = torpor.lazy(x)
    twice = lazy * 2
    asked = torpor.graph(twice)
    torpor.sync(twice)
    scaled = (x.requires_grad_() * 3).exp()
    torpor.lazy(scaled).sum().backward()
    return {
        "lazy is a copy": lazy is not x and not torpor.is_lazy(x),
        "lazy of a lazy one is itself": torpor.lazy(lazy) is lazy,
        "eager of a plain one is itself": torpor.eager(x) is x,
        "graph is that of the part": "aten.mul" in asked,
        "sync computes it": not torpor.is_pending(twice),
        "gradients flow through lazy": torch.equal(x.grad.to_local(), (scaled * 3).to_local()),
    }
