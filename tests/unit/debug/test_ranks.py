"""Who waited for whom, from numbers; sequences of collectives that differ."""

from __future__ import annotations

import pytest

from torpor.debug.ranks import RankTraffic, straggler_of
from torpor.debug.replay_ranks import compare
from torpor.errors import DivergenceError


def _ranks(*waited: float) -> tuple[RankTraffic, ...]:
    return tuple(RankTraffic(rank, 10, 1024, seconds) for rank, seconds in enumerate(waited))


def test_the_rank_that_waits_least_is_named_if_the_others_wait_for_long() -> None:
    assert straggler_of(_ranks(1.0, 0.1, 0.9), seconds=10.0) == 1


@pytest.mark.parametrize("waited", [(0.01, 0.001), (1.0, 0.9, 1.1), (1.0,), ()])
def test_nobody_is_named_for_little(waited: tuple[float, ...]) -> None:
    assert straggler_of(_ranks(*waited), seconds=10.0) is None


def test_sequences_that_differ_are_told_with_both_lines() -> None:
    one = [("all_reduce(float32[4], sum)", "a.py:1"), ("all_reduce(float32[8], sum)", "a.py:2")]
    compare(one, 0, list(one), 1)
    with pytest.raises(DivergenceError, match="collective 1 of") as raised:
        compare(one, 0, one[:1], 1)
    assert "a.py:2" in str(raised.value)
    assert "the end of its record" in str(raised.value)
