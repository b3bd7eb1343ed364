"""TorchDynamo both ways: its backends behind torpor, and torpor behind `torch.compile`."""

from __future__ import annotations

import copy
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import torpor
from torpor.backend import registry
from torpor.compat import dynamo
from torpor.errors import BackendError, TorporWarning, UnsupportedError


@pytest.fixture(autouse=True)
def forget_compiled_graphs() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
    )


def train(model: nn.Module, call: Callable[[Tensor], Tensor], place: Any) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for step in range(4):
        torch.manual_seed(step)
        loss = call(place(torch.randn(4, 5))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["eager", "aot_eager"])
def test_a_dynamo_backend_trains_as_eager_does(name: str) -> None:
    model = network()
    plain = copy.deepcopy(model)
    expected = train(plain, plain, lambda tensor: tensor)
    torpor.use(f"dynamo:{name}")
    lazy = model.to("lazy")
    assert train(lazy, lazy, lambda tensor: tensor.to("lazy")) == pytest.approx(expected, rel=1e-4)


def test_an_unknown_dynamo_backend_is_refused_with_the_nearest_one() -> None:
    with pytest.raises(BackendError, match=r"'aot_eagr'.*did you mean 'dynamo:aot_eager'"):
        torpor.use("dynamo:aot_eagr")


def test_a_family_of_backends_is_listed_once() -> None:
    assert registry.backends()["dynamo:NAME"] == "available"
    with pytest.raises(BackendError, match="no backend 'dynamo:'"):
        registry.make("dynamo:")


# -- torch.compile(backend="torpor") ---------------------------------------------------------------


def test_the_entry_point_names_the_backend() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    named = project["project"]["entry-points"]["torch_dynamo_backends"]
    module, _, attribute = named["torpor"].partition(":")
    assert (module, attribute) == (dynamo.__name__, dynamo.torpor.__name__)


def test_compiled_training_on_the_reference_is_eagers_bit_for_bit() -> None:
    model = network()
    plain = copy.deepcopy(model)
    expected = train(plain, plain, lambda tensor: tensor)
    fast = torch.compile(model, backend=dynamo.torpor, options={"backend": "reference"})
    assert train(model, fast, lambda tensor: tensor) == expected
    for one, other in zip(plain.state_dict().values(), model.state_dict().values()):
        assert torch.equal(one, other)


def test_the_backend_in_use_compiles_where_none_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = torpor.use("reference")
    executed = []
    execute = backend.execute

    def count(*args: Any) -> Any:
        executed.append(args[0].name)
        return execute(*args)

    monkeypatch.setattr(backend, "execute", count)
    function = torch.compile(lambda x: (x.sin(), x, 3, x.t()), backend=dynamo.torpor)
    x = torch.randn(2, 3)
    before = torpor.metrics.counters()["OpsRecorded"]
    sine, same, three, turned = function(x)
    assert torch.equal(sine, x.sin())
    assert same is x
    assert three == 3
    assert torch.equal(turned, x.t())
    assert executed == ["dynamo"]
    assert torpor.metrics.counters()["OpsRecorded"] == before


def test_other_sizes_are_compiled_anew_and_give_eagers_results() -> None:
    def function(x: Tensor) -> Tensor:
        return (x @ x.t()).cumsum(0) / x.shape[0]

    fast = torch.compile(function, backend=dynamo.torpor, dynamic=True)
    for size in (3, 5, 7, 3):
        x = torch.randn(size, 4)
        assert torch.equal(fast(x), function(x))


def test_options_without_a_backend_are_refused() -> None:
    fast = torch.compile(torch.sin, backend=dynamo.torpor, options={"max_nodes": 3})
    with pytest.raises(Exception, match=r"\['max_nodes'\] belong to a backend"):
        fast(torch.ones(2))


def refuse(module: Any, args: Any) -> Any:
    raise UnsupportedError("for this test")


def test_a_graph_that_cannot_be_taken_runs_eagerly_with_a_warning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dynamo, "with_fixed_sizes", refuse)
    fast = torch.compile(torch.sin, backend=dynamo.torpor)
    x = torch.randn(3)
    with pytest.warns(TorporWarning, match="runs this graph eagerly: for this test"):
        assert torch.equal(fast(x), x.sin())


