"""torch.func above lazy tensors."""

import pytest
import torch
from torch import Tensor, nn
from torch.func import (
    functional_call,
    functionalize,
    grad,
    grad_and_value,
    hessian,
    jacfwd,
    jacrev,
    jvp,
    stack_module_state,
    vjp,
    vmap,
)

import torpor
from tests.comparison import Put, agree, loads_jit_decompositions

pytestmark = loads_jit_decompositions

X = torch.linspace(-1, 1, 12).view(3, 4)
V = torch.linspace(0, 2, 12).view(3, 4)


def _f(x: Tensor) -> Tensor:
    return (x.sin() * x.exp()).sum()


def _g(x: Tensor) -> Tensor:
    return x.sin().cumsum(0)


TRANSFORMS = {
    "grad": lambda x: grad(_f)(x),
    "grad_of_grad": lambda x: grad(lambda t: grad(_f)(t).sum())(x),
    "grad_and_value": lambda x: grad_and_value(_f)(x),
    "grad_with_aux": lambda x: grad(lambda t: (_f(t), t * 2), has_aux=True)(x),
    "vjp": lambda x: (lambda out, back: (out, back(torch.ones_like(out))))(*vjp(_g, x)),
    "jvp": lambda x: jvp(_g, (x,), (torch.ones_like(x),)),
    "jacrev": lambda x: jacrev(_g)(x),
    "jacfwd": lambda x: jacfwd(_g)(x),
    "hessian": lambda x: hessian(_f)(x[0]),
    "jacrev_of_jacrev": lambda x: jacrev(jacrev(_f))(x[0]),
    "vmap": lambda x: vmap(lambda row: row.softmax(0) @ row)(x),
    "vmap_in_dim": lambda x: vmap(lambda column: column.cumsum(0), in_dims=1, out_dims=1)(x),
    "vmap_of_grad": lambda x: vmap(grad(_f))(x),
    "vmap_of_vmap": lambda x: vmap(vmap(lambda s: s.exp() + 1))(x),
    "vmap_with_chunks": lambda x: vmap(_f, chunk_size=2)(x),
    "vmap_of_views": lambda x: vmap(lambda row: row[1:].flip(0).view(1, 3).t())(x),
    "vmap_in_place": lambda x: vmap(lambda row: row.clone().add_(1).mul_(row))(x),
    "vmap_of_a_constant": lambda x: vmap(lambda row: row + torch.ones_like(x[0]))(x),
    "vmap_matmul": lambda x: vmap(torch.outer)(x, x),
    "functionalize": lambda x: functionalize(lambda t: t.clone().view(-1).add_(1).view(3, 4))(x),
    "grad_through_in_place": lambda x: grad(lambda t: t.clone().mul_(2).exp().sum())(x),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_gives_eagers_result(put: Put, name: str) -> None:
    agree(put, TRANSFORMS[name], X)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_a_transform_works_on_a_pending_tensor(put: Put, name: str) -> None:
    agree(put, lambda x: TRANSFORMS[name](x * 1), X)


@pytest.mark.parametrize("randomness", ["same", "different"])
def test_vmap_draws_eagers_numbers(put: Put, randomness: str) -> None:
    agree(put, lambda x: vmap(lambda r: r + torch.rand_like(r), randomness=randomness)(x), X)


def test_a_transforms_result_is_pending(put: Put) -> None:
    x = put(X)
    assert torpor.is_pending(grad(_f)(x))
    assert torpor.is_pending(vmap(_f)(x))


def test_functional_call_uses_the_given_parameters(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        doubled = {name: p.detach() * 2 for name, p in model.named_parameters()}
        return functional_call(model, doubled, (x,))

    agree(put, program, nn.Linear(4, 2), X)


def test_per_sample_gradients(put: Put) -> None:
    def program(model: nn.Module, x: Tensor) -> object:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def loss(values: dict[str, Tensor], sample: Tensor) -> Tensor:
            return functional_call(model, values, (sample.unsqueeze(0),)).square().sum()

        return vmap(grad(loss), in_dims=(None, 0))(parameters, x)

    agree(put, program, nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)), X)


def test_an_ensemble_runs_as_one(put: Put) -> None:
    def program(one: nn.Module, two: nn.Module, x: Tensor) -> object:
        parameters, buffers = stack_module_state([one, two])
        return vmap(lambda p, b: functional_call(one, (p, b), (x,)))(parameters, buffers).detach()

    agree(put, program, nn.Linear(4, 2), nn.Linear(4, 2), X)


def test_a_tangent_kernel(put: Put) -> None:
    def program(model: nn.Module, x: Tensor, y: Tensor) -> object:
        parameters = {name: p.detach() for name, p in model.named_parameters()}

        def single(values: dict[str, Tensor], sample: Tensor) -> Tensor:
            return functional_call(model, values, (sample.unsqueeze(0),)).squeeze(0)

        left = vmap(jacrev(single), (None, 0))(parameters, x)
        right = vmap(jacrev(single), (None, 0))(parameters, y)
        return sum(
            torch.einsum("Naf,Mbf->NMab", a.flatten(2), b.flatten(2))
            for a, b in zip(left.values(), right.values())
        )

    agree(put, program, nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)), X, V)
