"""`torch.compile` that meets lazy tensors: captured or recorded, no warning, eager's numbers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torpor
from tests.comparison import loads_jit_decompositions
from tests.laziness.foreign import plain, same, warnings_caught

pytestmark = loads_jit_decompositions

Compile = Callable[..., Any]
Put = Callable[[Any], Any]


@pytest.fixture(params=["reference", "inductor"])
def exact(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[bool]:
    """Whether results are eager's bits; both backends, each as it is used."""
    monkeypatch.setattr(torpor.config, "compile_after", -1)
    with torpor.using(request.param):
        yield request.param == "reference"


@pytest.fixture(autouse=True)
def nothing_compiled() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torpor.sync(wait=True)


def uncompiled(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda f: f  # as a decorator


def linear(put: Put) -> nn.Module:
    torch.manual_seed(0)
    made: nn.Module = put(nn.Linear(4, 3))
    return made


def x(put: Put) -> Tensor:
    made: Tensor = put(torch.linspace(-1, 1, 8).view(2, 4))
    return made


# -- programs ------------------------------------------------------------------------------------


def function(put: Put, compile: Compile) -> Any:
    return compile(lambda a: a.sin() + 1)(x(put))


def whole_graph(put: Put, compile: Compile) -> Any:
    return compile(lambda a: a.sin() + 1, fullgraph=True)(x(put))


def module(put: Put, compile: Compile) -> Any:
    return compile(linear(put))(x(put))


def module_compiled_in_place(put: Put, compile: Compile) -> Any:
    model = linear(put)
    if compile is not uncompiled:
        model.compile(fullgraph=True)
    return model(x(put))


def part_of_a_module(put: Put, compile: Compile) -> Any:
    torch.manual_seed(0)
    model = put(nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 1)))
    model[0] = compile(model[0])
    result = model(x(put))
    result.sum().backward()
    return result, [p.grad for p in model.parameters()]


def training(put: Put, compile: Compile) -> Any:
    model = linear(put)
    compiled, optimizer = compile(model), torch.optim.SGD(model.parameters(), 0.1)
    for _ in range(3):
        optimizer.zero_grad()
        compiled(x(put)).pow(2).sum().backward()
        optimizer.step()
    return list(model.parameters())


def training_step(put: Put, compile: Compile) -> Any:
    model = linear(put)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)

    @compile
    def step(batch: Tensor) -> Tensor:
        optimizer.zero_grad()
        loss = model(batch).pow(2).sum()
        loss.backward()
        optimizer.step()
        return loss

    return [step(x(put)).detach().clone() for _ in range(3)]


def closure(put: Put, compile: Compile) -> Any:
    weight = x(put)
    return compile(lambda number: weight * number)(3)


def deep_attribute(put: Put, compile: Compile) -> Any:
    @dataclass
    class Holder:
        inside: Any

    holder = Holder(Holder(x(put)))
    compiled = compile(lambda held: held.inside.inside + 1, fullgraph=True)
    return [compiled(holder) for _ in range(2)]


def container(put: Put, compile: Compile) -> Any:
    return compile(lambda tensors: sum(t * 2 for t in tensors["all"]))({"all": [x(put), x(put)]})


def graph_break(put: Put, compile: Compile) -> Any:
    @compile
    def broken(a: Tensor) -> Tensor:
        b = a + 1
        return b * b.sum().item()

    return broken(x(put))


def nested(put: Put, compile: Compile) -> Any:
    inner = compile(lambda a: a + 1)
    return compile(lambda a: inner(a) * 2)(x(put))


def disabled_inside(put: Put, compile: Compile) -> Any:
    inner = torch.compiler.disable(lambda a: a * 2)
    return compile(lambda a: inner(a) + 1)(x(put))


def dynamic(put: Put, compile: Compile) -> Any:
    compiled = compile(lambda a: a + 1, dynamic=True)
    return [compiled(put(torch.arange(float(n)))) for n in (4, 7)]


def writes(put: Put, compile: Compile) -> Any:
    tensor = x(put)
    return compile(lambda a: a.add_(1) * 2)(tensor), tensor


