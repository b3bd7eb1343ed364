"""Checkpoints of sharded, lazy state: written by four ranks, read by two and by one."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest

from tests.distributed.checkpoints import SPREADS, read_both, write
from tests.distributed.ranks import Ranks, ranks


class _Found(NamedTuple):
    written: list[dict[str, Any]]
    by_two: list[list[dict[str, Any]]]
    by_one: list[list[dict[str, Any]]]


@pytest.fixture(scope="module")
def found(two: Ranks, four: Ranks, tmp_path_factory: pytest.TempPathFactory) -> _Found:
    folder = tmp_path_factory.mktemp("checkpoints")
    written = four.run(write, folder)
    with ranks(1) as one:
        return _Found(written, two.run(read_both, folder), one.run(read_both, folder))


@pytest.mark.parametrize("spread", [spread.__name__ for spread in SPREADS])
def test_four_ranks_train_as_eager_does(found: _Found, spread: str) -> None:
    for rank in found.written:
        assert rank[f"{spread}True"] == rank[f"{spread}False"]


@pytest.mark.parametrize("spread", [spread.__name__ for spread in SPREADS])
@pytest.mark.parametrize("readers", ["by_two", "by_one"])
def test_fewer_ranks_go_on_as_eager_does(found: _Found, spread: str, readers: str) -> None:
    for eager, lazy in getattr(found, readers):
        losses = [by[f"{spread}{written}"] for by in (eager, lazy) for written in (False, True)]
        assert losses == [losses[0]] * 4
        assert losses[0][1]  # it is as lazy as it was


@pytest.mark.parametrize("readers", ["by_two", "by_one"])
def test_fewer_ranks_find_the_losses_of_four(found: _Found, readers: str) -> None:
    wanted = found.written[0]["shardedTrue"]
    for _, lazy in getattr(found, readers):
        losses, _ = lazy["shardedTrue"]
        assert losses == pytest.approx(
            wanted, rel=1e-5
        )  # sums over ranks are taken in another order


def test_what_is_pending_is_computed_and_saved(found: _Found) -> None:
    assert [rank["pending"] for rank in found.written] == [(True, True)] * 4


def test_a_checkpoint_written_meanwhile_holds_what_was_there_when_it_began(found: _Found) -> None:
    assert [rank["meanwhile"] for rank in found.written] == [(True, True)] * 4


def test_a_whole_state_is_collected_and_spread(found: _Found) -> None:
    assert [rank["whole"] for rank in found.written] == [True] * 4
