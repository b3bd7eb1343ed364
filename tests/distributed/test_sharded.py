"""Training with sharded parameters on two ranks: as eager, and one graph a step."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.distributed import training
from tests.distributed.ranks import Ranks
from tests.distributed.training import Outcome
from torpor.distributed.sharded import shard_parameters

RUNS = [
    *((training.sharded, how) for how in ("eager", "lazy", "lazy first", "enable", "device")),
    *((training.fsdp, how) for how in ("eager", "lazy", "lazy first", "enable", "device")),
]
LAZY = [
    (spread.__name__, how)
    for spread, how in RUNS
    if how != "eager" and (spread, how) != (training.fsdp, "enable")
]


@pytest.fixture(scope="module")
def outcomes(two: Ranks) -> list[dict[tuple[str, str], Outcome]]:
    return two.run(training.all_trained, RUNS)


def _same(found: Outcome, eager: Outcome) -> bool:
    pairs = zip(found.parameters, eager.parameters, strict=True)
    return found.losses == eager.losses and all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize(("name", "how"), LAZY)
def test_losses_and_parameters_are_eagers(outcomes: list, name: str, how: str) -> None:
    for rank in outcomes:
        assert rank[name, how].lazy
        assert _same(rank[name, how], rank[name, "eager"])


@pytest.mark.parametrize(("name", "how"), LAZY)
def test_a_step_is_one_graph_which_comes_back(outcomes: list, name: str, how: str) -> None:
    for rank in outcomes:
        assert (rank[name, how].made[-1], rank[name, how].run[-1]) == (0, 1)


def test_parameters_that_fully_shard_holds_stay_plain_under_enable(outcomes: list) -> None:
    for rank in outcomes:
        assert not rank["fsdp", "enable"].lazy
        assert _same(rank["fsdp", "enable"], rank["fsdp", "eager"])


def test_ranks_agree_and_so_do_the_two_kinds_of_sharding(outcomes: list) -> None:
    first, second = (rank["sharded", "eager"] for rank in outcomes)
    assert first.losses == second.losses == outcomes[0]["fsdp", "eager"].losses


def test_losses_fall(outcomes: list) -> None:
    losses = outcomes[0]["sharded", "lazy"].losses
    assert losses[-1] < losses[0]


def test_outside_of_forward_a_parameter_is_the_shard(outcomes: list) -> None:
    for rank in outcomes:
        assert rank["sharded", "lazy"].shards


def test_modules_that_keep_weights_in_a_list_are_refused() -> None:
    with pytest.raises(RuntimeError, match="use `fully_shard`"):
        shard_parameters(nn.LSTM(2, 2), mesh=None)
