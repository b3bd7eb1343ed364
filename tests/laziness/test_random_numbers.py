"""Random numbers are eager's, in program order, each drawn once (DESIGN §3)."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torpor
from tests.comparison import Put, agree, assert_same, plain

X = torch.linspace(0.05, 0.95, 12).view(3, 4)

IN_PLACE_DRAWS = {
    "uniform_": lambda t: t.uniform_(-1, 1),
    "normal_": lambda t: t.normal_(2, 3),
    "bernoulli_": lambda t: t.bernoulli_(0.3),
    "exponential_": lambda t: t.exponential_(1.5),
    "geometric_": lambda t: t.geometric_(0.4),
    "cauchy_": lambda t: t.cauchy_(),
    "log_normal_": lambda t: t.log_normal_(),
    "random_": lambda t: t.random_(0, 50),
}
DRAWS = {
    "rand": lambda t: torch.rand(3, 4, device=t.device),
    "randn": lambda t: torch.randn(3, 4, device=t.device),
    "randint": lambda t: torch.randint(0, 100, (3, 4), device=t.device),
    "randperm": lambda t: torch.randperm(20, device=t.device),
    "normal": lambda t: torch.normal(0.0, 1.0, (3, 4), device=t.device),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda t: torch.randint_like(t, 9),
    "bernoulli": torch.bernoulli,
    "multinomial": lambda t: torch.multinomial(t, 3),
    "multinomial_with_replacement": lambda t: torch.multinomial(t, 9, replacement=True),
    "normal_of_tensors": lambda t: torch.normal(t, t),
    "poisson": lambda t: torch.poisson(t * 5),
    "dropout": lambda t: F.dropout(t, 0.4),
    "alpha_dropout": lambda t: F.alpha_dropout(t, 0.4, training=True),
    "feature_dropout": lambda t: F.dropout2d(t.view(1, 3, 2, 2), 0.5),
    "rrelu": lambda t: F.rrelu(t - 0.5, training=True),
    "gumbel_softmax": lambda t: F.gumbel_softmax(t),
    "attention_dropout": lambda t: F.scaled_dot_product_attention(
        t[None], t[None], t[None], dropout_p=0.3
    ),
    **{name: lambda t, draw=draw: draw(t.clone()) for name, draw in IN_PLACE_DRAWS.items()},
}
# On the concrete device these factories make plain tensors outside `torpor.mode()`.
FACTORIES = {"rand", "randn", "randint", "randperm", "normal"}


@pytest.mark.parametrize("name", DRAWS)
def test_a_draw_is_eagers(put: Put, name: str) -> None:
    agree(put, DRAWS[name], X, seed=7)


@pytest.mark.parametrize("name", DRAWS)
def test_equal_draws_are_never_merged(put: Put, name: str) -> None:
    agree(put, lambda t: [DRAWS[name](t) for _ in range(3)], X, seed=7)


@pytest.mark.parametrize("name", [name for name in DRAWS if name not in FACTORIES])
def test_a_draw_nobody_reads_still_moves_the_generator(put: Put, name: str) -> None:
    def program(t: torch.Tensor) -> torch.Tensor:
        DRAWS[name](t)
        return torch.rand_like(t)

    agree(put, program, X, seed=7)


def test_draws_go_in_program_order_whatever_order_they_are_read_in(put: Put) -> None:
    def program(t: torch.Tensor) -> object:
        first, second, third = torch.rand_like(t), torch.randn_like(t), torch.rand_like(t)
        values = third.sum().item(), first.sum().item(), second.sum().item()
        return values, first, second, third

    agree(put, program, X)


def test_a_draw_is_the_same_each_time_it_is_read(put: Put) -> None:
    noise = torch.rand_like(put(X))
    once = noise.tolist()
    torpor.sync(wait=True)
    assert noise.tolist() == once
    assert plain(noise).tolist() == once


def test_steps_draw_new_numbers_without_compiling_anew(put: Put) -> None:
    x = put(X)
    torch.manual_seed(3)
    expected = [torch.rand_like(X) + F.dropout(X) for _ in range(6)]
    torch.manual_seed(3)
    got, compiles = [], []
    for _ in range(6):
        got.append(torch.rand_like(x) + F.dropout(x))
        torpor.sync(wait=True)
        compiles.append(torpor.metrics.counters().get("UncachedCompile", 0))
    assert_same(got, expected)
    assert compiles[1] == compiles[-1]


def test_seeding_in_the_middle_of_a_trace_splits_the_draws(put: Put) -> None:
    def program(t: torch.Tensor) -> object:
        before = torch.rand_like(t)
        torch.manual_seed(99)
        after = torch.rand_like(t)
        torch.manual_seed(99)
        return before, after, torch.rand_like(t)

    agree(put, program, X)


def test_the_generators_state_can_be_saved_and_restored_in_the_middle_of_a_trace(put: Put) -> None:
    def program(t: torch.Tensor) -> object:
        first = torch.rand_like(t)
        state = torch.get_rng_state()
        second = torch.rand_like(t)
        torch.set_rng_state(state)
        third = torch.rand_like(t)
        return first, second, third

    _, second, third = agree(put, program, X)
    assert_same(plain(third), plain(second))


def test_forked_generators_do_not_disturb_the_trace(put: Put) -> None:
    def program(t: torch.Tensor) -> object:
        first = torch.rand_like(t)
        with torch.random.fork_rng(devices=[]):
            inside = torch.rand_like(t)
        return first, inside, torch.rand_like(t)

    agree(put, program, X)


def test_a_plain_draw_between_lazy_draws_keeps_program_order(put: Put) -> None:
    def program(t: torch.Tensor) -> object:
        first = torch.rand_like(t)
        shuffled = torch.randperm(10).tolist()  # as a data loader does, on plain tensors
        second = torch.rand_like(t)
        return first, shuffled, second

    agree(put, program, X)


def test_a_generator_of_ones_own_is_used_and_advanced(put: Put) -> None:
    def program(t: torch.Tensor) -> object:
        generator = torch.Generator().manual_seed(5)
        first = torch.bernoulli(t, generator=generator)
        second = t.clone().uniform_(generator=generator)
        third = torch.multinomial(t, 2, generator=generator)
        torpor.sync(wait=True)
        return first, second, third, torch.rand(3, generator=generator)

    agree(put, program, X)


def test_two_generators_do_not_mix(put: Put) -> None:
    def program(t: torch.Tensor) -> object:
        one, other = torch.Generator().manual_seed(1), torch.Generator().manual_seed(1)
        return [t.clone().normal_(generator=g) for g in (one, other, one, other)]

    agree(put, program, X)


@pytest.mark.parametrize("name", IN_PLACE_DRAWS)
def test_a_draw_into_a_view_lands_in_the_base(put: Put, name: str) -> None:
    def program(t: torch.Tensor) -> object:
        t = t.clone()
        IN_PLACE_DRAWS[name](t[:, 1::2])
        return t

    agree(put, program, X)


def test_initialisers_draw_eagers_weights(put: Put) -> None:
    def program(t: torch.Tensor) -> object:
        for initialise in (
            nn.init.kaiming_uniform_,
            nn.init.xavier_normal_,
            nn.init.trunc_normal_,
            nn.init.orthogonal_,
        ):
            initialise(t)
        return t

    agree(put, program, X)


def test_a_layer_made_on_the_device_has_eagers_weights(virtual: Put) -> None:
    torch.manual_seed(0)
    eager = nn.Linear(4, 3)
    torch.manual_seed(0)
    lazy = nn.Linear(4, 3, device="lazy")
    assert_same(dict(lazy.state_dict()), dict(eager.state_dict()))


def test_torpors_seed_is_torchs_seed(put: Put) -> None:
    x = put(X)
    torch.manual_seed(11)
    expected = torch.rand_like(X)
    torpor.manual_seed(11)
    assert_same(torch.rand_like(x), expected)


def test_the_seed_state_says_where_the_numbers_stand(put: Put) -> None:
    x = put(X)

    def state() -> list[int]:
        return torch.as_tensor(torpor.seed_state()).flatten().tolist()

    torpor.manual_seed(4)
    first = state()
    torch.rand_like(x)
    torpor.manual_seed(5)
    assert state() != first
    torpor.manual_seed(4)
    assert state() == first


def test_a_recurrent_network_that_drops_out_takes_growing_batches(put: Put) -> None:
    def train(module: nn.Module, place: Any) -> list[torch.Tensor]:
        torch.manual_seed(1)
        made = []
        for size in range(2, 7):
            made.append(module(place(torch.full((size, 3, 4), 1.0 / size)))[0])
            made[-1].square().mean().backward()
            torpor.sync()
        return [*made, *(p.grad for p in module.parameters())]

    module = nn.GRU(4, 5, 2, dropout=0.5, batch_first=True)
    lazily = train(put(module), put)
    for one, other in zip(train(module, torch.clone), lazily, strict=True):
        assert torch.equal(plain(other), one.detach())
