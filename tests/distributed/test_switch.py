"""Ranks that compile do not wait for each other, and take up compiled code at the same run."""

from __future__ import annotations

import pytest

from tests.distributed.ranks import Ranks
from tests.distributed.switching import switch, take_compiled_code


@pytest.mark.parametrize("kind", ["late", "forgets"])
def test_all_run_on_the_reference_until_the_last_has_compiled(four: Ranks, kind: str) -> None:
    found = four.run(switch, kind)[:2]
    (mine, slowest, weight), (theirs, _, same) = found
    assert mine == theirs
    assert mine == [False] * 5 + [True] * 5 or mine == [False] * 6 + [True] * 4
    assert slowest < 5
    assert weight == same == [1.0] * 4


def test_where_one_cannot_compile_none_takes_compiled_code_up(four: Ranks) -> None:
    for compiled, slowest, weight in four.run(switch, "fails")[:2]:
        assert compiled == [False] * 10
        assert slowest < 5
        assert weight == [1.0] * 4


def test_what_the_first_rank_has_compiled_is_taken_by_others(four: Ranks) -> None:
    (one, first), (other, second) = four.run(take_compiled_code, 100.0)[:2]
    assert first == second
    assert one["UncachedCompile"] == 1
    assert "UncachedCompile" not in other
    assert other["OfferTaken"] == other["DiskCacheWrite"] == 1
