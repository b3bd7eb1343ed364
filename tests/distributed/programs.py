"""What ranks run in the tests of this folder; each returns what is compared."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import torpor

Put = Callable[[Tensor], Tensor]


def group_of(size: int) -> Any:
    """A new group of the first ranks; None on the others."""
    group = dist.new_group(list(range(size)))
    return group if dist.get_rank() < size else None


def plain(tensor: Tensor) -> Tensor:
    return (
        torpor.eager(tensor.detach()).cpu() if torpor.is_lazy(tensor) else tensor.detach().clone()
    )


# -- collectives -----------------------------------------------------------------------------------


def all_reduce(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    twice = put(mine) * 2
    dist.all_reduce(twice, group=group)
    return [twice + 1]


def all_reduce_of_a_part(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    twice = put(mine) * 2
    dist.all_reduce(twice[2:5], group=group)
    return [twice + 1]


def all_reduce_waited_for_later(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    tensor = put(mine)
    work = dist.all_reduce(tensor, op=dist.ReduceOp.MAX, async_op=True, group=group)
    assert work is not None
    work.wait()
    return [tensor * 3]


def all_reduce_of_dead_and_equal(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    dist.all_reduce(put(mine), group=group)
    tensor = put(mine)
    dist.all_reduce(tensor, group=group)
    dist.all_reduce(tensor, group=group)
    return [tensor]


def broadcast(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    tensor = put(mine)
    dist.broadcast(tensor, dist.get_world_size(group) - 1, group=group)
    return [tensor]


def reduce(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    tensor = put(mine)
    dist.reduce(tensor, 0, group=group)
    return [tensor] if dist.get_rank() == 0 else []


def all_gather(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    size = dist.get_world_size(group)
    parts = [put(torch.zeros_like(mine)) for _ in range(size)]
    dist.all_gather(parts, put(mine) * 2, group=group)
    whole = put(torch.zeros(mine.numel() * size))
    dist.all_gather_into_tensor(whole, put(mine), group=group)
    return [*parts, whole]


def reduce_scatter(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    size = dist.get_world_size(group)
    one, other = put(torch.zeros_like(mine)), put(torch.zeros(2))
    dist.reduce_scatter(one, [put(mine) * k for k in range(size)], group=group)
    dist.reduce_scatter_tensor(other, put(mine)[: 2 * size], group=group)
    return [one, other]


def all_to_all(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    size = dist.get_world_size(group)
    parts = put(torch.zeros(2 * size))
    dist.all_to_all_single(parts, put(mine)[: 2 * size] * 2, group=group)
    return [parts]


def send_and_receive(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    received = put(torch.zeros_like(mine))
    works = [
        dist.isend(put(mine) * 2, (rank + 1) % size, group=group),
        dist.irecv(received, (rank - 1) % size, group=group),
    ]
    for work in works:
        assert work is not None
        work.wait()
    return [received]


def scatter_and_gather(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    size, first = dist.get_world_size(group), dist.get_rank(group) == 0
    part = put(torch.zeros_like(mine))
    dist.scatter(part, [put(mine) * k for k in range(size)] if first else None, 0, group=group)
    parts = [put(torch.zeros_like(mine)) for _ in range(size)] if first else None
    dist.gather(part + 1, parts, 0, group=group)
    return [part, *(parts or [])]


def plain_ones_in_between(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    tensor = put(mine)
    dist.all_reduce(tensor, group=group)
    if dist.get_rank() == 0:
        assert plain(tensor) is not None  # a read on one rank alone
    dist.barrier(group=group)
    names: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(names, dist.get_rank(), group=group)
    dist.all_reduce(tensor, group=group)
    return [tensor, torch.tensor(names)]


def functional(put: Put, mine: Tensor, group: Any) -> list[Tensor]:
    from torch.distributed import _functional_collectives as collectives

    x, size = put(mine), dist.get_world_size(group)
    return [
        collectives.all_reduce(x, "sum", group) + 1,
        collectives.all_gather_tensor(x, 0, group) + 1,
        collectives.reduce_scatter_tensor(x[: 2 * size], "sum", 0, group) + 1,
        collectives.broadcast(x, 0, group) * 2,
        *[each + 1 for each in collectives.all_reduce_coalesced([x, x * 2], "sum", group)],
        collectives.all_to_all_single(x[: 2 * size], None, None, group) + 1,
    ]


COLLECTIVES = (
    all_reduce, all_reduce_of_a_part, all_reduce_waited_for_later, all_reduce_of_dead_and_equal,
    broadcast, reduce, all_gather, reduce_scatter, all_to_all, send_and_receive, scatter_and_gather,
    plain_ones_in_between, functional,
)  # fmt: skip


def run_collective(name: str, size: int, backend: str) -> tuple[bool, dict[str, int]] | None:
    """Whether eager and torpor agree on a program, and what torpor counted."""
    group = group_of(size)
    if group is None:
        return None
    program = globals()[name]
    mine = torch.arange(8.0) + 10 * dist.get_rank()
    expected = program(lambda t: t.clone(), mine, group)
    with torpor.using(backend):
        torpor.metrics.reset()
        found = [plain(t) for t in program(lambda t: torpor.lazy(t.clone()), mine, group)]
    equal = len(expected) == len(found) and all(map(torch.equal, expected, found))
    return equal, dict(torpor.metrics.counters())


# -- training --------------------------------------------------------------------------------------


def _network() -> nn.Module:
    torch.manual_seed(0)
    layers = [part for _ in range(6) for part in (nn.Linear(64, 64), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(64, 10))


def _train(how: str, group: Any, steps: int) -> tuple[list[float], list[Tensor], dict[str, int]]:
    model = _network()
    model = torpor.lazy(model) if how == "lazy" else model.to(how if how == "lazy:0" else "cpu")
    together = DistributedDataParallel(model, process_group=group, bucket_cap_mb=0.03)
    optimizer = torch.optim.AdamW(together.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(dist.get_rank())
    device = next(model.parameters()).device
    losses = []
    for step in range(steps):
        if step == steps - 1:
            torpor.metrics.reset()
        x = torch.randn(8, 64, generator=generator).to(device)
        y = torch.randint(10, (8,), generator=generator).to(device)
        optimizer.zero_grad()
        loss = F.cross_entropy(together(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    counters = dict(torpor.metrics.counters())
    return [float(each) for each in losses], [plain(p) for p in model.parameters()], counters


def train_data_parallel(size: int, how: str, backend: str) -> dict[str, Any] | None:
    """DistributedDataParallel with small buckets: eager against torpor."""
    group = group_of(size)
    if group is None:
        return None
    expected = _train("cpu", group, 5)
    with torpor.using(backend):
        losses, parameters, counters = _train(how, group, 5)
    return {
        "losses": losses == expected[0],
        "close": torch.allclose(torch.tensor(losses), torch.tensor(expected[0]), rtol=1e-5),
        "parameters": all(map(torch.equal, parameters, expected[1])),
        "cuts": counters.get("MarkStep", 0),
        "graphs": sum(counters.get(n, 0) for n in ("CachedCompile", "UncachedCompile")),
    }


# -- faults ----------------------------------------------------------------------------------------


def _step(weight: Tensor, group: Any, kind: str, step: int) -> None:
    """One step of ranks that fall apart at the third, or before anything was agreed on."""
    now = step == (0 if kind.startswith("first") else 2)
    other = dist.get_rank(group) == 1 and now
    kind = kind.removeprefix("first ")
    one, two = weight * 2, weight * 3
    if other and kind in ("sleep", "nap"):
        time.sleep(12 if kind == "sleep" else 5)
    if other and kind == "size":
        one = torch.cat([one, one])
    if other and kind == "branch":
        dist.all_reduce(weight + 1, group=group)
    if other and kind == "index":
        one = one[torch.tensor([0, 1, 2, 999]).to(one.device)]
    first, second = (two.sum(), one) if other and kind == "order" else (one, two.sum())
    dist.all_reduce(first, group=group)
    dist.all_reduce(second, group=group)
    with torch.no_grad():
        weight += 1
    if other and kind == "cache":
        torpor.execute.sync.PLANS.clear()
    torpor.sync()


def warm_up() -> None:
    """Load all that a first step loads; from now on ranks that do not come are missed soon."""
    fall_apart("", dist.get_world_size())
    torpor.config.agreement_timeout = 5.0


def fall_apart(kind: str, size: int) -> tuple[str, str, float, list[float], int] | None:
    """The error a rank got, how long after the last good step, and what its parameters are."""
    group = group_of(size)
    if group is None:
        return None
    weight = torpor.lazy(torch.ones(4))
    done, start = 0, time.monotonic()
    patience = torpor.config.agreement_timeout
    if kind.endswith("nap"):
        torpor.config.agreement_timeout = 2.0
    try:
        with torpor.using("reference"):
            for step in range(4):
                start = time.monotonic()
                _step(weight, group, kind, step)
                done += 1
    except Exception as error:  # any: the test says which one it has to be
        name, text = type(error).__name__, str(error)
    else:
        name, text = "", ""
    finally:
        torpor.config.agreement_timeout = patience
    return name, text, time.monotonic() - start, plain(weight).tolist(), done


# -- tensors in parts ------------------------------------------------------------------------------


class Block(nn.Module):
    """A part of a transformer that can be split."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(self.norm(x))))  # type: ignore[no-any-return]  # untyped


