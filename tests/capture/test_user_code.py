"""Programs that do to a captured module, or in it, what TorchDynamo does not expect."""

from __future__ import annotations

import copy
import gc
import itertools
import threading
import warnings
from collections.abc import Callable
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.parametrizations import spectral_norm
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

import torpor
from tests.comparison import loads_jit_decompositions
from torpor.capture import optimizer_steps
from torpor.capture.region import Region

pytestmark = loads_jit_decompositions

Put = Callable[[Any], Any]
Change = Callable[[Any], object]


def train(model: Any, put: Put, changes: list[Change], steps: int = 4) -> list[Tensor]:
    """Train, change the model, train: losses, then parameters and buffers."""
    found = []
    torch.manual_seed(1)
    for change in [lambda model: None, *changes]:
        change(model)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for _ in range(steps):
            loss = model(put(torch.randn(3, 4))).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.detach())
            del loss  # its graph holds parameters, which torch may be asked to swap
    return [*found, *model.parameters(), *model.buffers()]


def as_eager(make: Callable[[], nn.Module], put: Put, *changes: Change) -> None:
    result, expected = [], []
    for found, place in ((result, put), (expected, lambda tensor: tensor)):
        torch.manual_seed(0)
        found += [torpor.eager(one.detach()) for one in train(place(make()), place, [*changes])]
    assert len(result) == len(expected)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    counters = torpor.metrics.counters()
    assert counters.get("CapturedRegions") or counters["NotCaptured"]


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.2), nn.Tanh())
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(checkpoint(self.first, x, use_reentrant=False))


def test_checkpoints_of_a_call_that_is_recorded_again(concrete: Put) -> None:
    """What is computed again in backward saves what forward saved: neither is captured."""

    def drop_more(model: Any) -> None:
        model.first[1].p = 0.5

    as_eager(Checkpointed, concrete, drop_more)


def test_hooks_see_all_tensors_that_eager_saves(concrete: Put) -> None:
    def saved(put: Put) -> list[int]:
        torch.manual_seed(0)
        model, counts = put(nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))), []
        x = put(torch.ones(2, 4))
        model(x).sum().backward()
        for _ in range(2):
            seen: list[Tensor] = []
            with torch.autograd.graph.saved_tensors_hooks(
                lambda tensor, seen=seen: seen.append(tensor) or tensor, lambda tensor: tensor
            ):
                model(x).sum().backward()
            counts.append(len(seen))
        return counts

    assert saved(concrete) == saved(lambda tensor: tensor)


class Averaged(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * float(y.detach().numpy().mean())


def test_numpy_in_forward_is_numpy(concrete: Put) -> None:
    as_eager(Averaged, concrete)


def test_a_parametrization_is_added_to_a_captured_module(concrete: Put) -> None:
    def normalise(model: Any) -> None:
        spectral_norm(model[0])
        if torpor.is_lazy(model[1].weight):
            concrete(model)  # the vectors of the norm

    as_eager(lambda: nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)), concrete, normalise)


class Decaying(nn.Module):
    """Backward needs what a buffer held before forward wrote to it."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x) * (self.scale + 1e-5).sqrt()
        self.scale.mul_(0.5)
        return y


def test_gradients_are_of_what_a_buffer_was(concrete: Put) -> None:
    as_eager(lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Decaying()), concrete)


class Remembering(nn.Module):
    """Truncated backpropagation through time: the last result enters without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.last: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        self.last = y if self.last is None else y * self.last.detach()
        return self.last


