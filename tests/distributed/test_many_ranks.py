"""More ranks than there are processes: what each does must not grow with their number."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.testing._internal.distributed.fake_pg  # registers the backend "fake"
from torch import nn
from torch.distributed import _functional_collectives as functional
from torch.nn.parallel import DistributedDataParallel

import torpor
from torpor.distributed.agreement import CollectiveStream
from torpor.distributed.ops import collectives_in
from torpor.distributed.switch import Switch
from torpor.execute.storage import TRACE
from torpor.ir.graph import Graph
from torpor.trace.values import value_of

ENTRIES = [(f"all_reduce(float32[{size}], sum)", "train.py:1") for size in range(4)]


class _Counting:
    """A store that counts what is asked of it, but for looks at what is not there yet."""

    def __init__(self, store: Any) -> None:
        self.store = store
        self.calls: Counter[str] = Counter()
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            found = getattr(self.store, name)(*args)
            if name != "check" or found:
                self.calls[name] += 1
                self.bytes += len(args[1]) if name == "set" else 0
            return found

        return call


def _agreed(size: int) -> list[_Counting]:
    """All ranks agree on a sequence, and run it again: what each has asked of the store."""
    store = dist.HashStore()
    stores = [_Counting(store) for _ in range(size)]
    streams = [CollectiveStream(one, rank, size) for rank, one in enumerate(stores)]

    def enter(stream: CollectiveStream) -> None:
        for _ in range(3):
            stream.enter(ENTRIES)
            stream.look()

    threads = [threading.Thread(target=enter, args=(stream,)) for stream in streams]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert all(stream.broken is None for stream in streams)
    return stores


@pytest.mark.parametrize("size", [2, 64])
def test_what_a_rank_asks_of_the_store_does_not_grow_with_ranks(size: int) -> None:
    for one in _agreed(size):
        # the first rank: a text, that it is awaited, three posts; others: three posts and the text
        assert one.calls["set"] <= 5
        assert one.calls["get"] <= 4
        assert one.calls["add"] <= 1
        assert one.bytes < 1000


@contextmanager
def _one_of(size: int) -> Iterator[None]:
    dist.init_process_group("fake", store=dist.HashStore(), rank=0, world_size=size)
    try:
        yield
    finally:
        dist.destroy_process_group()


def _recorded(size: int) -> tuple[int, int, int]:
    """Of a warm step of one of `size` ranks: new nodes, graphs run, ops recorded."""
    with _one_of(size), torpor.using("reference"):
        model = torpor.lazy(nn.Sequential(*(nn.Linear(64, 64) for _ in range(4))))
        together = DistributedDataParallel(model, bucket_cap_mb=0.03)
        optimizer = torch.optim.SGD(together.parameters(), lr=0.1)
        for _ in range(6):
            torpor.metrics.reset()
            together(torpor.lazy(torch.ones(8, 64))).sum().backward()
            misses = TRACE.misses
            optimizer.step()
            optimizer.zero_grad()
        torpor.sync(wait=True)
        counters = torpor.metrics.counters()
        graphs = counters.get("CachedCompile", 0) + counters.get("UncachedCompile", 0)
        return misses, graphs, sum(torpor.metrics.recorded().values())


def test_what_is_recorded_does_not_grow_with_ranks() -> None:
    assert _recorded(2) == _recorded(64)
    assert _recorded(64)[:2] == (0, 1)


def test_a_functional_collective_does_not_wait_for_the_one_before() -> None:
    with _one_of(2), torpor.using("reference"):
        x = torpor.lazy(torch.ones(4))
        one = functional.all_reduce(x, "sum", dist.group.WORLD)
        other = functional.all_reduce(x + 1, "sum", dist.group.WORLD)
        first, second = collectives_in(Graph.of([value_of(one + 1), value_of(other + 1)], ()))
        assert second.args[1].node is first
        torpor.sync()


@pytest.mark.parametrize("rounds", [1, 2])
def test_ranks_switch_at_the_same_run(rounds: int) -> None:
    store = dist.HashStore()
    ranks = [Switch(CollectiveStream(store, rank, 4), "graph", rounds) for rank in range(4)]
    switched: list[set[int]] = [set() for _ in ranks]
    for run in range(1, 12):
        for number, rank in enumerate(ranks):
            if not rank.is_on:
                rank.begin_run()
            if run > 2 * number and not rank.said_ready:
                rank.tell_ready()
        for number, rank in enumerate(ranks):
            if rank.is_on:
                switched[number].add(run)
    assert min(map(min, switched)) == max(map(min, switched)) == 7 + rounds
    assert not any(rank.alone for rank in ranks)


def test_a_rank_that_runs_another_graph_waits_for_nobody() -> None:
    alone = Switch(CollectiveStream(dist.HashStore(), 1, 4), "graph", 1)
    alone.begin_run()
    assert not alone.is_on
    alone.begin_run()
    assert alone.is_on


def test_compiled_code_comes_in_parts_and_is_checked() -> None:
    store = dist.HashStore()
    first, other = (Switch(CollectiveStream(store, rank, 2), "graph", 1) for rank in range(2))
    first.announce("key")
    assert other.announced() == "key"
    assert not other.has_offer()
    saved = bytes(range(256)) * 10_000
    first.offer(saved)
    assert other.has_offer()
    assert other.take_offer() == saved
    store.set("graph/code/1", b"damaged")
    assert other.take_offer() is None
    first.forget_offer()
    assert not store.check(["graph/code/0"])


def test_too_much_code_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.distributed.switch.MOST_BYTES", 10)
    first = Switch(CollectiveStream(dist.HashStore(), 0, 2), "graph", 1)
    first.offer(bytes(11))
    assert first.take_offer() is None
