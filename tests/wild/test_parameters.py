"""`torpor.enable()`: laziness starts at parameters, and nothing else changes."""

from __future__ import annotations

import copy
import gc
import io
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.utils.checkpoint import checkpoint

import torpor

X = torch.linspace(-1, 1, 12).view(4, 3)


@pytest.fixture(autouse=True)
def enabled(backend: str) -> Iterator[None]:
    torpor.enable()
    yield
    torpor.disable()


def tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(), *module.buffers()]


def are_lazy(module: nn.Module) -> set[bool]:
    return {torpor.is_lazy(tensor) for tensor in tensors(module)}


# -- modules -----------------------------------------------------------------------------------


def test_a_module_becomes_lazy_when_it_is_called_and_keeps_its_tensors() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))
    before = tensors(net)
    assert are_lazy(net) == {False}
    expected = copy.deepcopy(net)
    torpor.disable()
    wanted = expected(X)
    torpor.enable()
    got = net(X)
    assert are_lazy(net) == {True}
    assert all(a is b for a, b in zip(tensors(net), before, strict=True))
    assert all(isinstance(p, nn.Parameter) for p in net.parameters())
    assert torpor.is_lazy(got)
    assert torch.allclose(got, wanted)


def test_data_stay_plain() -> None:
    net = nn.Linear(3, 2)
    x = X.clone()
    net(x)
    assert type(x) is Tensor
    assert type(x + 1) is Tensor
    assert type(torch.tensor([1.0])) is Tensor


def test_a_module_without_tensors_does_nothing() -> None:
    pending = torpor.lazy(X) + 1
    with torch.no_grad():
        assert type(nn.ReLU()(X)) is Tensor
    assert torpor.is_pending(pending)


def test_a_plain_module_does_not_cut_the_trace() -> None:
    torpor.disable()
    pending = torpor.lazy(X) + 1
    with torch.no_grad():
        nn.Linear(3, 2)(X)
    assert torpor.is_pending(pending)


def test_disable_stops_it_and_what_is_lazy_stays_so() -> None:
    first, second = nn.Linear(3, 2), nn.Linear(3, 2)
    first(X)
    torpor.disable()
    second(X)
    assert (are_lazy(first), are_lazy(second)) == ({True}, {False})
    torpor.enable()
    second(X)
    assert are_lazy(second) == {True}


def test_an_inner_module_called_alone_becomes_lazy_alone() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    net[0](X)
    assert (are_lazy(net[0]), are_lazy(net[1])) == ({True}, {False})
    net(X)
    assert are_lazy(net) == {True}


def test_what_a_module_gets_after_its_first_call_becomes_lazy() -> None:
    net = nn.Sequential(nn.Linear(3, 3))
    net(X)
    net.append(nn.Linear(3, 2))
    net.register_buffer("scale", torch.ones(2))
    net[0].weight = nn.Parameter(torch.ones(3, 3))
    net(X)
    assert are_lazy(net) == {True}
    net[0].scale = torch.ones(1)
    del net[0].scale
    net[0].register_parameter("extra", nn.Parameter(torch.ones(1)))
    net(X)
    assert are_lazy(net) == {True}


def test_tied_weights_stay_tied() -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    net(X).sum().backward()
    assert net[1].weight is net[0].weight
    assert torpor.is_lazy(net[0].weight)


def test_parameters_on_one_memory_go_on_sharing_it() -> None:
    net = nn.Module()
    flat = torch.arange(6.0)
    net.a, net.b = nn.Parameter(flat[:3]), nn.Parameter(flat[3:])
    net.both = nn.Parameter(flat)
    net.forward = lambda: net.a + net.b  # type: ignore[method-assign]  # a short module
    del flat
    net()
    assert are_lazy(net) == {True}
    with torch.no_grad():
        net.both.add_(1)
    assert net.b.tolist() == [4.0, 5.0, 6.0]


def test_a_parameter_whose_memory_somebody_else_holds_stays_plain_until_they_let_go() -> None:
    net = nn.Linear(3, 1, bias=False)
    memory = net.weight.data  # in eager, writes to it are seen by the module
    net(X)
    assert not torpor.is_lazy(net.weight)
    memory.fill_(2.0)
    assert torch.equal(net(X), X.sum(1, keepdim=True) * 2)
    del memory
    for _ in range(4):
        net(X)
    assert torpor.is_lazy(net.weight)


def test_a_parameter_whose_gradient_others_look_at_stays_plain_until_they_let_go() -> None:
    net = nn.Linear(3, 2)
    flat = torch.zeros(8)  # one buffer of all gradients, to clip or to send them at once
    net.weight.grad, net.bias.grad = flat[:6].view(2, 3), flat[6:]
    net(X).sum().backward()
    assert are_lazy(net) == {False}
    assert flat[6:].tolist() == [4.0, 4.0]
    net.zero_grad()
    for _ in range(4):
        net(X)
    assert are_lazy(net) == {True}


