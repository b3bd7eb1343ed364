"""Ops of `torch.library` that `torpor.ops.register` was told of: typed, recorded, taken apart."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import torpor
from tests.comparison import Put, agree, assert_same, line_below, message
from torpor.backends.inductor import runtime as inductor_runtime
from torpor.errors import RegistrationError
from torpor.ir import TensorType

NS = "torpor_tests_own"
_library = torch.library.Library(NS, "DEF")
_library.define("ghost(Tensor x, float by) -> Tensor")  # nothing computes it but a lowering
_library.define("bump_(Tensor(a!) x, int by=1) -> Tensor(a!)")
_library.define("swap(Tensor(a!) x, Tensor(b!) y) -> ()")
_library.define("row(Tensor(a) x, int index) -> Tensor(a)")
_library.define("noise(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)
_library.define("largest(Tensor x) -> float")
_library.define("two.int(Tensor x, int by) -> Tensor")
_library.define("two.float(Tensor x, float by) -> Tensor")
_library.define("composite(Tensor x) -> Tensor")
_library.define("collect_all(Tensor[] xs, Tensor? w=None, *, int times=1) -> (Tensor, Tensor[])")


def _swap(x: Tensor, y: Tensor) -> None:
    old = x.clone()
    x.copy_(y)
    y.copy_(old)


def _collect_all(
    xs: list[Tensor], w: Tensor | None = None, *, times: int = 1
) -> tuple[Tensor, list[Tensor]]:
    total = torch.stack(xs).sum(0) * times
    return (total if w is None else total * w), [x * times for x in xs]


_library.impl("bump_", lambda x, by=1: x.add_(by), "CPU")
_library.impl("swap", _swap, "CPU")
_library.impl("row", lambda x, index: x[index], "CPU")
_library.impl("noise", lambda x: x + torch.rand(x.shape), "CPU")
_library.impl("composite", lambda x: x * 2, "CompositeImplicitAutograd")
_library.impl("collect_all", _collect_all, "CPU")
own = getattr(torch.ops, NS)

kernel_runs: list[tuple[int, ...]] = []


@torch.library.custom_op(f"{NS}::tripled", mutates_args=())
def tripled(x: Tensor) -> Tensor:
    kernel_runs.append(tuple(x.shape))
    return x * 3


tripled.register_autograd(lambda ctx, grad: grad * 3)
tripled.register_vmap(lambda info, in_dims, x: (tripled(x), in_dims[0]))


@torch.library.custom_op(f"{NS}::increment", mutates_args=("x",))
def increment(x: Tensor, by: float) -> None:
    x.add_(by)


X = torch.arange(6.0).view(2, 3)
BACKENDS = ["reference", "torchscript", "dynamo:aot_eager", "inductor"]
Register = Callable[..., Any]


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "inductor" and inductor_runtime.unavailable() is not None:
        pytest.skip(str(inductor_runtime.unavailable()))
    torpor.use(request.param)
    yield request.param
    torpor.use("reference")


@pytest.fixture
def register() -> Iterator[Register]:
    """`torpor.ops.register`, undone after the test."""
    known: dict[Any, None] = {}

    def call(op: Any, *args: Any, **kwargs: Any) -> Any:
        known[torpor.ops.register(op, *args, **kwargs)] = None
        return op

    kernel_runs.clear()
    torpor.metrics.reset()
    yield call
    for op in known:
        torpor.ops.unregister(op)


def fallbacks() -> list[str]:
    names = torpor.metrics.counters()
    return [n for n in names if n.startswith((f"{NS}::", "fallback::", "CompileFailed"))]


# -- lowerings -------------------------------------------------------------------------------------


def test_a_lowering_stands_for_an_op_that_nothing_else_computes(
    put: Put, backend: str, register: Register
) -> None:
    register(own.ghost, lowering=lambda x, by: x * by + 1)
    x = put(X)
    result = own.ghost(x + 1, 2.0) * 2
    assert torpor.is_pending(result)
    assert_same(result, ((X + 1) * 2 + 1) * 2)
    assert fallbacks() == []


def test_the_op_is_one_node_and_the_backend_sees_its_parts(
    virtual: Put, register: Register
) -> None:
    register(own.ghost, lowering=lambda x, by: (x * by).relu())
    result = own.ghost(virtual(X), 2.0)
    assert f"{NS}.ghost.default(%0, 2.0)" in torpor.graph(result)
    seen = torpor.graph(result, "backend")
    assert "ghost.default(" not in seen
    assert "aten.mul.Tensor(%0, 2.0)" in seen
    assert "aten.relu.default" in seen


def test_a_written_argument_is_written_and_the_old_values_stay(
    put: Put, backend: str, register: Register
) -> None:
    register(increment, lowering=lambda x, by: x.add_(by))
    register(own.bump_, lowering=lambda x, by=1: x.copy_(x + by))
    register(own.swap, lowering=_swap)

    def program(x: Tensor) -> object:
        before = x * 2
        after = before.clone()
        increment(after, 3.0)
        assert own.bump_(after[0], 5) is not after
        other = x + 100
        own.swap(after, other)
        return before, after, other

    agree(put, program, X)
    assert fallbacks() == []


def test_an_argument_that_a_lowering_leaves_alone_stays_what_it_is(
    put: Put, backend: str, register: Register
) -> None:
    register(own.swap, lowering=lambda x, y: None)

    def program(x: Tensor) -> object:
        y, z = x * 2, (x * 3).t()
        own.swap(y, z)
        own.swap(y[0], x)
        return y, z

    expected = [X * 2, (X * 3).t()]
    assert_same(list(program(put(X))), expected)


def test_lists_optionals_and_several_results(put: Put, backend: str, register: Register) -> None:
    register(own.collect_all, lowering=_collect_all)

    def program(x: Tensor) -> object:
        total, each = own.collect_all([x, x + 1, x * 2], times=2)
        weighted, _ = own.collect_all([total, each[0]], x)
        return total, each, weighted

    agree(put, program, X)
    assert fallbacks() == []


def test_gradients_are_those_of_the_op(put: Put, backend: str, register: Register) -> None:
    register(tripled, lowering=lambda x: x + x + x)
    kernel_runs.clear()

    def program(x: Tensor) -> object:
        tripled(x * 2).sum().backward()
        return x.grad

    assert_same(program(put(X.clone().requires_grad_())), torch.full((2, 3), 6.0))
    assert kernel_runs == []
    assert fallbacks() == []


def test_vmap_uses_the_rule_of_the_op(put: Put, register: Register) -> None:
    register(tripled, lowering=lambda x: x + x + x)
    agree(put, lambda x: torch.func.vmap(tripled, in_dims=1, out_dims=1)(x), X)


def test_a_lowering_that_returns_its_argument_makes_a_copy(
    put: Put, backend: str, register: Register
) -> None:
    register(own.ghost, lowering=lambda x, by: x)
    x = put(X)
    y = own.ghost(x, 1.0)
    y.add_(1)
    assert_same(x, X)
    assert_same(y, X + 1)


def test_a_view_made_by_a_lowering_gets_the_strides_that_were_promised(
    put: Put, backend: str, register: Register
) -> None:
    rule = lambda x, by: TensorType.contiguous(x.shape[::-1], x.dtype, x.device)  # noqa: E731
    register(own.ghost, type_rule=rule, lowering=lambda x, by: (x * by).t())
    result = own.ghost(put(X), 2.0)
    assert_same(result, (X * 2).t().contiguous())


def test_tensors_made_inside_are_on_the_device_of_the_arguments(
    put: Put, backend: str, register: Register
) -> None:
    register(
        own.ghost,
        lowering=lambda x, by: x + torch.ones(x.shape, device=x.device) + torch.tensor(by),
    )
    assert_same(own.ghost(put(X), 2.0), X + 3)
    assert fallbacks() == []


def test_a_lowering_may_call_another_op_that_has_one(put: Put, register: Register) -> None:
    register(tripled, lowering=lambda x: x + x + x)
    register(own.ghost, lowering=lambda x, by: tripled(x) * by)
    assert_same(own.ghost(put(X), 2.0), X * 6)
    assert kernel_runs == []


def test_equal_calls_are_one_node_and_other_numbers_another(put: Put, register: Register) -> None:
    register(own.ghost, lowering=lambda x, by: x * by)
    x = put(X)
    for step in range(4):
        a, b, c = own.ghost(x, 2.0), own.ghost(x, 2.0), own.ghost(x, float(step))
        assert_same([a, b, c], [X * 2, X * 2, X * step])


def test_modes_of_the_user_do_not_reach_a_lowering(register: Register) -> None:
    register(own.ghost, lowering=lambda x, by: x.clone().mul_(by))
    with torpor.mode(), torch.inference_mode():
        result = own.ghost(torch.ones(2, 3) + 1, 3.0)
        assert result.tolist() == [[6.0] * 3] * 2


def test_one_backend_may_have_a_lowering_of_its_own(put: Put, register: Register) -> None:
    register(own.ghost, lowering=lambda x, by: x * by)
    register(own.ghost, lowering=lambda x, by: x * by + 0.5, backend="torchscript")
    register(own.ghost, lowering=lambda x, by: x * by + 0.25, backend="dynamo")
    assert_same(own.ghost(put(X), 2.0), X * 2)
    with torpor.using("torchscript"):
        assert_same(own.ghost(put(X), 2.0), X * 2 + 0.5)
    with torpor.using("dynamo:eager"):
        assert_same(own.ghost(put(X), 2.0), X * 2 + 0.25)


def test_a_backend_may_have_the_node_whole(put: Put, register: Register) -> None:
    register(tripled, lowering=lambda x: x + x + x)
    register(tripled, lowering=torpor.ops.WHOLE, backend="reference")
    kernel_runs.clear()
    assert_same(tripled(put(X)), X * 3)
    assert kernel_runs == [(2, 3)]
    with torpor.using("torchscript"):
        assert_same(tripled(put(X)), X * 3)
    assert kernel_runs == [(2, 3)]


# -- type rules --------------------------------------------------------------------------------


def test_a_type_rule_lets_an_op_be_recorded(put: Put, backend: str, register: Register) -> None:
    given: list[Any] = []

    def rule(x: TensorType) -> TensorType:
        given.append(x)
        return x

    register(tripled, type_rule=rule)
    x = put(X)
    result = tripled(x + 1)
    assert torpor.is_pending(result)
    assert given == [TensorType.of_tensor(x)]
    assert_same(result, (X + 1) * 3)
    assert fallbacks() == []


def test_a_type_rule_for_lists_optionals_and_several_results(
    put: Put, backend: str, register: Register
) -> None:
    def rule(xs: Any, w: Any = None, *, times: int = 1) -> Any:
        assert w is None or isinstance(w, TensorType)
        return xs[0], list(xs)

    register(own.collect_all, type_rule=rule)
    agree(put, lambda x: own.collect_all([x, x + 1], times=3), X)
    agree(put, lambda x: own.collect_all([x, x + 1], x), X)
    assert fallbacks() == []


def test_a_type_rule_for_an_op_that_writes(put: Put, backend: str, register: Register) -> None:
    register(own.bump_, type_rule=lambda x, by=1: None)
    register(own.swap, type_rule=lambda x, y: None)

    def program(x: Tensor) -> object:
        y = x * 2
        z = y.clone()
        assert own.bump_(z, 4) is z
        own.swap(z, y)
        return y, z

    agree(put, program, X)
    traced = backend.startswith(("dynamo", "inductor"))  # torch traces no op that returns `a!`
    assert fallbacks() == ([f"fallback::{NS}.bump_.default"] if traced else [])


def test_a_type_rule_for_a_view_keeps_the_memory_shared(put: Put, register: Register) -> None:
    def rule(x: TensorType, index: int) -> TensorType:
        offset = x.offset + index * x.stride[0]
        return TensorType.of(x.shape[1:], x.stride[1:], x.dtype, x.device, offset)

    register(own.row, type_rule=rule)

    def program(x: Tensor) -> object:
        x = x * 1
        row = own.row(x, 1)
        row.add_(10)
        torpor.sync()
        x.mul_(2)
        return x, row

    agree(put, program, X)
    assert fallbacks() == []


def test_torch_knows_the_types_as_long_as_torpor_does() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    for op in (tripled, own.bump_):
        torpor.ops.register(op, type_rule=lambda x, by=1: x)
        with FakeTensorMode():
            assert op(torch.ones(4)).shape == (4,)
        torpor.ops.unregister(op)
        with FakeTensorMode(), pytest.raises(Exception, match=r"fake impl|bump_"):
            op(torch.ones(4))


@pytest.mark.parametrize("lowering", [None, lambda x: x + x + x])
@pytest.mark.parametrize(
    "view",
    [
        lambda x: x[:1].expand(4, 3),
        lambda x: x[:, ::2],
        lambda x: x.t()[1:],
        lambda x: x.as_strided((2, 3), (1, 1)),
        lambda x: x.t(),
        lambda x: x[:0],
    ],
)
def test_what_has_memory_of_its_own_is_laid_out_as_eager_does(
    put: Put, backend: str, register: Register, view: Any, lowering: Any
) -> None:
    register(tripled, type_rule=lambda x: x, lowering=lowering)
    agree(put, lambda x: tripled(view(x)), X)
    agree(put, lambda x: tripled(view(x)).add_(1), X)
    assert fallbacks() == []


def test_a_lowering_that_makes_a_view_makes_a_tensor_of_its_own(
    put: Put, backend: str, register: Register
) -> None:
    register(tripled, lowering=lambda x: x[:1].expand(4, 3))
    x = put(X)
    y = tripled(x)
    y.add_(1)
    assert_same([x, y], [X, X[:1].expand(4, 3) + 1])


@pytest.mark.parametrize(
    "stray",
    [lambda far: far.tolist(), lambda far: far * 2, lambda far: far[0].item()],
)
def test_a_type_rule_may_not_use_a_lazy_tensor(put: Put, register: Register, stray: Any) -> None:
    far = put(FAR)
    register(tripled, type_rule=lambda x: (stray(far), x)[1])
    with pytest.raises(RegistrationError, match=r"type rule of .*tripled.* arguments alone"):
        tripled(put(X))
    assert_same(far * 2, FAR * 2)


def test_a_type_rule_may_not_register(put: Put, register: Register) -> None:
    register(tripled, type_rule=lambda x: torpor.ops.register(own.ghost, type_rule=lambda x: x))
    with pytest.raises(RegistrationError, match=r"type rule of .*tripled.* registers an op"):
        tripled(put(X))


@pytest.mark.parametrize(
    ("makes", "reported"),
    [
        (lambda of, x: None, "gave None in the place of a TensorType"),
        (lambda of, x: of((-1, 3), (3, 1), x.dtype, x.device), r"shape \(-1, 3\)"),
        (lambda of, x: of((2.5,), (1,), x.dtype, x.device), r"shape \(2\.5,\)"),
        (lambda of, x: of((2,), (-1,), x.dtype, x.device), r"stride \(-1,\)"),
        (lambda of, x: of((2,), (1, 1), x.dtype, x.device), "2 strides for 1 dimensions"),
        (lambda of, x: of([2], (1,), x.dtype, x.device), "list.*made of tuples of integers"),
        (lambda of, x: of((2,), (1,), float, x.device), "made of .* a torch.dtype"),
        (lambda of, x: of((2,), (1,), x.dtype, "lazy"), "made of .* a torch.device"),
    ],
)
def test_a_type_that_no_tensor_has_is_refused(
    put: Put, register: Register, makes: Any, reported: str
) -> None:
    register(tripled, type_rule=lambda x: makes(TensorType.of, x))
    with pytest.raises(RegistrationError, match=f"(?s)type rule of .*tripled.*{reported}"):
        tripled(put(X))


def test_what_a_type_rule_refuses_is_refused_with_the_line(put: Put, register: Register) -> None:
    def rule(x: TensorType) -> TensorType:
        if len(x.shape) != 1:
            raise IndexError(f"one dimension, not {len(x.shape)}")
        return x

    register(tripled, type_rule=rule)
    x = put(X)
    with pytest.raises(IndexError, match="one dimension, not 2") as caught:
        line = line_below()
        tripled(x)
    assert line in message(caught.value)
    assert kernel_runs == []
    assert_same(tripled(x[0]), X[0] * 3)


@pytest.mark.parametrize(
    ("rule", "reported"),
    [
        (lambda x: x.shape, r"gave \(2, 3\) in the place of a TensorType"),
        (lambda x: torch.empty(2), "in the place of a TensorType"),
        (lambda x: [x], "in the place of a TensorType"),
    ],
)
def test_a_type_rule_that_gives_no_type_is_named(
    put: Put, register: Register, rule: Any, reported: str
) -> None:
    register(tripled, type_rule=rule)
    with pytest.raises(RegistrationError, match=reported) as caught:
        tripled(put(X))
    assert "tripled" in message(caught.value)


@pytest.mark.parametrize("gives", [lambda x: x, lambda x: (x,), lambda x: (x, x)])
def test_a_type_rule_that_gives_too_little_is_named(
    put: Put, register: Register, gives: Any
) -> None:
    register(own.collect_all, type_rule=lambda xs, w=None, *, times=1: gives(xs[0]))
    with pytest.raises(RegistrationError, match=r"type rule of .*collect_all"):
        own.collect_all([put(X)])


def test_a_type_rule_that_is_wrong_is_found_out_when_the_op_runs(
    put: Put, register: Register
) -> None:
    rule = lambda x: TensorType.contiguous((7,), x.dtype, x.device)  # noqa: E731
    register(tripled, type_rule=rule)
    with pytest.raises(RuntimeError, match=r"promised float32\[7\].*eager made"):
        tripled(put(X)).tolist()


# -- lowerings that cannot be --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("lowering", "reported"),
    [
        (lambda x, by: x.sum(), r"makes float32\[\] .* where float32\[2,3\] .* was promised"),
        (lambda x, by: (x, x), "returned a tuple in the place of a tensor"),
        (lambda x, by: x.double(), r"makes float64\[2,3\] .* was promised"),
        (lambda x, by: torch.rand_like(x), "draws random numbers"),
        (lambda x, by: x * x.max().item(), "asks for numbers"),
        (lambda x, by: x + torch.tensor([1.0, 2.0, by]), "make it an argument of the op"),
        (lambda x, by: own.ghost(x, by), "leads back to itself"),
        (lambda x: x, "TypeError"),
        (lambda x, by: None, "returned a NoneType|makes None"),
    ],
)
def test_a_lowering_that_cannot_be_says_why(
    virtual: Put, register: Register, lowering: Any, reported: str
) -> None:
    register(own.ghost, type_rule=lambda x, by: x, lowering=lowering)
    x = virtual(X)
    line = line_below()
    result = own.ghost(x, 2.0)
    result = result.exp()  # it is not the last op that is at fault
    with pytest.raises(torpor.errors.CompileError, match=f"(?s)ghost.*{reported}") as e:
        result.tolist()
    assert line in message(e.value)


FAR = torch.tensor([5.0, 6.0, 7.0])  # a tensor that is not an argument


def _synced(x: Tensor) -> Tensor:
    torpor.sync()
    return x


@pytest.mark.timeout(60)
@pytest.mark.parametrize("typed", [True, False])
@pytest.mark.parametrize(
    "use",
    [
        lambda x, far: x * far,
        lambda x, far: (far * 2, x)[1],
        lambda x, far: x * far.tolist()[0],
        lambda x, far: x * far[0].item(),
        lambda x, far: x * torch.from_numpy(far.numpy()),
        lambda x, far: (torch.tensor([1.0]).to("lazy"), x)[1],
        lambda x, far: _synced(x),
    ],
)
def test_a_lowering_may_not_use_a_lazy_tensor_from_elsewhere(
    virtual: Put, register: Register, use: Any, typed: bool
) -> None:
    far = virtual(FAR)
    rule = (lambda x, by: x) if typed else None
    register(own.ghost, type_rule=rule, lowering=lambda x, by: use(x, far))
    with pytest.raises(torpor.errors.TorporError, match=r"lowering of .*ghost.* arguments alone"):
        own.ghost(virtual(X), 2.0).tolist()
    assert_same(far * 2, FAR * 2)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("change", ["register", "unregister"])
def test_a_lowering_may_not_register(virtual: Put, register: Register, change: str) -> None:
    def lowering(x: Tensor, by: float) -> Tensor:
        act = getattr(torpor.ops, change)
        act(own.ghost)
        return x

    register(own.ghost, type_rule=lambda x, by: x, lowering=lowering)
    with pytest.raises(torpor.errors.CompileError, match=f"ghost.default {change}s an op"):
        own.ghost(virtual(X), 2.0).tolist()


def test_other_threads_record_while_a_lowering_is_traced(put: Put, register: Register) -> None:
    def lowering(x: Tensor, by: float) -> Tensor:
        started.set()
        assert going_on.wait(30)
        return x * by

    def other() -> None:
        assert started.wait(30)
        going_on.set()
        results.append((mine + 1).tolist())

    started, going_on = threading.Event(), threading.Event()
    results: list[Any] = []
    register(own.ghost, type_rule=lambda x, by: x, lowering=lowering)
    x, mine = put(X), put(FAR)
    thread = threading.Thread(target=other)
    thread.start()
    assert_same(own.ghost(x, 2.0), X * 2)
    thread.join()
    assert results == [[6.0, 7.0, 8.0]]


@pytest.mark.parametrize(
    ("lowering", "reported"),
    [
        (lambda x: 1 / 0, "ZeroDivisionError: division by zero"),
        (lambda x: (x, x), "returned a tuple in the place of a tensor"),
        (lambda x: None, "returned a NoneType in the place of a tensor"),
        (lambda x: 3, "returned a int in the place of a tensor"),
        (lambda x: x * x.max().item(), "asks for numbers"),
        (lambda x, y: x, "TypeError"),
        (lambda x: torch.from_numpy(np.asarray(x)), "numpy"),
    ],
)
def test_a_lowering_that_tells_the_types_and_fails_is_named(
    put: Put, register: Register, lowering: Any, reported: str
) -> None:
    register(tripled, lowering=lowering)
    with pytest.raises(RegistrationError, match=f"the lowering of .*tripled.*{reported}") as caught:
        line = line_below()
        tripled(put(X))
    assert line in message(caught.value)
    assert kernel_runs == []


@pytest.mark.parametrize(
    ("lowering", "name"),
    [
        (lambda x: torch.from_numpy(np.asarray(x)) * 1, "__array__"),
        (lambda x: x * float(x.numpy()[0, 0]), "numpy"),
        (lambda x: x * x.tolist()[0][0], "tolist"),
        (lambda x: x * (x.data_ptr() % 3), "data_ptr"),
        (lambda x: x * (x.untyped_storage().data_ptr() % 3), "untyped_storage"),
    ],
)
def test_a_lowering_may_not_look_at_memory(
    put: Put, register: Register, lowering: Any, name: str
) -> None:
    register(tripled, type_rule=lambda x: x, lowering=lowering)
    with pytest.raises(torpor.errors.CompileError, match=f"tripled.* calls {name}: it asks for"):
        tripled(put(X)).tolist()


# -- registering -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "spelling",
    [
        own.bump_,
        own.bump_.default,
        f"{NS}::bump_",
        f"{NS}::bump_.default",
        f"{NS}.bump_.default",
    ],
)
def test_an_op_has_several_spellings(spelling: Any) -> None:
    assert torpor.ops.register(spelling, type_rule=lambda x, by=1: None) is own.bump_.default
    torpor.ops.unregister(spelling)


@pytest.mark.parametrize(
    ("op", "reported"),
    [
        (f"{NS}::triplet", f"did you mean '{NS}::tripled'"),
        ("nowhere::nothing", "torch has no op 'nowhere::nothing'"),
        ("nothing", 'an op is named "namespace::name"'),
        (f"{NS}::two", "several overloads; choose one of .*two.int"),
        (f"{NS}::two.complex", "no overload 'complex'; it has int, float"),
        (own.two, "several overloads"),
        (own.noise, "draws random numbers"),
        (own.largest, "its result is no tensor"),
        (own.composite, "composite"),
        (torch.ops.aten.add.Tensor, "ops of aten are known already"),
    ],
)
def test_an_op_that_cannot_be_registered_says_why(op: Any, reported: str) -> None:
    with pytest.raises(RegistrationError, match=reported):
        torpor.ops.register(op, type_rule=lambda *args: args[0])


@pytest.mark.parametrize("thing", [None, 3, torch.add, lambda x: x])
def test_what_is_no_op_is_refused(thing: Any) -> None:
    with pytest.raises(TypeError, match="expected an op of"):
        torpor.ops.register(thing, type_rule=lambda x: x)


def test_an_op_of_which_nothing_is_known_is_refused() -> None:
    with pytest.raises(RegistrationError, match=r"(?s)ghost.*type_rule.*lowering.*register_fake"):
        torpor.ops.register(own.ghost)
    with pytest.raises(RegistrationError, match="nothing tells the types"):
        torpor.ops.register(own.ghost, lowering=lambda x, by: x, backend="reference")


def test_there_is_something_to_register(register: Register) -> None:
    register(tripled, type_rule=lambda x: x)
    with pytest.raises(RegistrationError, match=r"nothing to register for .*tripled.*type_rule="):
        torpor.ops.register(tripled)


def test_a_lowering_is_for_a_backend_that_there_is() -> None:
    with pytest.raises(RegistrationError, match=r"no backend 'nosuch': there are .*reference"):
        torpor.ops.register(
            tripled, type_rule=lambda x: x, lowering=lambda x: x * 3, backend="nosuch"
        )
    with pytest.raises(RegistrationError, match="was not registered"):
        torpor.ops.unregister(tripled)


def test_arguments_are_checked() -> None:
    with pytest.raises(TypeError, match="a type rule is a function"):
        torpor.ops.register(tripled, type_rule=3)  # type: ignore[arg-type]  # the mistake
    with pytest.raises(TypeError, match="a lowering is a function"):
        torpor.ops.register(tripled, lowering="x")  # type: ignore[arg-type]  # the mistake
    with pytest.raises(RegistrationError, match="WHOLE is for one backend"):
        torpor.ops.register(tripled, lowering=torpor.ops.WHOLE)
    with pytest.raises(RegistrationError, match="pass lowering= too"):
        torpor.ops.register(tripled, type_rule=lambda x: x, backend="reference")


def test_a_second_registration_has_to_be_meant(put: Put, register: Register) -> None:
    register(own.ghost, lowering=lambda x, by: x * by)
    with pytest.raises(RegistrationError, match="allow_override"):
        torpor.ops.register(own.ghost, lowering=lambda x, by: x + by)
    x = put(X)
    pending = own.ghost(x, 2.0)
    register(own.ghost, lowering=lambda x, by: x + by, allow_override=True)
    assert not torpor.is_pending(pending)
    assert_same([pending, own.ghost(x, 2.0)], [X * 2, X + 2])


def test_parts_may_be_told_one_after_the_other(put: Put, register: Register) -> None:
    register(tripled, type_rule=lambda x: x)
    register(tripled, lowering=lambda x: x + x + x)
    assert_same(tripled(put(X)), X * 3)
    assert kernel_runs == []


def test_an_op_that_was_unregistered_falls_back_again(put: Put) -> None:
    torpor.ops.register(tripled, type_rule=lambda x: x)
    torpor.ops.unregister(tripled)
    with pytest.raises(RegistrationError, match="was not registered"):
        torpor.ops.unregister(tripled)
    torpor.metrics.reset()
    assert_same(tripled(put(X)), X * 3)
    assert fallbacks() == [f"{NS}::tripled"]


def test_an_op_that_is_defined_anew_is_registered_anew(put: Put) -> None:
    for factor in (2, 5):

        @torch.library.custom_op(f"{NS}::again", mutates_args=())
        def again(x: Tensor) -> Tensor:
            return x * factor  # noqa: B023  # called before the next turn

        torpor.ops.register(again, type_rule=lambda x: x)
        assert_same(again(put(X)), X * factor)
    torpor.ops.unregister(again)
