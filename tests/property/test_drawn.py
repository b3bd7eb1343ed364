"""Drawn programs give what eager gives: a fixed slice of `make sweep-drawn`.

Views, writes through them, `out=`, `set_`, sizes that become symbols, reads and cuts in between;
values, strides, dtypes and types of errors.
"""

from __future__ import annotations

import pytest

import torpor
from tests.property.drawn import Drawn, Program, draw
from tests.property.drawn_run import compare, minimise, probe

SEEDS = range(200, 260)
COMPILED_SEEDS = range(300, 310)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_drawn_program_gives_eagers_bits(seed: int) -> None:
    program = probe(draw(seed))
    found = compare(program, exact=True)
    assert found is None, f"{found}\n{program.text()}"


@pytest.mark.parametrize("seed", COMPILED_SEEDS)
def test_a_drawn_program_gives_eagers_numbers_compiled(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every graph is compiled by Inductor when it is first met."""
    monkeypatch.setattr(torpor.config, "compile_after", 0)
    program = probe(draw(seed, stable=True))
    with torpor.using("inductor"):
        found = compare(program, exact=False)
    assert found is None, f"{found}\n{program.text()}"


# -- the tool itself -----------------------------------------------------------------------------


def _program(*lines: Drawn) -> Program:
    leaf = Drawn("L(leaf((4,), torch.float32))", "s0")
    return Program(0, (leaf,), lines, sized=False, place="concrete", reads_late=False)


def test_a_planted_fault_is_found_and_made_small(monkeypatch: pytest.MonkeyPatch) -> None:
    lazy = torpor.lazy
    monkeypatch.setattr(torpor, "lazy", lambda tensor: lazy(tensor * 2))
    program = _program(Drawn("s0 + 1", "t1"), Drawn("t1.sin()", "t2"), Drawn("S()"))
    found = compare(program, exact=True)
    assert found is not None
    program, found = minimise(program, found, exact=True)
    assert (found.kind, len(program)) == ("values", 1)


def test_an_error_that_only_one_of_them_raises_is_a_difference(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lazy = torpor.lazy
    monkeypatch.setattr(torpor, "lazy", lambda tensor: lazy(tensor.view(2, 2)))
    found = compare(_program(Drawn("s0.select(0, 3)", "t1")), exact=True)
    assert found is not None
    assert found.kind == "events"


@pytest.mark.parametrize(
    ("line", "stays"),
    [
        (Drawn("s0[::2].copy_(s0[:2])", writes=("s0",), reads=("s0",)), False),
        (Drawn("s0.add_(s0)", writes=("s0",), reads=("s0",), by_element=True), True),
        (Drawn("s0.mul_(2)", writes=("s0",)), True),
        (Drawn("s0.expand(2, 4).add_(1)", writes=("s0",)), True),  # eager refuses
    ],
)
def test_what_eager_leaves_undefined_is_left_out(line: Drawn, stays: bool) -> None:
    assert (len(probe(_program(line)).lines) == 1) is stays


def test_a_seed_always_gives_the_same_program() -> None:
    assert draw(5).text() == draw(5).text() != draw(6).text()
