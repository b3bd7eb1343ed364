"""What the models of the zoo produce: greedy, sampled and beam-searched tokens, images, text."""

from __future__ import annotations

import pytest

from . import harness
from .zoo import PRODUCTIVE, ZOO


@pytest.mark.parametrize(("name", "strategy"), PRODUCTIVE)
def test_eager_generation_repeats_itself(name: str, strategy: str) -> None:
    first = harness.eager_generation(name, strategy)
    assert harness.differing_bits(first, harness.generate(ZOO[name], strategy, "eager")) == []


@pytest.mark.parametrize("where", ["lazy", "concrete"])
@pytest.mark.parametrize(("name", "strategy"), PRODUCTIVE)
def test_generation_equals_eager(name: str, strategy: str, where: str) -> None:
    expected = harness.eager_generation(name, strategy)
    assert harness.differences(expected, harness.generate(ZOO[name], strategy, where)) == []
