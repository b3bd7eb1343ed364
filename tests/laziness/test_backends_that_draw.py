"""A backend may draw random numbers itself: then random ops are nodes, each of them one draw."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.nn import functional as F

import torpor
from tests.comparison import Put, assert_same
from torpor.backend import register
from torpor.backends.reference import ReferenceBackend


class Drawing(ReferenceBackend):
    """Draws with eager's kernels, when a graph runs."""

    draws = True


register("drawing", Drawing)


@pytest.fixture(autouse=True)
def drawing(on_the_reference_backend: None) -> Iterator[None]:
    with torpor.using("drawing"):
        torpor.metrics.reset()
        yield


def test_nothing_is_drawn_when_it_is_recorded(put: Put) -> None:
    before = torch.get_rng_state()
    noise = torch.empty_like(put(torch.ones(4))).normal_()
    assert torpor.is_pending(noise)
    assert torch.equal(torch.get_rng_state(), before)
    noise.tolist()
    assert not torch.equal(torch.get_rng_state(), before)


def test_two_draws_are_two_nodes_and_a_draw_happens_once(put: Put) -> None:
    x = put(torch.ones(50))
    one, other = F.dropout(x, 0.5), F.dropout(x, 0.5)
    first = one.tolist()
    assert first != other.tolist()
    assert one.tolist() == first
    assert (one + 0).tolist() == first


def test_a_gradient_meets_the_mask_of_its_forward(put: Put) -> None:
    x = put(torch.ones(50)).requires_grad_()
    y = F.dropout(x, 0.5)
    y.sum().item()
    y.backward(torch.ones_like(y))
    assert x.grad is not None
    assert_same(x.grad, torch.tensor(y.tolist()))


def test_the_next_step_draws_anew_with_the_same_graph(put: Put) -> None:
    x = put(torch.ones(50))
    steps = []
    for _ in range(3):
        steps.append(F.dropout(x, 0.5).tolist())
        torpor.sync(wait=True)
    assert steps[0] != steps[1] != steps[2]
    assert torpor.metrics.counters()["UncachedCompile"] == 1


def test_a_seed_repeats_what_is_drawn(put: Put) -> None:
    drawn = []
    for _ in range(2):
        torch.manual_seed(7)
        x = put(torch.ones(8))
        drawn.append((torch.rand_like(x) + torch.randn_like(x)).tolist())
        torpor.sync(wait=True)
    assert drawn[0] == drawn[1]


def test_a_generator_of_the_users_is_drawn_from_at_once(put: Put) -> None:
    generator = torch.Generator().manual_seed(3)
    drawn = put(torch.zeros(4)).normal_(generator=generator)
    assert_same(drawn, torch.zeros(4).normal_(generator=torch.Generator().manual_seed(3)))
