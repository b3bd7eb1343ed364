"""DTensors made of lazy tensors: tensor, sequence and sharded data parallel."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.distributed.programs import load_checkpoint, save_checkpoint, train_in_parts
from tests.distributed.ranks import Ranks


@pytest.mark.parametrize("kind", ["tensor", "sequence", "redistributed"])
def test_a_step_on_dtensors_is_one_graph_and_equals_eager(four: Ranks, kind: str) -> None:
    assert four.run(train_in_parts, kind) == [(True, 1)] * 4


def test_fully_shard_equals_eager(four: Ranks) -> None:
    assert all(equal for equal, _ in four.run(train_in_parts, "fully_shard"))


def test_a_checkpoint_of_four_ranks_is_read_by_two_and_by_one(four: Ranks, tmp_path: Path) -> None:
    four.run(save_checkpoint, str(tmp_path))
    for size in (2, 1):
        assert four.run(load_checkpoint, str(tmp_path), size)[:size] == [True] * size