def test_backward_ends_at_what_was_detached(concrete: Put) -> None:
    as_eager(Remembering, concrete, lambda model: model.eval())


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.unused = (nn.Linear(4, 4) for _ in range(3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = self.body(x)
        return self.head(x), self.unused(x)


def test_a_result_that_is_not_used_gives_no_gradients(concrete: Put) -> None:
    """Not even zeros: an optimizer would make a step."""

    def found(put: Put) -> list[bool]:
        model, none = put(Heads()), []
        for used in (0, 1, 0):
            model.zero_grad()
            model(put(torch.ones(2, 4)))[used].sum().backward()
            none += [parameter.grad is None for parameter in model.parameters()]
        return none

    assert found(concrete) == found(lambda tensor: tensor)
    assert torpor.metrics.counters()["CapturedRegions"] == 2


class ManyResults(nn.Module):
    """Results that have all parameters in common; at zero, one has an infinite derivative."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.bias = nn.Linear(4, 6), nn.Parameter(torch.tensor([0.0, 1.0]))
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        h = self.layer(x)
        part, *_ = h.chunk(3, 1)
        return h, h.abs().sqrt(), part * self.bias, h.exp().unbind(1)[1]


def test_any_results_may_be_used(concrete: Put) -> None:
    """Zeros, in the place of gradients that do not exist, would be NaN behind the root."""

    def found(put: Put) -> list[Any]:
        model, gradients = put(ManyResults()), []
        subsets = [set for n in range(1, 5) for set in itertools.combinations(range(4), n)]
        for used in (*subsets, *subsets[:3]):
            model.zero_grad()
            results = model(put(torch.arange(8.0).view(2, 4)))
            sum(results[place].sum() for place in used).backward()
            gradients += [parameter.grad for parameter in model.parameters()]
        return [None if one is None else torpor.eager(one).cpu() for one in gradients]

    for one, other in zip(found(concrete), found(lambda tensor: tensor), strict=True):
        assert (one is None) == (other is None)
        if one is not None:
            assert one.isnan().equal(other.isnan())
            assert one.nan_to_num().equal(other.nan_to_num())
    assert torpor.metrics.counters()["CapturedRegions"] == 2
    assert "NotCaptured" not in torpor.metrics.counters()


class Moments(nn.Module):
    """Two results of one op: what it does where one is not used, a graph does not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.var_mean(self.layer(x), 0)


def test_results_of_one_op_are_differentiated_op_by_op(concrete: Put) -> None:
    torch.manual_seed(0)
    eager = Moments()

    def found(model: nn.Module, put: Put) -> list[Tensor]:
        for used in (1, 0, 1):
            model(put(torch.arange(8.0).view(2, 4)))[used].sum().backward()
        return [torpor.eager(parameter.grad).cpu() for parameter in model.parameters()]

    result = found(concrete(copy.deepcopy(eager)), concrete)
    for one, other in zip(result, found(eager, lambda tensor: tensor), strict=True):
        assert one.equal(other)


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        return y * 2 if y.sum().item() > 0 else y


def test_nobody_hears_of_a_capture(concrete: Put, capfd: pytest.CaptureFixture[str]) -> None:
    """TorchDynamo neither warns nor logs."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        as_eager(Branching, concrete)
    assert not capfd.readouterr().err


class Drawing(nn.Module):
    """Draws of which some depend on values and some do not."""

    def __init__(self, *draws: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.draws = nn.Linear(4, 4), draws

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)
        return h + sum(draw(h.detach()) for draw in self.draws)


def poisson(h: Tensor) -> Tensor:
    return torch.poisson(h.abs() * 5)


@pytest.mark.parametrize(
    ("draws", "is_captured"),
    [
        ((torch.rand_like, poisson), True),
        ((poisson, torch.rand_like), False),
        ((torch.rand_like, poisson, torch.randn_like), False),
    ],
    ids=["known first", "known last", "known around"],
)
def test_random_numbers_are_drawn_in_the_order_of_the_program(
    draws: Any, is_captured: bool, concrete: Put
) -> None:
    as_eager(lambda: Drawing(*draws), concrete)
    assert ("NotCaptured" not in torpor.metrics.counters()) == is_captured


class Inner(nn.Module):
    """Its forward calls a function with a default, behind a graph break."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 11)  # ops of no other test: nodes are new

    def forward(self, x: Tensor) -> Tensor:
        h = self.layer(x)

        def inner(z: Tensor, *, factor: float = 2.0) -> Tensor:
            print(end="")
            return z * factor + h

        return inner(h.tanh())


def test_code_that_torch_dynamo_makes_may_have_no_hash(concrete: Put) -> None:
    as_eager(Inner, concrete)


class Asking(nn.Module):
    """Asks whether it is being compiled, and does something else then."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        if torch.compiler.is_compiling() or torch.compiler.is_dynamo_compiling():
            return y * 2
        return y


def test_code_that_asks_whether_it_is_compiled_does_what_it_does_in_eager(concrete: Put) -> None:
    as_eager(Asking, concrete)


class Scales(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList(torch.full((4,), 0.5 + place) for place in range(5))

    def forward(self, x: Tensor) -> Tensor:
        for scale in self.scales:
            x = (x * scale).tanh()
        return x


def test_hooks_of_several_parameters_are_called_in_eagers_order(concrete: Put) -> None:
    def called(put: Put) -> list[int]:
        model, order = put(Scales()), list[int]()
        parameters = list(model.parameters())
        parameters[0].register_hook(lambda gradient: order.append(0))
        for step in range(4):
            model(put(torch.ones(2, 4))).sum().backward()
            for place in range(1, len(parameters)) if step == 1 else ():
                parameters[place].register_post_accumulate_grad_hook(
                    lambda _, place=place: order.append(place)
                )
        return order

    assert called(concrete) == called(lambda tensor: tensor)
    assert torpor.metrics.counters()["CapturedRegions"]


class Activation(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.tanh()


def test_forward_of_a_class_may_be_replaced_later(
    concrete: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = Activation.forward

    def halve(model: Any) -> None:
        monkeypatch.setattr(Activation, "forward", lambda self, x: x * 0.5)

    def restore(model: Any) -> None:
        monkeypatch.setattr(Activation, "forward", before)

    as_eager(lambda: nn.Sequential(nn.Linear(4, 4), Activation()), concrete, halve, restore)


def test_a_mode_sees_the_functions_that_eager_calls(concrete: Put) -> None:
    class Names(TorchFunctionMode):
        def __torch_function__(
            self, function: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            names.append(function.__name__)
            return function(*args, **kwargs or {})

    names: list[str] = []
    for place in (concrete, lambda tensor: tensor):
        model, x = place(linears()), place(torch.ones(2, 4))
        model(x)
        with Names():
            model(x)
    assert names == ["linear", "tanh", "linear"] * 2


# -- threads ---------------------------------------------------------------------------------------


def linears() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))


def test_a_region_may_meet_another_threads_cut(
    concrete: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its key is of a trace that has ended then: nothing is remembered under it."""
    record, regions = Region._record, []

    def after_a_cut(self: Region, *args: Any) -> Any:
        regions.append(self)
        torpor.sync()
        return record(self, *args)

    monkeypatch.setattr(Region, "_record", after_a_cut)
    as_eager(linears, concrete)
    assert regions
    assert not any(region.calls for region in regions)


def in_another_thread(function: Callable[[], object]) -> None:
    thread = threading.Thread(target=function)
    thread.start()
    thread.join()


def test_another_thread_may_write_before_a_region_is_recorded(
    concrete: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What comes of the write is not remembered as what comes of the values before it."""
    record, inputs = Region._record, []

    def after_a_write(self: Region, *args: Any) -> Any:
        in_another_thread(lambda: inputs.pop().mul_(2) if inputs else None)
        return record(self, *args)

    monkeypatch.setattr(Region, "_record", after_a_write)
    plain = nn.Linear(4, 4)
    model, found = concrete(plain), []
    with torch.no_grad():
        for step in range(4):
            x = concrete(torch.ones(2, 4))
            inputs[:] = [x] if step == 0 else []
            found.append(torpor.eager(model(x)))
            torpor.sync()
        expected = [plain(torch.full((2, 4), number)) for number in (2.0, 1.0, 1.0, 1.0)]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert torpor.metrics.counters()["RegionLookups"]


def test_another_thread_may_take_run_time_inputs_before_a_step_is_repeated(
    concrete: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls, other = optimizer_steps._calls, concrete(torch.ones(3))
    steps = itertools.count()

    def promoted() -> None:
        other.mul(100.0 + next(steps))

    def after_an_input(*args: Any) -> Any:
        in_another_thread(promoted)
        return calls(*args)

    def train(put: Put) -> list[Tensor]:
        weight, found = put(torch.ones(3)).requires_grad_(), []
        optimizer = torch.optim.SGD([weight], lr=0.1)
        for step in range(14):
            optimizer.param_groups[0]["lr"] = 0.1 + step / 100
            weight.grad = put(torch.ones(3)).abs()
            monkeypatch.setattr(optimizer_steps, "_calls", after_an_input if step > 8 else calls)
            optimizer.step()
            promoted()
            found.append(torpor.eager(weight.detach()).clone())
            torpor.sync()
        return found

    result, expected = train(concrete), train(lambda tensor: tensor)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert torpor.metrics.counters()["RegionLookups"]


@pytest.mark.parametrize("late", [False, True])
def test_another_thread_may_write_before_a_step_is_made(
    late: bool, concrete: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`late`: where the step would be repeated; else, where it is recorded."""
    calls = optimizer_steps._calls

    def train(put: Put, writes: set[int]) -> list[Tensor]:
        weight, found = put(torch.ones(3)).requires_grad_(), []
        optimizer = torch.optim.SGD([weight], lr=0.5)

        def double() -> None:
            with torch.no_grad():
                weight.mul_(2)

        def after_a_write(*args: Any) -> Any:
            if step in writes:
                in_another_thread(double)
            return calls(*args)

        optimizer_steps._calls = after_a_write
        for step in range(8):
            with torch.no_grad():
                weight.copy_(put(torch.ones(3)))
            weight.grad = put(torch.ones(3)).abs()
            if put is not concrete and step in writes:
                double()
            optimizer.step()
            found.append(torpor.eager(weight.detach()).clone())
            torpor.sync()
        return found

    monkeypatch.setattr(optimizer_steps, "_calls", calls)
    writes = {6} if late else {1}
    result, expected = train(concrete, writes), train(lambda tensor: tensor, writes)
    assert all(torch.equal(a, b) for a, b in zip(result, expected, strict=True))
    assert torpor.metrics.counters()["RegionLookups"]


def test_an_optimizers_step_may_meet_another_threads_cut(
    concrete: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    on_standins = optimizer_steps._on_standins

    def after_a_cut(*args: Any) -> Any:
        torpor.sync()
        return on_standins(*args)

    as_eager(linears, concrete)
    monkeypatch.setattr(optimizer_steps, "_on_standins", after_a_cut)
    as_eager(linears, concrete)


def test_nothing_is_captured_while_several_threads_call_modules(concrete: Put) -> None:
    called, done = threading.Event(), threading.Event()

    def other() -> None:
        concrete(nn.Linear(2, 2))(concrete(torch.ones(2)))
        called.set()
        done.wait()

    thread = threading.Thread(target=other)
    thread.start()
    called.wait()
    model, before = concrete(linears()), torpor.metrics.counters().get("CapturedRegions", 0)
    model(concrete(torch.ones(2, 4)))
    assert torpor.metrics.counters().get("CapturedRegions", 0) == before
    done.set()
    thread.join()
    model(concrete(torch.ones(2, 4)))
    assert torpor.metrics.counters()["CapturedRegions"] == before + 1


def test_a_capture_keeps_no_tensors_alive(concrete: Put) -> None:
    model, x = concrete(linears()), concrete(torch.ones(2, 4))
    model(x).sum().backward()
    torpor.sync(wait=True)
    tensors = [ref(x), *map(ref, model.parameters())]
    del model, x
    gc.collect()
    assert not any(tensor() is not None for tensor in tensors)
    assert torpor.metrics.counters()["CapturedRegions"]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
def test_a_nested_tensor_after_a_dense_one_is_recorded_op_by_op(concrete: Put) -> None:
    model = concrete(nn.Linear(4, 3))
    model(torch.randn(2, 4)).sum().backward()
    parts = [torch.randn(2, 4), torch.randn(3, 4)]
    nested = torch.nested.nested_tensor(parts)
    found = model(nested).unbind()
    plain = torpor.eager(copy.deepcopy(model))
    assert all(torch.equal(torpor.eager(a), b) for a, b in zip(found, plain(nested).unbind()))


def test_a_sparse_tensor_after_a_dense_one_is_as_in_eager(concrete: Put) -> None:
    class Product(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(4, 3))

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight

    model = concrete(Product())
    x = torch.eye(4)[:2]
    assert torch.equal(torpor.eager(model(x)), torpor.eager(model(x.to_sparse())))