def test_random_numbers_are_eagers_in_the_order_of_the_program() -> None:
    def function(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        late = torch.rand_like(x.sin().sum(0))
        return late + 1, torch.rand(3) * x.sum(), torch.nn.functional.dropout(x.cos(), 0.5)

    for name in ("reference", "dynamo:eager", "inductor"):
        torch.compiler.reset()
        fast = torch.compile(function, backend=dynamo.torpor, options={"backend": name})
        x = torch.randn(2, 3)
        for seed in range(2):
            torch.manual_seed(seed)
            expected = function(x)
            torch.manual_seed(seed)
            for one, other in zip(expected, fast(x)):
                torch.testing.assert_close(other, one)


def test_numbers_that_follow_from_sizes_are_constants() -> None:
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention

    def function(q: Tensor) -> list[Tensor]:
        made = attention(q, q, q, None, True, 0.1, True)
        return [made[0] + made[4]]  # the longest query

    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
        builder = dynamo._NodeBuilder(make_fx(function)(q))
    (result,) = builder.computed
    assert result.node.op.name == "aten.add.Tensor"
    assert result.node.args[0].node.op.name == str(attention.default)
    assert result.node.args[1] == 16


def test_ops_that_draw_are_tied_together_in_the_order_of_the_program() -> None:
    attention = torch.ops.aten._scaled_dot_product_cudnn_attention.default
    dropout = torch.ops.aten.native_dropout.default

    def function(q: Tensor) -> list[Tensor]:
        first, _ = dropout(q, 0.1, True)
        made = attention(first, q, q, None, True, 0.2, True)
        second, mask = dropout(made[0], 0.3, True)
        kept, _ = dropout(second, 0.4, False)
        return [kept, mask, made[1]]

    with FakeTensorMode():
        q = torch.empty(2, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
        module, other = make_fx(function)(q), make_fx(lambda t: function(t + torch.rand_like(t)))(q)
        thin = torch.empty(1, 4, 16, 64, device="cuda", dtype=torch.bfloat16)
        unlike = make_fx(lambda t: function(t.expand(2, 4, 16, 64)))(thin)
        builder = dynamo._NodeBuilder(module, in_order=True)
    assert dynamo._draws_in_order(module)
    assert not dynamo._draws_in_order(other)
    assert not dynamo._draws_in_order(unlike)
    one, product, two, three, *_ = builder.nodes
    assert [node.op.name for node in (one, two, three)] == [
        "torpor.dropout_mask.default",
        "torpor.cudnn_attention_after.default",
        "torpor.dropout_mask.default",
    ]
    assert one.args[0] is None
    assert two.args[:2] == (one.outputs[0], product.outputs[0])
    assert three.args[0] is two.outputs[-1]
    mask = three.outputs[0].type
    assert three.args[1:3] == (mask.shape, mask.stride)
    assert builder.computed[1] is three.outputs[0]


# -- inputs that are written to --------------------------------------------------------------------


def _swap(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Writes inputs from one another, from what is returned, twice from one result, in part."""
    first = a.clone()
    a.copy_(b)
    b.copy_(first)
    c[1:].mul_(2)
    return c + a


def _accumulate(a: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    a.add_(c)
    b.copy_(a)
    return a * 2, a.clone()


@pytest.mark.parametrize("backend", ["reference", "inductor", "dynamo:eager"])
@pytest.mark.parametrize("function", [_swap, _accumulate])
def test_inputs_are_written_to_as_in_eager(function: Callable[..., Any], backend: str) -> None:
    options = {"backend": backend}
    compiled = torch.compile(function, backend=dynamo.torpor, options=options)
    torch.manual_seed(0)
    given = [torch.randn(4, 3) for _ in range(3)]
    wide = [torch.zeros(4, 5)[:, 1:4].copy_(tensor) for tensor in given]  # windows of more memory
    for eager in (given, wide):
        own = [tensor.clone() for tensor in eager] if eager is given else copy.deepcopy(eager)
        memory = [tensor.data_ptr() for tensor in own]
        for _ in range(3):
            expected, actual = function(*eager), compiled(*own)
            torch.testing.assert_close(actual, expected)
            torch.testing.assert_close(own, eager)
        assert [tensor.data_ptr() for tensor in own] == memory


def _read_first(x: Tensor, weight: Tensor) -> Tensor:
    old = x.sin()
    x.add_(1)
    return (weight * old).exp()


def _read_a_part_first(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    old = x.clone()
    y = weight[1:] * old[1:] * old[1:] + old.t()[0, 0]
    x[1:].mul_(2)
    return y, x * weight


@pytest.mark.parametrize("backend", ["reference", "inductor", "dynamo:eager"])
@pytest.mark.parametrize("function", [_read_first, _read_a_part_first])
def test_gradients_are_those_of_what_was_read_before_it_was_written_over(
    function: Callable[..., Any], backend: str
) -> None:
    """Forward keeps an input for backward, and writes to it."""

    def gradients(call: Callable[..., Any]) -> list[Any]:
        torch.manual_seed(0)
        x, weight = torch.randn(3, 4), torch.randn(3, 4, requires_grad=True)
        found: list[Any] = []
        for _ in range(3):
            results = call(x, weight)
            both = results if isinstance(results, tuple) else (results,)
            found += [*torch.autograd.grad([t.sin().sum() for t in both], weight), x.clone()]
        return found

    compiled = torch.compile(function, backend=dynamo.torpor, options={"backend": backend})
    torch.testing.assert_close(gradients(compiled), gradients(function))


@pytest.mark.parametrize("backend", ["reference", "inductor"])
def test_running_statistics_are_written_by_the_graph_itself(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    versions = []
    make = dynamo.Version.__init__

    def noted(self: dynamo.Version, *args: Any) -> None:
        make(self, *args)
        versions.append(self)

    monkeypatch.setattr(dynamo.Version, "__init__", noted)
    model = network()
    plain = copy.deepcopy(model)
    compiled = torch.compile(model, backend=dynamo.torpor, options={"backend": backend})
    assert train(model, compiled, lambda t: t) == pytest.approx(
        train(plain, plain, lambda t: t), rel=1e-4
    )
    for name, buffer in model.named_buffers():
        torch.testing.assert_close(buffer, dict(plain.named_buffers())[name])
    left = {"reference": 3, "inductor": 0}[backend]  # mean, variance, number of batches
    assert sum(len(version.written) for version in versions) == left


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("name", ["reference", "inductor"])
def test_parts_of_an_input_are_returned_as_parts_of_it(
    name: str, requires_grad: bool, dynamic: bool
) -> None:
    def function(x: Tensor) -> tuple[Any, ...]:
        a, b = x.chunk(2)
        return a, b, a + b, x[1], 7

    options = {"backend": name}
    fast = torch.compile(function, backend=dynamo.torpor, dynamic=dynamic, options=options)
    for _ in range(2):
        x = torch.arange(8.0).reshape(4, 2).requires_grad_(requires_grad)
        expected, actual = function(x), fast(x)
        assert expected[4] == actual[4]
        for one, other in zip(actual[:4], expected[:4], strict=True):
            assert torch.equal(one, other)
        for place in (0, 1, 3):
            assert actual[place].data_ptr() == expected[place].data_ptr()


@pytest.mark.parametrize("name", ["dynamo:eager", "inductor"])
def test_what_is_kept_for_backward_may_be_views(name: str) -> None:
    """Of what is computed, and of inputs, also of those that are parts of others."""

    def function(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        y = x.sin()
        a, b = y.chunk(2, -1)
        return y.sum(), a.t(), b.unsqueeze(1), y, weight.t(), weight[1:], x.expand(2, 4, 6)

    x, whole = torch.randn(4, 6), torch.randn(4, 5)
    weight = whole[1:]
    module = make_fx(function, tracing_mode="fake")(x, weight)
    backend = registry.make(name)
    version = dynamo.Version(module, [x, weight], backend, shown=1)
    for _ in range(3):
        expected, actual = function(x, weight), version([x, weight])
        for one, other in zip(expected, actual, strict=True):
            assert torch.allclose(one, other)
            assert one.stride() == other.stride()
        _, a, b, y, transposed, part, expanded = actual
        assert {t.untyped_storage().data_ptr() for t in (a, b, y)} == {y.data_ptr()}
        assert transposed.data_ptr() == weight.data_ptr()
        assert part.data_ptr() == weight[1:].data_ptr()
        assert expanded.data_ptr() == x.data_ptr()


def _parts_of_one(x: Tensor) -> tuple[Tensor, ...]:
    y = x.sin()
    return y, y.t(), y.view(-1)[2:], y.detach(), x.cos()[1:]


@pytest.mark.parametrize("name", ["reference", "dynamo:eager", "inductor"])
def test_results_that_lie_in_one_memory_do_so_when_compiled(name: str) -> None:
    options = {"backend": name}
    fast = torch.compile(_parts_of_one, backend=dynamo.torpor, options=options)
    x = torch.randn(3, 4)
    for _ in range(3):
        expected, actual = _parts_of_one(x), fast(x)
        for results in (expected, actual):
            results[1].add_(1)
            results[2].mul_(2)
        torch.testing.assert_close(actual, expected)
        assert [t.stride() for t in actual] == [t.stride() for t in expected]


@pytest.mark.parametrize("name", ["reference", "inductor"])
def test_gradients_share_no_memory(name: str) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return (x.view(-1) + w).sin()

    fast = torch.compile(function, backend=dynamo.torpor, options={"backend": name})
    x, w = torch.randn(3, 4, requires_grad=True), torch.randn(12, requires_grad=True)
    for _ in range(3):
        x.grad = w.grad = None
        fast(x, w).sum().backward()
        assert x.grad is not None
        assert w.grad is not None
        x.grad.zero_()
        assert w.grad.abs().sum() > 0
