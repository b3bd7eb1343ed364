"""Collectives are nodes: recorded, in order, each run once, with eager's numbers."""

from __future__ import annotations

import pytest

from tests.distributed.programs import COLLECTIVES, run_collective, train_data_parallel
from tests.distributed.ranks import Ranks

AT_ONCE = {"scatter_and_gather"}


@pytest.mark.parametrize("backend", ["reference", "inductor"])
@pytest.mark.parametrize("name", [program.__name__ for program in COLLECTIVES])
def test_a_collective_is_recorded_and_equals_eager(four: Ranks, name: str, backend: str) -> None:
    for equal, counters in four.run(run_collective, name, 4, backend):
        assert equal
        synced = [key for key in counters if key.startswith("Sync::") and key.endswith("_")]
        assert bool(synced) == (name in AT_ONCE)
        assert "Fallback" not in counters


@pytest.mark.parametrize("size", [2, 3, 4])
@pytest.mark.parametrize("how", ["lazy", "lazy:0"])
def test_data_parallel_is_one_graph_and_equals_eager(four: Ranks, size: int, how: str) -> None:
    for found in four.run(train_data_parallel, size, how, "reference")[:size]:
        assert found["losses"]
        assert found["parameters"]
        assert (found["cuts"], found["graphs"]) == (1, 1)


def test_data_parallel_on_inductor_is_one_graph(four: Ranks) -> None:
    for found in four.run(train_data_parallel, 2, "lazy", "inductor")[:2]:
        assert found["close"]
        assert found["cuts"] == 1