def test_gradients_on_one_memory_become_lazy_with_their_parameters() -> None:
    net = nn.Module()
    net.a, net.b = nn.Parameter(torch.ones(3)), nn.Parameter(torch.ones(3))
    net.forward = lambda: torch.stack([net.a, net.b]).square().sum()  # type: ignore[method-assign]
    torpor.disable()
    net().backward()
    torpor.enable()
    net().backward()
    assert are_lazy(net) == {True}
    assert net.b.grad is not None
    assert net.b.grad.tolist() == [4.0, 4.0, 4.0]


def test_a_parameter_with_a_sparse_gradient_stays_plain() -> None:
    words = nn.Embedding(5, 2, sparse=True)
    torpor.disable()
    words(torch.tensor([1, 3])).sum().backward()
    torpor.enable()
    words(torch.tensor([1]))
    assert are_lazy(words) == {False}
    assert words.weight.grad is not None
    assert words.weight.grad.is_sparse


def test_parameters_shared_between_processes_stay_plain() -> None:
    net = nn.Linear(3, 2).share_memory()
    net(X)
    assert are_lazy(net) == {False}
    assert net.weight.is_shared()


def test_a_parameter_that_a_graph_holds_waits() -> None:
    net = nn.Linear(3, 1)
    torpor.disable()
    loss = net(X).sum()
    torpor.enable()
    net(X)
    assert are_lazy(net) == {False}
    loss.backward()
    assert torch.equal(net.weight.grad, X.sum(0, keepdim=True))  # type: ignore[arg-type]  # there
    del loss
    for _ in range(4):
        net(X)
    assert are_lazy(net) == {True}
    assert torpor.is_lazy(net.weight.grad)
    assert torch.equal(net.weight.grad, X.sum(0, keepdim=True))  # type: ignore[arg-type]  # there


def test_what_holds_the_accumulator_of_a_gradient_keeps_the_parameter_plain() -> None:
    """As DistributedDataParallel does, and libraries that hook into it."""
    net, seen = nn.Linear(3, 1), []
    accumulator = net.weight.expand_as(net.weight).grad_fn.next_functions[0][0]  # type: ignore[union-attr]  # it has one
    accumulator.register_hook(lambda *_: seen.append(1))
    for _ in range(3):
        net(X).sum().backward()
    assert not torpor.is_lazy(net.weight)
    assert torpor.is_lazy(net.bias)
    assert seen == [1, 1, 1]
    assert torch.equal(net.weight.grad, X.sum(0, keepdim=True) * 3)  # type: ignore[arg-type]  # there


def test_hooks_gradients_and_attributes_of_parameters_stay() -> None:
    net = nn.Linear(3, 1)
    calls: list[str] = []
    handle = net.weight.register_hook(lambda g: (calls.append("hook"), g * 2)[1])  # type: ignore[func-returns-value]  # two at once
    net.weight.register_post_accumulate_grad_hook(lambda p: calls.append("accumulated"))
    net.weight.tag = "mine"
    net.weight.grad = torch.ones(1, 3)
    grad, reference = net.weight.grad, weakref.ref(net.weight)
    net(X).sum().backward()
    assert torpor.is_lazy(net.weight)
    assert reference() is net.weight
    assert net.weight.grad is grad
    assert net.weight.tag == "mine"
    assert calls == ["hook", "accumulated"]
    assert torch.equal(net.weight.grad, 1 + 2 * X.sum(0, keepdim=True))
    handle.remove()
    net(X).sum().backward()
    assert calls == ["hook", "accumulated", "accumulated"]


def test_what_cannot_be_lazy_stays_plain() -> None:
    class Mine(nn.Parameter):
        pass

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)
            self.mine = Mine(torch.ones(2))
            self.nothing = nn.Parameter(torch.empty(2, device="meta"))
            self.register_parameter("none", None)
            self.register_buffer("sparse", torch.eye(2).to_sparse())
            self.register_buffer("empty", None)

        def forward(self, x: Tensor) -> Tensor:
            return self.linear(x) @ self.sparse.to_dense() + self.mine

    net = Net()
    net(X).sum().backward()
    assert are_lazy(net.linear) == {True}
    assert type(net.mine) is Mine
    assert net.nothing.is_meta
    assert net.sparse.is_sparse
    assert not torpor.is_lazy(net.sparse)
    assert net.mine.grad is not None
    assert net.mine.grad.tolist() == [4.0, 4.0]


def test_parameters_that_get_their_shape_at_the_first_call_become_lazy() -> None:
    net = nn.Sequential(nn.LazyLinear(2), nn.Linear(2, 1))
    for _ in range(3):
        net(X)
    assert are_lazy(net) == {True}


