"""Backends as instruments: one that refuses to run anything, one that counts what it is given."""

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import torpor
from tests.comparison import Put, assert_same, forget_pending_work, raised_by

X = torch.arange(6.0).view(2, 3)

torpor.use("reference")
Reference = type(torpor.backend.get_backend())


class Refusing(Reference):
    """Raises if anything executes."""

    def execute(self, *_: object, **__: object) -> list[torpor.backend.BackendData]:
        raise AssertionError("something ran")


class Counting(Reference):
    """Counts compiles and executions."""

    compiles = 0
    executions = 0

    def compile(self, computations):
        Counting.compiles += len(computations)
        return super().compile(computations)

    def execute(self, *args, **kwargs):
        Counting.executions += 1
        return super().execute(*args, **kwargs)


torpor.backend.register("tests-refusing", Refusing)
torpor.backend.register("tests-counting", Counting)


@pytest.fixture
def nothing_may_run() -> Iterator[None]:
    torpor.use("tests-refusing")
    yield
    forget_pending_work()
    torpor.use("reference")


@pytest.fixture
def counting() -> Iterator[type[Counting]]:
    torpor.use("tests-counting")
    Counting.compiles = Counting.executions = 0
    yield Counting
    torpor.use("reference")


def test_a_backend_that_refuses_is_asked_when_a_value_is_read(
    nothing_may_run: None, put: Put
) -> None:
    y = put(X) * 2
    error = raised_by(lambda: y.tolist())
    assert type(error) is AssertionError
    assert "something ran" in str(error)


RECORDED = {
    "arithmetic": lambda x: (x * 2 + 1).exp().sum(),
    "matmul": lambda x: (x @ x.t()).softmax(-1),
    "views": lambda x: (x * 1).t()[1:].reshape(-1).unsqueeze(0).expand(3, -1),
    "in_place": lambda x: (x * 1).add_(1).t()[0].mul_(2),
    "index": lambda x: (x * 1)[:, [0, 2]],
    "setitem": lambda x: (x * 1).__setitem__(0, 5),
    "mask_write": lambda x: (lambda y: y.__setitem__(y > 2, 0.0))(x * 1),
    "reductions": lambda x: ((x * 2).mean(0), (x * 2).amax(), (x * 2).argmax(-1)),
    "factories": lambda x: torch.ones_like(x) + x.new_full((2, 3), 4),
    "casts": lambda x: (x * 2).double().to(torch.int64),
    "out": lambda x: torch.mul(x, 3, out=torch.empty_like(x)),
    "splits": lambda x: (x * 2).chunk(3, dim=1)[1] + (x * 2).unbind(1)[0][:, None],
    "sort": lambda x: (x * -1).sort(-1).indices,
    "norm": lambda x: F.layer_norm(x * 2, (3,)),
    "attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "embedding": lambda x: F.embedding((x * 0).long(), x),
    "clip": lambda x: torch.clamp((x * 2), 0, 1).lerp(x, 0.5),
    "detach": lambda x: (x * 2).detach().clone().contiguous(),
}


@pytest.mark.parametrize("name", RECORDED)
def test_recording_reaches_no_backend(nothing_may_run: None, put: Put, name: str) -> None:
    RECORDED[name](put(X))


def test_a_whole_training_step_but_the_optimizer_reaches_no_backend(
    nothing_may_run: None, put: Put
) -> None:
    model = put(nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 2)))
    loss = F.cross_entropy(model(put(X)), put(torch.tensor([0, 1])))
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    assert all(torpor.is_pending(p.grad) for p in model.parameters())


def test_moving_in_reaches_no_backend(nothing_may_run: None, put: Put) -> None:
    x = put(X)
    assert x.shape == X.shape
    put(nn.Linear(3, 2))


def test_a_warm_training_step_is_one_execution(counting: type[Counting], put: Put) -> None:
    model, x = put(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))), put(X)
    optimizer = torch.optim.AdamW(model.parameters())
    executions = []
    for _ in range(6):
        before = counting.executions
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        loss.item()
        torpor.wait()
        executions.append(counting.executions - before)
    assert executions[-3:] == [1, 1, 1]


def test_a_warm_training_step_compiles_nothing(counting: type[Counting], put: Put) -> None:
    model, x = put(nn.Linear(3, 2)), put(X)
    optimizer = torch.optim.AdamW(model.parameters())

    def step() -> None:
        optimizer.zero_grad()
        model(x).square().mean().backward()
        optimizer.step()
        torpor.wait()

    for _ in range(4):
        step()
    warm = counting.compiles
    for _ in range(4):
        step()
    assert counting.compiles == warm


def test_new_values_of_the_same_shape_compile_nothing(counting: type[Counting], put: Put) -> None:
    for number in range(4):
        x = put(X + number)
        assert_same((x * 2).sin(), ((X + number) * 2).sin())
        torpor.sync(wait=True)
    assert counting.compiles == 1


def test_an_evaluation_step_is_one_execution(counting: type[Counting], put: Put) -> None:
    model, x = put(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).eval()), put(X)
    with torch.no_grad():
        for _ in range(3):
            before = counting.executions
            model(x).tolist()
            assert counting.executions - before == 1


def test_a_read_value_is_not_computed_again_by_the_step(counting: type[Counting], put: Put) -> None:
    x = put(X)
    y = (x * 2).exp()
    y.sum().item()
    torpor.sync(wait=True)
    before = counting.executions
    y.tolist()
    torpor.sync(wait=True)
    assert counting.executions == before
