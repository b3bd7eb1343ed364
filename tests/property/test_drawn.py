"""Drawn programs give what eager gives: a fixed slice of `make sweep-drawn`.

Views, writes through them, `out=`, `set_`, sizes that become symbols, reads and cuts in between;
values, strides, dtypes and types of errors.
"""

from __future__ import annotations

import pytest

import torpor
from tests.property.drawn import draw
from tests.property.drawn_run import compare, probe

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