def test_a_module_first_called_in_inference_mode_can_be_trained() -> None:
    net = nn.Linear(3, 1)
    with torch.inference_mode():
        net(X)
    assert are_lazy(net) == {True}
    net(X).sum().backward()
    assert torch.equal(net.weight.grad, X.sum(0, keepdim=True))  # type: ignore[arg-type]  # there


def test_functional_calls_leave_foreign_tensors_alone() -> None:
    net = nn.Linear(3, 1)
    weights = {name: torch.ones_like(p).detach() for name, p in net.named_parameters()}
    expected = X.sum(1, keepdim=True) + 1
    assert torch.equal(functional_call(net, weights, (X,)), expected)
    assert {type(w) for w in weights.values()} == {Tensor}
    net(X)
    net(X)
    assert are_lazy(net) == {True}
    assert torch.equal(functional_call(net, weights, (X,)), expected)


def test_per_sample_gradients_of_a_module_that_was_never_called() -> None:
    net = nn.Linear(3, 1)
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(net, parameters, (x,)).sum()

    got = vmap(grad(loss), (None, 0))(parameters, X)
    assert torch.equal(got["weight"][:, 0], X)


@pytest.mark.filterwarnings(
    "ignore:.*torch.jit:DeprecationWarning", "ignore:TorchScript:torpor.errors.TorporWarning"
)
def test_scripted_modules_are_left_alone() -> None:
    net = nn.Sequential(nn.Linear(3, 2), nn.ReLU())
    file = io.BytesIO()
    torch.jit.save(torch.jit.script(net), file)
    file.seek(0)
    loaded = torch.jit.load(file)
    for _ in range(3):
        assert type(loaded(X)) is Tensor
    wrapped = nn.Sequential(nn.Linear(3, 3), loaded)
    assert torch.allclose(wrapped(X), loaded(wrapped[0](X)))


def test_copies_and_files_of_a_module_are_eagers() -> None:
    net = nn.Linear(3, 2)
    fresh = copy.deepcopy(net)
    net(X)
    file = io.BytesIO()
    torch.save(net.state_dict(), file)
    file.seek(0)
    state = torch.load(file)
    assert {type(t) for t in state.values()} == {Tensor}
    other = nn.Linear(3, 2)
    other.load_state_dict(state)
    assert torch.equal(other(X), net(X))
    assert torch.equal(copy.deepcopy(net)(X), fresh(X))


