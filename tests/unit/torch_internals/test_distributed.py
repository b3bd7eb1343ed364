"""What torpor takes from torch.distributed."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"

from torpor import _torch


@pytest.fixture
def world() -> Iterator[Any]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield dist.group.WORLD
    finally:
        dist.destroy_process_group()


def test_is_distributed_while_there_is_a_process_group(world: Any) -> None:
    assert _torch.is_distributed()
    dist.destroy_process_group()
    assert not _torch.is_distributed()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def test_resolve_group_finds_a_group_by_name(world: Any) -> None:
    assert _torch.resolve_group(world.group_name) is world


def test_ranks_of_group_are_those_of_the_world(world: Any) -> None:
    assert _torch.ranks_of_group(world.group_name) == [0]


def test_store_of_a_group_keeps_what_ranks_set(world: Any) -> None:
    _torch.store_of(world).set("key", "value")
    assert _torch.store_of(world).get("key") == b"value"


def test_is_fake_group_where_nobody_else_is_there(world: Any) -> None:
    assert not _torch.is_fake_group(world)
    dist.destroy_process_group()
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=8)
    assert _torch.is_fake_group(dist.group.WORLD)


def test_rank_and_world_count_this_process_alone_without_a_group() -> None:
    assert _torch.rank_and_world() == (0, 1)


def test_ranks_of_a_group_are_in_its_order(world: Any) -> None:
    assert _torch.rank_and_world() == (0, 1)
    assert _torch.ranks_of_group(world.group_name) == [0]


def test_gloo_groups_of_threads_sum_over_them() -> None:
    store, tensors = dist.HashStore(), [torch.ones(2), torch.full((2,), 3.0)]

    def play(rank: int) -> None:
        group = _torch.gloo_group(store, rank, 2, 20.0)
        group.allreduce([tensors[rank]], dist.AllreduceOptions()).wait()

    threads = [threading.Thread(target=play, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert [tensor.tolist() for tensor in tensors] == [[4.0, 4.0]] * 2


def test_group_in_unboxes_what_an_op_is_called_with(world: Any) -> None:
    assert _torch.group_in(world.boxed()).group_name == world.group_name
    assert _torch.group_in(world) is world


def test_reduction_in_names_a_reduction_without_a_factor() -> None:
    assert _torch.reduction_in(dist.ReduceOp.MAX) == "max"
    assert _torch.reduction_in(dist._make_nccl_premul_sum(2.0)) is None


def test_reduction_has_a_name() -> None:
    assert _torch.reduction("max") == dist.ReduceOp.MAX


def test_finished_work_has_its_result() -> None:
    work = dist.Work.unbox(_torch.finished_work([torch.ones(2)], torch.device("cpu")))
    assert work.wait()
    assert torch.equal(work.get_future().value()[0], torch.ones(2))


def test_on_data_parallel_reducers_are_made_inside_the_given_context(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    monkeypatch.setattr(parallel, "__init__", parallel.__init__)
    monkeypatch.setattr(parallel, "_ddp_init_helper", parallel._ddp_init_helper)
    monkeypatch.setattr(dist.Reducer, "_rebuild_buckets", dist.Reducer._rebuild_buckets)
    seen: list[Any] = []

    def buckets(parameters: Any) -> Any:
        seen.append(len(list(parameters)))
        return nullcontext()

    _torch.on_data_parallel(seen.append, buckets)
    model = torch.nn.Linear(2, 2)
    made = parallel(model)
    made.reducer._rebuild_buckets()
    assert seen == [model, 2, 2]
