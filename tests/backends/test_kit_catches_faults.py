"""The conformance kit finds every planted fault, and finds none in a sound backend."""

from __future__ import annotations

import pytest

from tests.backends import faults
from torpor.backend import Backend
from torpor.testing import test_buffers
from torpor.testing.run import Outcome, run_kit


def run(backend: type, *selection: str) -> Outcome:
    return run_kit(f"tests.backends.faults:{backend.__name__}", *selection)


@pytest.mark.parametrize("backend", faults.CAUGHT_BY, ids=lambda backend: backend.__name__)
def test_a_planted_fault_is_caught(backend: type) -> None:
    outcome = run(backend, faults.CAUGHT_BY[backend])
    assert outcome.card.points, outcome.output
    assert outcome.card.broken, f"{backend.__doc__} was not noticed\n{outcome.output}"
    assert not outcome.held


def test_the_sound_backend_passes_all_that_catches_faults() -> None:
    outcome = run(faults.Sound, *sorted(set(faults.CAUGHT_BY.values())))
    assert outcome.held, outcome.output
    assert not [p for p in outcome.card.points if p.outcome != "held"], outcome.output


def test_every_fault_in_the_file_is_planted() -> None:
    helpers = {faults.Sound, faults.Faulty, faults.Remembering, faults.Keeping}
    made = {
        thing
        for thing in vars(faults).values()
        if isinstance(thing, type)
        and issubclass(thing, Backend)
        and thing.__module__ == faults.__name__
    }
    assert made - helpers == set(faults.CAUGHT_BY)
    assert len(faults.CAUGHT_BY) >= 15


def test_every_point_about_buffers_has_a_fault_that_it_catches() -> None:
    points = {name for name in vars(test_buffers) if name.startswith("test_")}
    caught = {name.partition("::")[2].partition("[")[0] for name in faults.CAUGHT_BY.values()}
    assert points <= caught
