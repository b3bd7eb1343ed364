"""Ranks that fall apart: each living one gets a named error in time, and keeps its parameters."""

from __future__ import annotations

import os
import signal
import time

import pytest

from tests.distributed.programs import fall_apart, warm_up
from tests.distributed.ranks import Ranks, ranks
from tests.distributed.switching import fail_strictly

DEADLINE = 10.0
DIVERGED, RANK = "DivergenceError", "RankError"


@pytest.mark.parametrize("when", ["", "first "])
@pytest.mark.parametrize(
    ("kind", "error"),
    [("branch", DIVERGED), ("order", DIVERGED), ("size", DIVERGED), ("nap", RANK)],
)
@pytest.mark.parametrize("size", [2, 3])
def test_all_ranks_raise(four: Ranks, size: int, kind: str, error: str, when: str) -> None:
    if kind == "nap" and size == 3:
        pytest.skip("nothing but time is different from two ranks")
    for answer in four.run(fall_apart, when + kind, size)[:size]:
        name, text, seconds, parameters, done = answer
        assert name == error, text
        assert parameters == [1.0 + done] * 4, "a step that failed has changed them"
        assert done <= 2
        assert seconds < DEADLINE
        if error == DIVERGED:
            assert text.count("recorded at: programs.py") >= 2, text


def test_an_op_that_fails_on_one_rank_ends_the_step_of_all(four: Ranks) -> None:
    one, other = four.run(fall_apart, "index", 2)[:2]
    assert one[0] == RANK
    assert "rank 1 has left its step" in one[1]
    assert other[0] == "IndexError"
    assert max(one[2], other[2]) < DEADLINE


def test_a_compile_that_fails_on_one_rank_ends_the_step_of_all(four: Ranks) -> None:
    one, other = four.run(fail_strictly)[:2]
    assert one[0] == RANK
    assert "rank 1 has left its step: CompileError" in one[1]
    assert other[0] == "CompileError"
    assert max(one[2], other[2]) < DEADLINE
    assert one[3] == other[3] == [1.0] * 4


def test_a_rank_whose_plans_are_forgotten_goes_on(four: Ranks) -> None:
    for name, text, _, parameters, done in four.run(fall_apart, "cache", 2)[:2]:
        assert (name, done) == ("", 4), text
        assert parameters == [5.0] * 4


@pytest.mark.parametrize("sent", [signal.SIGKILL, signal.SIGINT])
@pytest.mark.parametrize("kind", ["sleep", "first sleep"])
def test_a_rank_that_is_killed_or_interrupted_is_missed(sent: int, kind: str) -> None:
    with ranks(2) as two:
        two.run(warm_up)
        two.start(fall_apart, kind, 2)
        time.sleep(1.5)
        pid = two.processes[1].pid
        assert pid is not None
        os.kill(pid, sent)
        name, text, seconds, parameters, done = two.answer(0)
        assert name == RANK, text
        assert seconds < DEADLINE
        assert parameters == [1.0 + done] * 4