class _Whole(nn.Module):
    """A parameter in parts, gathered where it is used; its gradient goes back to the parts."""

    def forward(self, part: Any) -> Any:
        from torch.distributed.tensor import Partial, Replicate

        whole = part.redistribute(placements=[Replicate()])
        return whole.to_local(grad_placements=[Partial("avg")])


def _in_parts(kind: str, model: nn.Module, size: int) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import Shard, distribute_tensor
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (size,))
    if kind == "tensor":
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        return parallelize_module(model, mesh, plan)
    if kind == "sequence":
        columns = ColwiseParallel(input_layouts=Shard(1))
        rows = {"norm": SequenceParallel(), "up": columns, "down": RowwiseParallel()}
        return parallelize_module(model, mesh, rows)
    if kind == "fully_shard":
        return fully_shard(model, mesh=mesh)
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)])
            module.register_parameter(name, nn.Parameter(part))
            nn.utils.parametrize.register_parametrization(module, name, _Whole(), unsafe=True)
    return model


def _train_in_parts(kind: str, lazy: bool) -> tuple[list[float], int]:
    torch.manual_seed(0)
    model: nn.Module = Block()
    model = _in_parts(kind, torpor.lazy(model) if lazy else model, dist.get_world_size())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    own_data = 0 if kind in ("tensor", "sequence") else dist.get_rank()
    losses = []
    for step in range(4):
        torpor.metrics.reset()
        x = torch.randn(8, 4, 16, generator=torch.Generator().manual_seed(step + 100 * own_data))
        optimizer.zero_grad()
        loss = model(torpor.lazy(x) if lazy else x).pow(2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [float(each) for each in losses], torpor.metrics.counters().get("CachedCompile", 0)


def train_in_parts(kind: str) -> tuple[bool, int]:
    """Whether losses are eager's, and how many graphs ran in the last step."""
    expected, _ = _train_in_parts(kind, lazy=False)
    with torpor.using("reference"):
        losses, graphs = _train_in_parts(kind, lazy=True)
    return losses == expected, graphs


# -- checkpoints -----------------------------------------------------------------------------------


def _parts_of(group: Any, lazy: bool) -> dict[str, Any]:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = DeviceMesh.from_group(group, "cpu")
    whole = torch.arange(24.0).reshape(6, 4)
    return {
        "parts": distribute_tensor(torpor.lazy(whole) if lazy else whole, mesh, [Shard(0)]),
        "whole": torpor.lazy(whole.clone()) if lazy else whole,
    }


def save_checkpoint(folder: str) -> None:
    """What is pending is computed before it is saved."""
    from torch.distributed import checkpoint

    state = {name: value * 2 for name, value in _parts_of(group_of(4), lazy=True).items()}
    assert torpor.is_pending(state["whole"])
    checkpoint.save(state, checkpoint_id=folder)


def load_checkpoint(folder: str, size: int) -> bool | None:
    """Whether another number of ranks finds what was saved."""
    from torch.distributed import checkpoint

    group = group_of(size)
    if group is None:
        return None
    state = _parts_of(group, lazy=True)
    checkpoint.load(state, checkpoint_id=folder, process_group=group)
    expected = torch.arange(24.0).reshape(6, 4) * 2
    return all(
        torch.equal(plain(t), expected) for t in (state["parts"].full_tensor(), state["whole"])
    )
