"""One op run eagerly: custom ops without a fake kernel, counted with the line that called them."""

import pytest
import torch
from torch import Tensor

import torpor
from tests.comparison import Put, agree, assert_same, line_below, message, raised_by
from tests.instrumented_ops import counted, runs

NAMESPACE = "torpor_tests_bare"
_library = torch.library.Library(NAMESPACE, "DEF")

_library.define("triple(Tensor x) -> Tensor")
_library.define("row(Tensor(a) x, int index) -> Tensor(a)")
_library.define("pieces(Tensor x) -> Tensor[]")
_library.define("rows(Tensor(a -> *) x) -> Tensor(a)[]")
_library.define("total(Tensor[] xs) -> Tensor")
_library.define("both(Tensor x) -> (Tensor, Tensor)")
_library.define("increment_(Tensor(a!) x) -> Tensor(a!)")
_library.define("fill(Tensor(a!) x, float value) -> ()")
_library.define("largest(Tensor x) -> float")
_library.define("maybe(Tensor x, Tensor? y=None, *, int times=1) -> Tensor")
_library.define("broken(Tensor x) -> Tensor")
_library.define("noise(Tensor x) -> Tensor", tags=torch.Tag.nondeterministic_seeded)


def _broken(x: Tensor) -> Tensor:
    raise LookupError("no such thing")


_library.impl("triple", lambda x: x * 3, "CPU")
_library.impl("row", lambda x, index: x[index], "CPU")
_library.impl("pieces", lambda x: [x + 1, x * 2, x.sum()], "CPU")
_library.impl("rows", lambda x: list(x.unbind(0)), "CPU")
_library.impl("total", lambda xs: torch.stack([x.sum() for x in xs]).sum(), "CPU")
_library.impl("both", lambda x: (x.amax(), x.argmax()), "CPU")
_library.impl("increment_", lambda x: x.add_(1), "CPU")
_library.impl("fill", lambda x, value: _fill(x, value), "CPU")
_library.impl("largest", lambda x: float(x.max()), "CPU")
_library.impl("maybe", lambda x, y=None, *, times=1: (x if y is None else x + y) * times, "CPU")
_library.impl("broken", _broken, "CPU")
_library.impl("noise", lambda x: x + torch.rand(x.shape), "CPU")


def _fill(x: Tensor, value: float) -> None:
    x.fill_(value)


bare = getattr(torch.ops, NAMESPACE)
X = torch.arange(6.0).view(2, 3)


@pytest.fixture(autouse=True)
def fresh_counters() -> None:
    torpor.metrics.reset()


def _fallbacks(op: str) -> int:
    return torpor.metrics.counters().get(f"{NAMESPACE}::{op}", 0)


@pytest.mark.parametrize(
    "program",
    [
        lambda x: bare.triple(x + 1) * 2,
        lambda x: bare.row(x, 1) + 1,
        lambda x: bare.pieces(x * 1),
        lambda x: bare.rows(x * 1),
        lambda x: bare.total([x, x + 1, bare.triple(x)]),
        lambda x: bare.both(x),
        lambda x: bare.largest(x - 1),
        lambda x: bare.maybe(x),
        lambda x: bare.maybe(x, x, times=3),
    ],
    ids="tensor view list view_list list_argument tuple float optional_absent optional".split(),
)
def test_an_op_without_a_fake_kernel_gives_eagers_result(put: Put, program) -> None:
    agree(put, program, X)


def test_a_fallbacks_results_are_lazy(put: Put) -> None:
    x = put(X)
    results = [bare.triple(x), bare.row(x, 0), *bare.pieces(x), *bare.rows(x), *bare.both(x)]
    assert all(torpor.is_lazy(result) for result in results)
    assert all(result.device == x.device for result in results)


def test_a_view_from_a_fallback_aliases_its_base(put: Put) -> None:
    def program(x: Tensor) -> object:
        x = x * 1
        row = bare.row(x, 1)
        row.add_(10)
        torpor.sync()
        x.mul_(2)
        return x, row

    agree(put, program, X)


def test_views_in_a_list_from_a_fallback_alias_their_base(put: Put) -> None:
    def program(x: Tensor) -> object:
        x = x * 1
        first, second = bare.rows(x)
        first.add_(10)
        x.mul_(2)
        second.zero_()
        return x, first, second

    agree(put, program, X)


