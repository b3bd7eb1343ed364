"""What is kept of what happened: bounded, with times, and what asks a tensor for what."""

from __future__ import annotations

import threading
import time

import pytest

from torpor import metrics
from torpor.errors import HiddenSync
from torpor.observe import events
from torpor.observe.events import EVENTS, STEP, asked_for, no_sync, refuse_read, span
from torpor.observe.phases import AWAY


@pytest.fixture(autouse=True)
def fresh() -> None:
    STEP.began = 0.0
    EVENTS.clear()


def test_a_span_is_an_event_even_if_it_fails() -> None:
    with pytest.raises(KeyError), span("run", "graph1"):
        raise KeyError
    (event,) = EVENTS
    assert (event.kind, event.name, event.thread) == ("run", "graph1", threading.get_ident())
    assert event.seconds >= 0
    assert "graph1" in repr(event)


def test_the_latest_events_are_kept() -> None:
    for number in range(events.MAX_EVENTS + 10):
        with span("run", str(number)):
            pass
    assert len(EVENTS) == events.MAX_EVENTS
    assert EVENTS[0].name == "10"


def test_a_reset_forgets_events() -> None:
    with span("run", "graph1"):
        pass
    metrics.reset()
    assert not EVENTS


def test_a_step_is_timed_without_what_it_waited(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([10.0, 17.0])
    metrics.reset()
    monkeypatch.setattr(events.time, "perf_counter", lambda: next(clock))
    STEP.begin()
    monkeypatch.setattr(AWAY, "seconds", AWAY.seconds + 5.0)
    STEP.end(new_nodes=0, now=17.0)
    monkeypatch.undo()
    assert STEP.last == 2.0
    assert metrics.timers()["Record"]["total"] == 2.0
    assert "RecordNew" not in metrics.timers()


def test_a_step_with_new_nodes_is_counted_apart() -> None:
    metrics.reset()
    STEP.begin()
    STEP.end(new_nodes=3, now=time.perf_counter())
    assert metrics.timers()["RecordNew"]["count"] == 1


def test_a_step_that_never_began_is_none() -> None:
    metrics.reset()
    STEP.end(new_nodes=3, now=time.perf_counter())
    assert metrics.timers() == {}
    assert not EVENTS


def test_reads_are_refused_inside_and_allowed_outside() -> None:
    with no_sync():
        with no_sync(), pytest.raises(HiddenSync):
            refuse_read()
        with pytest.raises(HiddenSync):
            refuse_read()
    refuse_read()


def test_other_threads_may_read() -> None:
    refused = []

    def read() -> None:
        try:
            refuse_read()
        except HiddenSync as error:
            refused.append(error)

    with no_sync():
        other = threading.Thread(target=read)
        other.start()
        other.join()
    assert refused == []


def test_what_is_asked_for_is_told_with_the_read() -> None:
    metrics.reset()
    with asked_for("bool"):
        events.was_read(start=0.0, made=0.0)
    events.was_read(start=0.0, made=0.0)
    assert [event.name for event in EVENTS] == ["bool", ""]
    assert set(metrics.line_names()) == {"Wait", "Wait::bool"}
