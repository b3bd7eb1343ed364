"""Phases: what the program's own threads do in torpor, each moment counted once."""

from __future__ import annotations

import threading

import pytest

from torpor.observe import phases
from torpor.observe.phases import AWAY, PLANNING, RUNNING, WAITING, mark_as_background, phase, spent


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing spent yet, on a clock that goes on by a second whenever it is asked."""
    monkeypatch.setattr(phases, "TOTALS", dict.fromkeys(phases.TOTALS, 0.0))
    monkeypatch.setattr(AWAY, "seconds", 0.0)
    monkeypatch.setattr(AWAY, "before", dict(phases.TOTALS))
    seconds = iter(range(1000))
    monkeypatch.setattr(phases, "perf_counter", lambda: float(next(seconds)))


def test_a_moment_counts_for_the_innermost_phase() -> None:
    with phase(WAITING), phase(PLANNING), phase(RUNNING):
        pass
    assert spent() == {"planning": 2.0, "compiling": 0.0, "running": 1.0, "waiting": 2.0}
    assert AWAY.seconds == 5.0


def test_phases_that_follow_one_another_inside_another_are_all_taken_off_it() -> None:
    with phase(WAITING):
        for _ in range(3):
            with phase(RUNNING):
                pass
    assert (spent()[WAITING], spent()[RUNNING]) == (4.0, 3.0)


def test_a_phase_that_fails_is_over() -> None:
    with pytest.raises(KeyError), phase(WAITING), phase(RUNNING):
        raise KeyError
    with phase(PLANNING):
        pass
    assert (spent()[WAITING], spent()[RUNNING], spent()[PLANNING]) == (2.0, 1.0, 1.0)


def test_threads_beside_the_program_do_not_count() -> None:
    def work() -> None:
        mark_as_background()
        with phase(RUNNING):
            pass

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert not any(spent().values())
    assert AWAY.seconds == 0.0


def test_a_reset_begins_anew() -> None:
    with phase(RUNNING):
        pass
    AWAY.restart()
    with phase(WAITING):
        pass
    assert (spent()[RUNNING], spent()[WAITING]) == (0.0, 1.0)
