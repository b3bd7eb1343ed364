"""Random programs give the same bits eagerly and lazily, wherever they are synced or read.

`TORPOR_PROPERTY_EXAMPLES=5000` runs that many fresh examples; without it, a fixed slice.
"""

import math
import os

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import torpor
from tests.comparison import PLACES, Put, assert_same
from tests.property.programs import ALIASING, EVERYTHING, Program, programs, run

# A program put together at random may deserve eager's warnings (a cast from complex, say).
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

EXAMPLES = int(os.environ.get("TORPOR_PROPERTY_EXAMPLES", "0"))

thorough = settings(
    max_examples=EXAMPLES or 150,
    derandomize=not EXAMPLES,
    deadline=None,
    database=None,
    suppress_health_check=list(HealthCheck),
)
placed = pytest.mark.parametrize("place", PLACES)


def _compare(program: Program, place: str) -> None:
    torch.manual_seed(program.seed)
    eager = [leaf.clone() for leaf in program.leaves]
    expected = run(program, eager)
    state = torch.get_rng_state()
    torch.manual_seed(program.seed)
    put = Put(place)
    lazy = [put(leaf) for leaf in program.leaves]
    got = run(program, lazy)
    assert_same(_plain_numbers(got), _plain_numbers(expected), "reads")
    assert_same(lazy, eager, "t")
    offsets = [t.storage_offset() for t in eager]
    assert [t.storage_offset() for t in lazy] == offsets, "other storage offsets"
    torpor.sync(wait=True)
    assert torch.equal(torch.get_rng_state(), state), "the generator is elsewhere"


def _plain_numbers(values: object) -> object:
    """NaN is no equal of itself: say it by name."""
    if isinstance(values, (list, tuple)):
        return [_plain_numbers(value) for value in values]
    if isinstance(values, complex):
        return _plain_numbers([values.real, values.imag])
    return "nan" if isinstance(values, float) and math.isnan(values) else values


@placed
@thorough
@given(program=programs(EVERYTHING))
def test_a_random_program_gives_eagers_bits(place: str, program: Program) -> None:
    _compare(program, place)


@placed
@thorough
@given(program=programs(ALIASING, most=20))
def test_a_random_aliasing_program_gives_eagers_bits(place: str, program: Program) -> None:
    _compare(program, place)


@placed
@settings(thorough, max_examples=max(EXAMPLES // 3, 30))
@given(program=programs(EVERYTHING))
def test_a_random_program_run_three_times_gives_eagers_bits_each_time(
    place: str, program: Program
) -> None:
    """The second and third run meet interned nodes, cached graphs and promoted numbers."""
    for _ in range(3):
        _compare(program, place)


@placed
@settings(thorough, max_examples=max(EXAMPLES // 3, 30))
@given(program=programs(EVERYTHING), cap=st.integers(1, 6))
def test_a_random_program_cut_at_every_few_nodes_gives_eagers_bits(
    place: str, program: Program, cap: int
) -> None:
    before = torpor.config.max_trace_nodes
    torpor.config.max_trace_nodes = cap
    try:
        _compare(program, place)
    finally:
        torpor.config.max_trace_nodes = before
