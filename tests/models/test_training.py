"""Five AdamW steps of every model of the zoo: losses, parameters and buffers equal eager's."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest

from . import harness
from .zoo import ZOO

Note = Callable[[str, object], None]
ZERO_CHANGE = ("bert", "llama", "bart", "mamba", "wav2vec2", "lstm", "convnet", "gan", "unet")


@pytest.mark.parametrize("name", ZOO)
def test_eager_training_repeats_itself(name: str) -> None:
    first, second = harness.eager_training(name), harness.train(ZOO[name], "eager")
    assert harness.differing_bits(first, second) == []
    assert all(math.isfinite(loss) for loss in first.losses)


@pytest.mark.parametrize("where", ["lazy", "concrete"])
@pytest.mark.parametrize("name", ZOO)
def test_training_equals_eager(name: str, where: str, record_property: Note) -> None:
    expected = harness.eager_training(name)
    record_property("model", (name, ZOO[name].family, where))
    actual = harness.train(ZOO[name], where)
    record_property("speed", (1 / expected.best_step, 1 / actual.best_step))
    record_property("counters", dict(actual.counters))
    record_property("by eager", actual.by_eager)
    assert harness.differences(expected, actual) == []


@pytest.mark.parametrize("where", ["lazy", "concrete"])
@pytest.mark.parametrize("name", ZOO)
def test_training_whose_losses_are_read_after_the_last_step_equals_eager(
    name: str, where: str
) -> None:
    actual = harness.train(ZOO[name], where, read="at the end")
    assert harness.differences(harness.eager_training(name), actual) == []


@pytest.mark.parametrize("name", ZERO_CHANGE)
def test_training_an_unchanged_script_in_lazy_mode_equals_eager(name: str) -> None:
    actual = harness.train(ZOO[name], "mode")
    assert harness.differences(harness.eager_training(name), actual) == []