def test_modules_of_several_threads_become_lazy_at_once() -> None:
    net = nn.Sequential(*[nn.Linear(3, 3) for _ in range(8)])
    wanted = copy.deepcopy(net)
    results: list[Tensor] = []
    threads = [threading.Thread(target=lambda: results.append(net(X))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert are_lazy(net) == {True}
    torpor.disable()
    assert len(results) == 6
    assert all(torch.allclose(result, wanted(X)) for result in results)


def test_modules_are_forgotten_with_their_last_reference() -> None:
    net = nn.Linear(3, 2)
    net(X)
    reference = weakref.ref(net)
    del net
    gc.collect()
    assert reference() is None


# -- optimizers --------------------------------------------------------------------------------


def test_an_optimizer_makes_its_parameters_lazy_and_state_follows() -> None:
    net = nn.Linear(3, 1)
    optimizer = torch.optim.Adam(net.parameters())
    assert are_lazy(net) == {True}
    net(X).sum().backward()
    optimizer.step()
    state = optimizer.state[net.weight]
    assert torpor.is_lazy(state["exp_avg"])
    assert type(state["step"]) is Tensor


def test_an_optimizer_of_plain_tensors_trains_them() -> None:
    def train() -> list[float]:
        x = torch.ones(3).requires_grad_()
        optimizer = torch.optim.SGD([x], lr=0.1, momentum=0.9)
        for _ in range(3):
            optimizer.zero_grad()
            (x * x).sum().backward()
            optimizer.step()
        return x.tolist()  # type: ignore[no-any-return]  # of floats

    torpor.disable()
    expected = train()
    torpor.enable()
    assert train() == pytest.approx(expected)


def test_state_from_a_file_becomes_lazy_at_the_next_step() -> None:
    def run(resume: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Linear(3, 1)
        optimizer = torch.optim.Adam(net.parameters(), 0.1)
        for i in range(4):
            if resume and i == 2:
                file = io.BytesIO()
                torch.save((net.state_dict(), optimizer.state_dict()), file)
                file.seek(0)
                net = nn.Linear(3, 1)
                optimizer = torch.optim.Adam(net.parameters(), 0.1)
                weights, state = torch.load(file)
                net.load_state_dict(weights)
                optimizer.load_state_dict(state)
            optimizer.zero_grad()
            net(X).pow(2).sum().backward()
            optimizer.step()
        if torpor.is_lazy(net.weight):
            assert torpor.is_lazy(optimizer.state[net.weight]["exp_avg"])
            assert not torpor.is_lazy(optimizer.state[net.weight]["step"])
        return net.weight.tolist()[0]  # type: ignore[no-any-return]  # of floats

    torpor.disable()
    expected = run(False)
    torpor.enable()
    assert run(True) == pytest.approx(expected)


def test_a_parameter_group_added_later_becomes_lazy() -> None:
    first, second = nn.Linear(3, 3), nn.Linear(3, 1)
    optimizer = torch.optim.SGD(first.parameters(), 0.1)
    optimizer.add_param_group({"params": second.parameters()})
    assert are_lazy(second) == {True}


def test_parameters_of_a_module_that_is_compiled_stay_plain() -> None:
    net, other = nn.Linear(3, 1), nn.Linear(3, 1)
    compiled = torch.compile(net, backend="eager")
    other.compile(backend="eager")
    torch.optim.SGD(compiled.parameters(), 0.1)
    torch.optim.SGD(other.parameters(), 0.1)
    assert are_lazy(net) == are_lazy(other) == {False}
    assert torch.allclose(compiled(X), nn.functional.linear(X, net.weight, net.bias))
    other(X)
    outer = nn.Sequential(compiled, nn.Linear(1, 1))
    outer(X)
    assert are_lazy(net) == are_lazy(other) == {False}
    assert are_lazy(outer[1]) == {True}


# -- autograd across the border ------------------------------------------------------------------


class Program:
    """What a program about gradients starts from, eagerly or lazily."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))
        self.x = X.clone().requires_grad_()

    def input_gradient(self) -> Any:
        self.net(self.x).pow(2).sum().backward()
        assert self.x.grad is not None
        return self.x.grad, self.x + 0.1 * self.x.grad.sign()

    def gradients_add_up(self) -> Any:
        for _ in range(2):
            self.net(self.x).sum().backward()
        (self.x * 2).sum().backward()
        return self.x.grad

    def gradient_of_both(self) -> Any:
        loss = self.net(self.x).pow(2).sum()
        return torch.autograd.grad(loss, [self.x, *self.net.parameters()])

    def double_backward(self) -> Any:
        (first,) = torch.autograd.grad(self.net(self.x).sum(), self.x, create_graph=True)
        first.pow(2).sum().backward()
        return [p.grad for p in self.net.parameters() if p.grad is not None], self.x.grad

    def retained(self) -> Any:
        inner = self.x * 2
        inner.retain_grad()
        loss = self.net(inner).pow(2).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        return inner.grad, self.x.grad

    def hooked(self) -> Any:
        inner = self.x * 2
        seen: list[Tensor] = []
        inner.register_hook(lambda g: (seen.append(g), g * 3)[1])  # type: ignore[func-returns-value]  # two at once
        self.net(inner).sum().backward()
        return seen, self.x.grad

    def checkpointed(self) -> Any:
        checkpoint(self.net, self.x, use_reentrant=False).sum().backward()
        checkpoint(self.net, self.x, use_reentrant=True).sum().backward()
        return self.x.grad, [p.grad for p in self.net.parameters()]

    def through_a_plain_table(self) -> Any:
        table = torch.arange(6.0).view(2, 3).requires_grad_()
        self.net(nn.functional.embedding(torch.tensor([1, 0, 1]), table)).sum().backward()
        return table.grad

    def plain_after_lazy(self) -> Any:
        weight = torch.ones(2, 2).requires_grad_()
        (self.net(self.x) @ weight).sum().backward()
        return weight.grad, self.x.grad

    def written_into_a_plain_tensor(self) -> Any:
        buffer = torch.zeros(4, 2)
        buffer[:2] = self.net(self.x)[:2]
        buffer.sum().backward()
        return self.x.grad

    def of_a_function(self) -> Any:
        class Twice(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: Tensor) -> Tensor:
                return x * 2

            @staticmethod
            def backward(ctx: Any, grad: Tensor) -> Tensor:
                return grad * 2

        Twice.apply(self.net(Twice.apply(self.x))).sum().backward()
        return self.x.grad


@pytest.mark.filterwarnings("ignore:.*use_reentrant:UserWarning")
@pytest.mark.parametrize("name", [name for name in vars(Program) if not name.startswith("_")])
def test_gradients_cross_between_plain_and_lazy_tensors(name: str) -> None:
    torpor.disable()
    expected = torch.utils._pytree.tree_leaves(getattr(Program(), name)())
    torpor.enable()
    got = torch.utils._pytree.tree_leaves(getattr(Program(), name)())
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(torpor.eager(one.detach()), other)
