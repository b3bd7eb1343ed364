"""The choice between recorded and eager, on programs that are numbers."""

import itertools
from collections.abc import Callable

import pytest

from torpor.adaptive.choice import EAGER, RECORDED, WARMING, Choice, Limits, ProcessFacts

CALL, STEP = 1, 2  # events


class Program:
    """A loop of calls and steps of an optimizer, on a clock of its own."""

    def __init__(
        self,
        eager: float,
        recorded: float,
        cold: float = 0.0,
        comes_back: Callable[[int], bool] = lambda step: True,
        cold_steps: int = 3,
        compiles_for: int = 0,
        can_change: Callable[[int], bool] = lambda step: True,
    ) -> None:
        self.eager, self.recorded, self.cold = eager, recorded, cold or recorded
        self.comes_back, self.cold_steps, self.can_change = comes_back, cold_steps, can_change
        self.compiles_for, self.compiled_at = compiles_for, -1
        self.choice = Choice(0.0, Limits(start=0.0))
        self.now = self.eager_s = 0.0
        self.graphs = self.in_recorded = self.done = 0
        self.changes: list[tuple[int, str]] = []
        self.drained: list[int] = []

    def run(self, steps: int) -> "Program":
        for _ in range(steps):
            self._step()
        return self

    def _step(self) -> None:
        cost = self._cost()
        self.now += cost
        self.eager_s += self.eager
        if self.choice.drain:
            self.drained.append(self.done)
        if self.choice.is_timing:
            self.choice.interval((STEP, CALL), cost / 4)
            self.choice.interval((CALL, STEP), cost * 3 / 4)
        self.done += 1
        if self.choice.step(ProcessFacts(self.graphs, 0, 0, self._is_compiling()), self.now):
            if not self.can_change(self.done):
                self.choice.refused("held", True)
                return
            self.choice.changed(self.now)
            self.changes.append((self.done, self.choice.phase))

    def _cost(self) -> float:
        if not self.choice.is_recorded:
            return self.eager
        self.in_recorded += 1
        if self.in_recorded <= self.cold_steps or not self.comes_back(self.done):
            self.graphs += 1
            return self.cold
        if self.in_recorded == self.cold_steps + 1:
            self.compiled_at = self.done + self.compiles_for
        return self.recorded

    def _is_compiling(self) -> bool:
        return self.done < self.compiled_at

    @property
    def ratio(self) -> float:
        return self.now / self.eager_s


def test_a_place_starts_eagerly_and_is_recorded_when_eager_is_known() -> None:
    program = Program(eager=0.01, recorded=0.005).run(6)
    assert program.changes == [(6, WARMING)]
    assert program.choice.eager_step == pytest.approx(0.01)


def test_what_is_faster_recorded_is_recorded_after_one_comparison() -> None:
    program = Program(eager=0.01, recorded=0.005, cold=0.05).run(400)
    assert [phase for _, phase in program.changes] == [WARMING, EAGER, RECORDED]
    assert program.changes[-1][0] < 50
    assert program.ratio < 0.6


def test_a_window_begins_and_ends_with_an_empty_queue() -> None:
    program = Program(eager=0.01, recorded=0.005).run(100)
    first, *others = program.drained
    window = Limits().window
    assert others == [first + window, first + 2 * window]


def test_a_tie_goes_to_recorded() -> None:
    program = Program(eager=0.01, recorded=0.0101).run(100)
    assert program.choice.phase == RECORDED


def test_what_is_slower_recorded_runs_eagerly_and_says_by_how_much() -> None:
    program = Program(eager=0.01, recorded=0.013).run(90)
    assert program.choice.phase == EAGER
    assert program.choice.reason == "a recorded step takes 1.30 times as long as eager's"


def test_graphs_that_never_come_back_cost_a_tenth_at_most_in_the_long_run() -> None:
    program = Program(eager=0.0005, recorded=0.03, comes_back=lambda _: False).run(50)
    assert program.choice.phase == EAGER
    assert program.choice.is_new_each_time
    assert "60.0 times as long" in program.choice.reason
    program.run(9950)
    assert program.ratio <= 1.1


def test_no_program_without_a_compiled_graph_is_slow_for_more_than_fifty_steps() -> None:
    for recorded in (0.011, 0.02, 0.1):
        program = Program(eager=0.01, recorded=recorded, comes_back=lambda _: False).run(50)
        assert program.choice.phase == EAGER
        before = program.now
        program.run(50)
        assert program.now - before == pytest.approx(0.5)


