"""A backend may draw random numbers itself: then random ops are nodes, each of them one draw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

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


class Seeded(ReferenceBackend):
    """Draws from a seed of the run, with a stream of its own for each node."""

    draws = True
    draws_from_seed = True

    def __init__(self) -> None:
        super().__init__()
        self.seeds: list[int] = []
        self.offsets: list[int] = []

    def execute(self, computation: Any, arguments: Any, device: Any) -> Any:
        given = list(arguments)
        if computation.offsets:
            self.seeds.append(given.pop())
            self.offsets = list(computation.offsets.values())
        assert len(given) == len(computation.graph.inputs)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seeds[-1] if self.seeds else 0)
            return super().execute(computation, given, device)


register("seeded", Seeded)


def test_a_graph_that_draws_is_given_a_seed_for_every_run(put: Put) -> None:
    backend = torpor.use("seeded")
    assert isinstance(backend, Seeded)
    x = put(torch.ones(50))
    steps = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        steps.append((F.dropout(x, 0.5) + torch.rand_like(x)).tolist())
        torpor.sync(wait=True)
    assert steps[0] == steps[2] != steps[1]
    assert backend.seeds[0] == backend.seeds[2] != backend.seeds[1]
    assert backend.offsets == [0, 1]
    assert torpor.metrics.counters()["UncachedCompile"] == 1


def test_a_graph_that_draws_nothing_has_no_seed(put: Put) -> None:
    backend = torpor.use("seeded")
    assert isinstance(backend, Seeded)
    before = torch.get_rng_state()
    assert (put(torch.ones(3)) + 1).tolist() == [2.0, 2.0, 2.0]
    assert backend.seeds == []
    assert torch.equal(torch.get_rng_state(), before)
