"""Six layers of GPT on several ranks, in each way there is: as eager, and one graph a step."""

from __future__ import annotations

import pytest
import torch

from tests.distributed import training
from tests.distributed.ranks import Ranks
from tests.distributed.training import Outcome

SPREADS = [training.copies, training.tensor, training.sharded]
LAYERS = 6


@pytest.fixture(scope="module")
def found(two: Ranks) -> list[dict[tuple[str, str], Outcome]]:
    runs = [(spread, how) for spread in SPREADS for how in ("eager", "lazy first")]
    return two.run(training.all_trained, runs, "reference", LAYERS)


@pytest.mark.parametrize("name", [spread.__name__ for spread in SPREADS])
def test_losses_and_parameters_are_eagers_and_a_step_is_one_graph(found: list, name: str) -> None:
    for rank in found:
        lazy, eager = rank[name, "lazy first"], rank[name, "eager"]
        assert lazy.losses == eager.losses
        pairs = zip(lazy.parameters, eager.parameters, strict=True)
        assert all(torch.equal(a, b) for a, b in pairs)
        assert (lazy.made[-1], lazy.run[-1]) == (0, 1)


def test_collectives_in_buckets_are_fewer_and_losses_the_same(two: Ranks) -> None:
    for losses, in_buckets, many, few in two.run(training.trained_in_buckets):
        assert in_buckets == pytest.approx(losses, rel=1e-6)
        assert many - few > 60  # the others are reads of parameters, after training
