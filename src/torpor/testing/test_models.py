"""Whole models: five training steps give eager's losses, parameters and random state."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from torpor.testing.comparison import difference
from torpor.testing.kit import Kit
from torpor.testing.networks import NETWORKS, Network

STEPS = 5
RELATIVE = 1e-4


def train(network: Network, put: Callable[[Any], Any]) -> tuple[list[float], nn.Module, Tensor]:
    """The losses of all steps and of the trained model, the model, and the generator's state."""
    torch.manual_seed(1)
    model = put(network.build()).train()
    optimizer = network.optimizer(list(model.parameters()))
    losses = []
    torch.manual_seed(2)
    for step in range(STEPS):
        x, labels = (put(tensor) for tensor in network.batch(step))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    state = torch.get_rng_state()
    x, labels = (put(tensor) for tensor in network.batch(STEPS))
    losses.append(F.cross_entropy(model.eval()(x), labels).item())
    return losses, model, state


@pytest.mark.parametrize("name", NETWORKS)
def test_training_gives_the_losses_eager_gives(kit: Kit, name: str) -> None:
    expected, judge, state = train(NETWORKS[name], kit.eager)
    got, model, own_state = train(NETWORKS[name], kit.put)
    for step, (one, other) in enumerate(zip(got, expected, strict=True)):
        close = one == other if kit.exact else math.isclose(one, other, rel_tol=RELATIVE)
        assert close, f"step {step}: loss {one!r} in the place of {other!r}"
    assert torch.equal(own_state, state), "the generator is not where eager leaves it"
    # Adam amplifies a gradient that is mere rounding error to a full step: without --bit-exact,
    # parameters are judged by the resulting losses, and only buffers are compared.
    wanted = judge.state_dict() if kit.exact else dict(judge.named_buffers())
    have = model.state_dict()
    for where, expected_tensor in wanted.items():
        wrong = difference(kit.plain(have[where]), expected_tensor, kit.exact)
        assert wrong is None, f"{where}: {wrong}"


def test_dropout_masks_are_eagers(kit: Kit) -> None:
    model = nn.Sequential(nn.Dropout(0.3), nn.Dropout1d(0.5), nn.AlphaDropout(0.2))
    x = torch.ones(4, 8)

    def program(model: nn.Module, x: Tensor) -> list[Tensor]:
        return [model(x) == 0 for _ in range(3)]

    kit.agree(program, model, x)


def test_evaluation_gives_what_eager_gives(kit: Kit) -> None:
    kit.exact = False  # without gradients torch uses other kernels for LSTMs and attention
    for network in NETWORKS.values():
        torch.manual_seed(1)
        model = network.build().eval()
        x, _ = network.batch(0)
        with torch.no_grad():
            kit.agree(lambda model, x: model(x), model, x)
