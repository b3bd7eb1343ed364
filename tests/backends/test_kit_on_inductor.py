"""A part of the conformance kit on Inductor, with compiled kernels: the same part in every run.

The whole of it takes an hour or more: `make sweep-backends BACKENDS=inductor`.
"""

from __future__ import annotations

import pytest

from torpor.backend import registry
from torpor.testing.run import run_kit

WHY_NOT = registry.backends()["inductor"]
pytestmark = pytest.mark.skipif(WHY_NOT != "available", reason=f"no inductor here: {WHY_NOT}")

OPERATORS = """
    add addmm amax bmm cat cumsum exp gather index_put masked_fill mean mm
    nn_functional_conv2d nn_functional_cross_entropy nn_functional_embedding nn_functional_gelu
    nn_functional_layer_norm nn_functional_max_pool2d scatter_add softmax sort stack var where
""".split()
"""Elementwise, reductions, products, indexing, scatters, views, layers, losses."""

MODELS = ("perceptron_adamw", "transformer_dropout")


@pytest.mark.parametrize("name", OPERATORS)
def test_an_operator_is_compiled_and_gives_eagers_numbers(name: str) -> None:
    options = ("--ops", f"^{name}$", "--samples", "2")
    outcome = run_kit("inductor", "test_operators", options=options)
    assert outcome.held, outcome.output
    assert [result.status in ("native", "decomposed") for result in outcome.card.ops] == [True]


@pytest.mark.parametrize("name", MODELS)
def test_a_model_trains_as_eager_does(name: str) -> None:
    outcome = run_kit(
        "inductor", f"test_models::test_training_gives_the_losses_eager_gives[{name}]"
    )
    assert outcome.held, outcome.output
    assert [point.outcome for point in outcome.card.points] == ["held"]