PROGRAMS = (
    function, whole_graph, module, module_compiled_in_place, part_of_a_module, training,
    training_step, closure, deep_attribute, container, graph_break, nested, disabled_inside,
    dynamic, writes,
)  # fmt: skip


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.__name__)
def test_a_compiled_function_that_meets_lazy_tensors_is_recorded(
    program: Any, put: Put, exact: bool
) -> None:
    expected = program(plain, uncompiled)
    with warnings_caught() as warnings:
        result = program(put, torch.compile)
    same(result, expected, exact)
    assert not warnings


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor", "torpor"])
def test_it_is_recorded_whatever_the_backend(backend: str, put: Put) -> None:
    with warnings_caught() as warnings:
        result = torch.compile(lambda a: a.sin() + 1, backend=backend)(x(put))
        assert torpor.is_pending(result)
    same(result, x(plain).sin() + 1, True)
    assert not warnings


# -- plain tensors are compiled as ever ------------------------------------------------------------


class Counting:
    """A backend of TorchDynamo's that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.graphs += 1

        def run(*args: Any) -> Any:
            self.calls += 1
            return graph.forward(*args)

        return run


def test_what_is_compiled_for_plain_tensors_stays_compiled_for_them(put: Put) -> None:
    counting = Counting()
    compiled = torch.compile(lambda a: a.sin() + 1, backend=counting)
    with warnings_caught():
        results = [compiled(p) for p in (x(plain), x(put), x(plain), x(put), x(plain))]
    assert [torpor.is_lazy(r) for r in results] == [False, True, False, True, False]
    assert (counting.graphs, counting.calls) == (1, 3)
    for result in results:
        same(result, x(plain).sin() + 1, True)


def test_plain_tensors_are_compiled_after_lazy_ones_were_met_deep_inside(put: Put) -> None:
    counting = Counting()

    @dataclass
    class Holder:
        inside: Any

    compiled = torch.compile(lambda held: held.inside.inside + 1, backend=counting)
    with warnings_caught() as warnings:
        for one in (put, plain, put, plain):
            same(compiled(Holder(Holder(x(one)))), x(plain) + 1, True)
    assert (counting.graphs, counting.calls) == (1, 2)
    assert not warnings


def test_nothing_is_compiled_inside_the_mode_and_plain_tensors_are_afterwards() -> None:
    counting = Counting()
    compiled = torch.compile(lambda a: a.sin() + 1, backend=counting)
    with warnings_caught() as warnings, torpor.mode():
        result = compiled(torch.ones(3))
    assert torpor.is_lazy(result)
    assert not warnings
    assert not torpor.is_lazy(compiled(torch.ones(3)))
    assert counting.graphs == 1


def test_a_captured_function_knows_that_it_is_compiled(put: Put) -> None:
    result = torch.compile(lambda a: a + torch.compiler.is_compiling())(x(put))
    same(result, x(plain) + True, True)


def test_lazy_gradients_enter_the_backward_of_a_compiled_plain_model(concrete: Put) -> None:
    def gradients(put: Put, compile: Compile) -> Any:
        model, weight = linear(plain), put(torch.ones(3, requires_grad=True))
        (compile(model)(x(plain)) * weight).sum().backward()
        return [weight.grad, *(p.grad for p in model.parameters())]

    expected = gradients(plain, uncompiled)
    same(gradients(concrete, lambda f: torch.compile(f, backend="aot_eager")), expected, True)


def test_errors_of_a_compiled_function_are_its_own(put: Put) -> None:
    def fails(a: Tensor) -> None:
        raise ValueError("mine")

    with warnings_caught(), pytest.raises(ValueError, match="mine"):
        torch.compile(fails)(x(put))


def test_graphs_are_traced_with_fake_tensors_of_lazy_ones(put: Put) -> None:
    for mode in ("fake", "symbolic"):
        graph = make_fx(lambda a: a.sin() + 1, tracing_mode=mode)(x(put))
        same(graph(x(put)), x(plain).sin() + 1, True)


def test_a_fake_tensor_is_made_of_the_type_alone(put: Put) -> None:
    tensor = (x(put) + 1).t()
    fake = FakeTensorMode().from_tensor(tensor)
    assert torpor.is_pending(tensor)
    assert (fake.shape, fake.stride(), fake.device) == ((4, 2), (1, 4), tensor.device)