def test_attempts_become_seldom() -> None:
    program = Program(eager=0.01, recorded=0.011, comes_back=lambda _: False).run(5000)
    starts = [step for step, phase in program.changes if phase == WARMING]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert len(starts) > 3
    assert all(b > 1.5 * a for a, b in itertools.pairwise(gaps))


def test_a_program_that_settles_later_is_recorded_then() -> None:
    program = Program(eager=0.01, recorded=0.005, cold=0.02, comes_back=lambda step: step > 300)
    program.run(200)
    assert program.choice.phase == EAGER
    program.run(1500)
    assert program.choice.phase == RECORDED


def test_a_winner_whose_graphs_stop_coming_back_runs_eagerly_soon() -> None:
    program = Program(eager=0.01, recorded=0.005, cold=0.08, comes_back=lambda step: step < 300)
    program.run(299)
    assert program.choice.phase == RECORDED
    program.run(20)
    assert program.choice.phase == EAGER


def test_a_few_new_graphs_do_not_disturb_a_winner() -> None:
    program = Program(eager=0.01, recorded=0.005, cold=0.02, comes_back=lambda s: bool(s % 10))
    program.run(40)
    changes = len(program.changes)
    program.run(400)
    assert program.choice.phase == RECORDED
    assert len(program.changes) == changes


def test_a_winner_is_compared_again_now_and_then() -> None:
    program = Program(eager=0.01, recorded=0.005).run(100)
    program.recorded = 0.02
    program.run(600)
    assert program.choice.phase == EAGER


def test_while_a_graph_is_compiled_beside_it_runs_eagerly() -> None:
    program = Program(eager=0.01, recorded=0.005, compiles_for=200).run(20)
    assert program.choice.phase == EAGER
    assert not program.choice.reason
    program.run(150)
    assert program.choice.phase == EAGER
    program.run(100)
    assert program.choice.phase == RECORDED


def test_a_change_that_is_refused_is_tried_again_at_the_next_steps() -> None:
    program = Program(
        eager=0.01, recorded=0.1, comes_back=lambda _: False, can_change=lambda step: step % 2 == 0
    ).run(60)
    assert program.choice.phase == EAGER


def test_a_place_that_cannot_become_eager_is_recorded_and_says_why() -> None:
    program = Program(
        eager=0.01, recorded=0.1, comes_back=lambda _: False, can_change=lambda step: step < 8
    ).run(60)
    assert program.choice.phase == RECORDED
    assert program.choice.reason == "held"
    assert program.choice.is_decided


def test_a_step_that_takes_very_long_is_noticed_in_its_middle() -> None:
    choice = Choice(0.0)
    for i in range(6):
        choice.interval((STEP, CALL), 0.01)
        choice.step(ProcessFacts(0, 0, 0, False), 0.01 * i)
    choice.changed(0.1)
    for _ in range(3):
        choice.interval((STEP, CALL), 0.2)
    assert choice.is_overdrawn(1.0)


def test_kinds_of_intervals_are_compared_each_with_its_own() -> None:
    """Short and long steps: a window of long ones is not taken for a slow one."""
    choice = Choice(0.0)
    choice.eager = {(0, 1): [1.0], (0, 2): [10.0]}  # type: ignore[dict-item]
    choice._rivals = [({(0, 1): 1, (0, 2): 7}, 71.0)]
    assert choice.ratio() == pytest.approx(1.0)


@pytest.mark.parametrize("slower", [0.5, 1, 20])
def test_before_the_first_attempt_few_steps_are_timed(slower: float) -> None:
    program = Program(eager=0.005, recorded=0.005)
    program.choice = Choice(0.0, Limits(start=10.0))
    timed = 0
    while program.choice.phase == EAGER:
        timed += program.choice.is_timing
        program.eager = 0.005 if program.now < 4 else 0.005 * slower
        program.run(1)
    assert 10 <= program.now < 25  # a program that slows down while nobody looks starts later
    assert program.choice.eager_step > 0
    assert timed < max(program.done / 10, 50)


def test_a_short_script_is_not_recorded() -> None:
    program = Program(eager=0.125, recorded=0.05)
    program.choice = Choice(0.0)
    first = round(Limits().start / 0.125)
    program.run(first - 1)
    assert not program.changes
    program.run(1)
    assert program.changes == [(first, WARMING)]