def test_an_in_place_fallback_writes_its_argument(put: Put) -> None:
    def program(x: Tensor) -> object:
        view = x[0]
        assert bare.increment_(x) is x
        bare.increment_(view)
        torpor.sync()
        bare.fill(x[:, 1], 9.0)
        return x, view

    agree(put, program, X)


@pytest.mark.parametrize("cap", [1, 2, 3, 5])
def test_an_in_place_fallback_runs_once_though_the_trace_is_cut_meanwhile(
    put: Put, monkeypatch: pytest.MonkeyPatch, cap: int
) -> None:
    monkeypatch.setattr(torpor.config, "max_trace_nodes", cap)

    def program(x: Tensor) -> object:
        y = x + 1
        bare.increment_(y[1:])
        bare.increment_(y.t())
        return y

    agree(put, program, torch.zeros(3, 40 + cap))


def test_a_fallback_of_a_pending_tensor_computes_it_once(put: Put) -> None:
    x = counted(put(X))
    result = bare.triple(x)
    assert_same(result + x, X * 3 + X)
    assert runs() == 1


def test_a_fallback_leaves_unrelated_tensors_pending(put: Put) -> None:
    x = put(X)
    unrelated = counted(x + 1)
    bare.triple(x)
    assert torpor.is_pending(unrelated)
    assert runs() == 0


def test_a_fallback_is_counted_each_time(put: Put) -> None:
    x = put(X)
    for number in range(3):
        bare.triple(x)
        assert _fallbacks("triple") == number + 1


def test_a_fallback_is_counted_with_its_line(put: Put) -> None:
    x = put(X)
    line = line_below()
    bare.triple(x)
    bare.pieces(x)
    (site,) = torpor.metrics.lines(f"{NAMESPACE}::triple")
    assert line in site


def test_a_recorded_op_is_not_counted_as_a_fallback(put: Put) -> None:
    x = put(X)
    (counted(x) @ x.t()).softmax(-1).sum().item()
    counters = torpor.metrics.counters()
    assert not [name for name in counters if name.startswith(("aten::", "torpor_tests::"))]


def test_a_failing_fallback_raises_its_own_error_with_the_line(put: Put) -> None:
    x = put(X)
    with pytest.raises(LookupError, match="no such thing") as caught:
        line = line_below()
        bare.broken(x)
    assert type(caught.value) is LookupError
    assert line in message(caught.value)
    assert_same(x + 1, X + 1)


def test_a_random_fallback_draws_in_program_order(put: Put) -> None:
    def program(x: Tensor) -> object:
        first = torch.rand_like(x)
        second = bare.noise(x)
        return first, second, torch.rand_like(x)

    agree(put, program, X)


def test_a_custom_op_with_autograd_and_no_fake_kernel_trains(put: Put) -> None:
    def program(x: Tensor) -> object:
        _squared(x).sum().backward()
        return x.grad

    agree(put, program, X.clone().requires_grad_())


@torch.library.custom_op(f"{NAMESPACE}::squared", mutates_args=(), device_types="cpu")
def _squared(x: Tensor) -> Tensor:
    return x * x


def _setup(ctx, inputs, output) -> None:
    ctx.save_for_backward(inputs[0])


_squared.register_autograd(lambda ctx, grad: 2 * ctx.saved_tensors[0] * grad, setup_context=_setup)


def test_a_custom_op_that_mutates_its_argument_writes_it(put: Put) -> None:
    def program(x: Tensor) -> object:
        view = x[1]
        _scaled_in_place(x, 3.0)
        _scaled_in_place(view, 2.0)
        return x, view

    agree(put, program, X)


@torch.library.custom_op(f"{NAMESPACE}::scale", mutates_args=("x",), device_types="cpu")
def _scaled_in_place(x: Tensor, factor: float) -> None:
    x.mul_(factor)


def test_a_sparse_tensor_is_refused_or_computed(put: Put) -> None:
    x = put(torch.eye(3))
    try:
        result = (x.to_sparse() @ put(torch.ones(3, 2))).tolist()
    except (NotImplementedError, RuntimeError) as refusal:
        assert "sparse" in message(refusal).lower()
    else:
        assert result == torch.ones(3, 2).tolist()


def test_a_fallback_that_cannot_work_says_which_op(put: Put) -> None:
    error = raised_by(lambda: bare.broken(put(X)))
    assert "broken" in message(error)
