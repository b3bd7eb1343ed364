"""DTensors whose parts are lazy, and modules made of them, on two ranks: as eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.distributed.dtensors import LAZY, READS, RESULTS, compare_all
from tests.distributed.ranks import Ranks


@pytest.fixture(scope="module")
def found(two: Ranks) -> list[dict[str, Any]]:
    return two.run(compare_all)


@pytest.mark.parametrize("name", RESULTS)
def test_results_are_pending_and_then_eagers(found: list, name: str) -> None:
    for rank in found:
        assert rank[name] == (True, True, True, True)


@pytest.mark.parametrize("name", READS)
def test_reads_give_what_eager_gives(found: list, name: str) -> None:
    for rank in found:
        eager, lazy = rank[name]
        assert eager == lazy


def test_torpors_functions_look_into_dtensors(found: list) -> None:
    for rank in found:
        assert [name for name, holds in rank["conversions"].items() if not holds] == []


@pytest.mark.parametrize(("name", "how"), LAZY)
def test_training_split_over_ranks_is_eagers(found: list, name: str, how: str) -> None:
    for rank in found:
        lazy, eager = rank["trained"][name, how], rank["trained"][name, "eager"]
        assert lazy.lazy
        assert lazy.losses == eager.losses
        pairs = zip(lazy.parameters, eager.parameters, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("name", "how"), LAZY)
def test_a_step_is_one_graph_which_comes_back(found: list, name: str, how: str) -> None:
    for rank in found:
        outcome = rank["trained"][name, how]
        assert (outcome.made[-1], outcome.run[-1]) == (0, 1)
