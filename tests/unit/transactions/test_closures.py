"""Functions for the end of a step: in order, once, errors told at the step after."""

import threading
from collections.abc import Iterator

import pytest

from torpor.transactions import closures


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    yield
    closures.run()
    closures.wait()


def test_closures_run_once_in_order_with_their_arguments() -> None:
    ran: list[int] = []
    closures.at_step_end(ran.append, 1)
    closures.at_step_end(ran.append, 2)
    assert ran == []
    closures.run()
    closures.run()
    assert ran == [1, 2]


def test_a_closure_may_ask_for_another_which_waits_for_the_next_step() -> None:
    ran: list[str] = []

    def first() -> None:
        ran.append("first")
        closures.at_step_end(ran.append, "second")

    closures.at_step_end(first)
    closures.run()
    assert ran == ["first"]
    closures.run()
    assert ran == ["first", "second"]


def test_asynchronous_closures_do_not_hold_up_the_step() -> None:
    gate = threading.Event()
    ran: list[int] = []
    closures.at_step_end(gate.wait, 30, run_async=True)
    closures.at_step_end(ran.append, 1, run_async=True)
    closures.run()
    assert ran == []
    gate.set()
    closures.wait()
    assert ran == [1]


def test_an_error_of_an_asynchronous_closure_is_raised_once_at_the_next_step() -> None:
    def fail() -> None:
        raise ValueError("broken")

    closures.at_step_end(fail, run_async=True)
    closures.run()
    closures._worker.jobs.join()
    with pytest.raises(ValueError, match="broken"):
        closures.run()
    closures.run()


def test_what_cannot_be_called_is_refused_at_once() -> None:
    with pytest.raises(TypeError, match="int"):
        closures.at_step_end(3)  # type: ignore[arg-type]  # the mistake
