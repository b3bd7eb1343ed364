"""`linear` and `matmul` are recorded by one call each, and the graph holds their parts."""

from __future__ import annotations

import pytest
import torch
from torch.autograd import forward_ad
from torch.nn import functional as F

import torpor
from tests.comparison import Put, assert_same, loads_jit_decompositions

LINEAR_SHAPES = [(5,), (3, 5), (2, 3, 5), (2, 2, 3, 5), (1, 5), (0, 5), (2, 0, 5)]
MATMUL_SHAPES = [
    ((4,), (4,)),
    ((3, 4), (4,)),
    ((4,), (4, 3)),
    ((3, 4), (4, 5)),
    ((2, 3, 4), (4, 5)),
    ((2, 3, 4), (4,)),
    ((4,), (2, 4, 3)),
    ((3, 4), (2, 4, 5)),
    ((2, 3, 4), (2, 4, 5)),
    ((2, 1, 3, 4), (5, 4, 6)),
    ((0, 3, 4), (4, 5)),
]
REQUIRES = [(True, True), (True, False), (False, True), (False, False)]


def _random(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _gradients(
    output: torch.Tensor, inputs: list[torch.Tensor], grad: torch.Tensor, again: bool
) -> list[torch.Tensor]:
    inputs = [t for t in inputs if t.requires_grad]
    if not inputs:
        return []
    first = torch.autograd.grad(output, inputs, grad, create_graph=again)
    if not again:
        return list(first)
    grad_of = [*inputs, grad]
    total = sum((g * g).sum() for g in first)
    second = torch.autograd.grad(total, grad_of, allow_unused=True)
    return [*first, *(g for g in second if g is not None)]


def _compare(run, put: Put) -> None:  # type: ignore[no-untyped-def]
    eager = run(lambda t: t)
    for _ in range(2):  # recorded, then met again
        lazy = run(put)
        assert_same(lazy, eager)
        assert [t.stride() for t in lazy] == [t.stride() for t in eager]
        torpor.sync()


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("requires", REQUIRES)
@pytest.mark.parametrize("shape", LINEAR_SHAPES)
def test_linear_and_its_derivatives(
    put: Put, shape: tuple[int, ...], requires: tuple[bool, bool], bias: bool, again: bool
) -> None:
    def run(place: Put) -> list[torch.Tensor]:
        x = place(_random(shape, 0)).requires_grad_(requires[0])
        weight = place(_random((7, 5), 1)).requires_grad_(requires[1])
        offset = place(_random((7,), 2)).requires_grad_() if bias else None
        y = F.linear(x, weight, offset)
        grad = place(_random(y.shape, 3)).requires_grad_(again)
        inputs = [x, weight] + ([offset] if offset is not None else [])
        return [y, *_gradients(y, inputs, grad, again)]

    _compare(run, put)


@pytest.mark.parametrize("again", [False, True])
@pytest.mark.parametrize("requires", REQUIRES)
@pytest.mark.parametrize("shapes", MATMUL_SHAPES)
def test_matmul_and_its_derivatives(
    put: Put, shapes: tuple[tuple[int, ...], ...], requires: tuple[bool, bool], again: bool
) -> None:
    def run(place: Put) -> list[torch.Tensor]:
        a = place(_random(shapes[0], 0)).requires_grad_(requires[0])
        b = place(_random(shapes[1], 1)).requires_grad_(requires[1])
        y = a @ b
        grad = place(_random(y.shape, 3)).requires_grad_(again)
        return [y, *_gradients(y, [a, b], grad, again)]

    _compare(run, put)


@pytest.mark.parametrize("dim", [0, 1, 2])
def test_operands_in_any_layout(put: Put, dim: int) -> None:
    """How torch takes the op apart depends on strides, and on who needs a gradient."""

    def run(place: Put) -> list[torch.Tensor]:
        x = place(_random((3, 3, 3), 0)).transpose(dim, (dim + 1) % 3).requires_grad_()
        weight = place(_random((3, 3), 1)).t().requires_grad_()
        y = F.linear(x, weight)
        z = y @ weight
        return [y, z, *torch.autograd.grad(z.sum(), [x, weight])]

    _compare(run, put)


def test_the_same_operand_with_and_without_a_gradient(put: Put) -> None:
    """The parts differ: a weight that needs a gradient is never copied into a batch."""

    def run(place: Put) -> list[torch.Tensor]:
        x = place(_random((2, 3, 4), 0)).transpose(1, 2)
        weight = place(_random((3, 3), 1))
        y = x @ weight
        weight.requires_grad_()
        z = x @ weight
        with torch.no_grad():
            w = x @ weight
        return [y, z, w]

    _compare(run, put)


@pytest.mark.usefixtures("whole_ops")
def test_a_step_records_each_layer_with_one_call(put: Put) -> None:
    model = put(torch.nn.Linear(4, 4))
    x = put(torch.ones(2, 3, 4)).requires_grad_()  # as between layers
    for _ in range(3):
        model(x).sum().backward()
        model.zero_grad()
        torpor.sync()
    torpor.metrics.reset()
    model(x).sum().backward()
    counters = torpor.metrics.counters()
    assert counters["lazy::linear"] == counters["lazy::linear_backward"] == 1
    assert "lazy::addmm" not in counters
    assert "lazy::mm" not in counters


@pytest.mark.usefixtures("whole_ops")
def test_the_graph_holds_the_parts(virtual: Put) -> None:
    y = F.linear(virtual(torch.ones(2, 3, 4)), virtual(torch.ones(5, 4)), virtual(torch.ones(5)))
    text = torpor.graph(y)
    assert "aten.addmm.default" in text
    assert "aten.linear" not in text


@loads_jit_decompositions
def test_forward_mode_through_both(put: Put) -> None:
    def run(place: Put) -> list[torch.Tensor]:
        x, weight = place(_random((2, 3, 4), 0)), place(_random((4, 4), 1))
        tangent = place(_random((2, 3, 4), 2))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, tangent)
            y = F.linear(dual, weight) @ weight
            primal, tangent = forward_ad.unpack_dual(y)
        return [primal, tangent]

    _compare(run, put)


@loads_jit_decompositions
def test_forward_mode_over_a_backward_recorded_before(put: Put) -> None:
    def run(place: Put) -> list[torch.Tensor]:
        x = place(_random((2, 3), 0)).requires_grad_()
        weight = place(_random((4, 3), 1)).requires_grad_()
        y = F.linear(x, weight) @ weight
        grad, tangent = place(_random((2, 3), 2)), place(_random((2, 3), 3))
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(grad, tangent)
            found = torch.autograd.grad(y, [x, weight], dual)
            return [part for g in found for part in forward_ad.unpack_dual(g)]

    _compare(run, put)


@pytest.mark.usefixtures("whole_ops")
def test_whole_again_after_forward_mode(virtual: Put) -> None:
    x = virtual(torch.ones(2, 3))
    with forward_ad.dual_level():
        F.linear(x, x)
    torpor.metrics.reset()
    F.linear(x, x)
    assert torpor.metrics.counters()["lazy::linear"] == 1


def test_a_weight_that_is_made_from_the_input(put: Put) -> None:
    def run(place: Put) -> list[torch.Tensor]:
        x = place(_random((3, 3), 0)).requires_grad_()
        y = F.linear(x, x * 2, x.sum(0)) @ x
        (first,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (second,) = torch.autograd.grad((first * first).sum(), x)
        return [y, first, second]

    _compare(run, put)


def test_a_part_that_is_run_at_once_is_not_remembered(virtual: Put) -> None:
    """Whole numbers have no fused kernel everywhere; the second step must not meet old data."""
    for factor in (1, 2, 3):
        a = virtual(torch.arange(4).view(2, 2) * factor)
        assert_same(
            a @ a, (torch.arange(4).view(2, 2) * factor) @ (torch.arange(4).view(2, 2) * factor)
        )
        torpor.sync()


@pytest.mark.parametrize("again", [False, True])
def test_complex_numbers(put: Put, again: bool) -> None:
    def run(place: Put) -> list[torch.Tensor]:
        x = place(torch.complex(_random((2, 3, 4), 0), _random((2, 3, 4), 1))).requires_grad_()
        weight = place(torch.complex(_random((4, 4), 2), _random((4, 4), 3))).requires_grad_()
        y = F.linear(x, weight) @ weight
        found = torch.autograd.grad(y.abs().sum(), [x, weight], create_graph=again)
        if again:
            found += torch.autograd.grad(sum(g.abs().sum() for g in found), [x, weight])
        return [y, *found]

    _compare(run, put)


def test_a_wrong_shape_is_told_in_eagers_words(put: Put) -> None:
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        F.linear(put(torch.ones(2, 3)), put(torch.ones(4, 5)))


def test_saved_tensor_hooks_see_the_same_first_and_later(put: Put) -> None:
    def saved() -> list[tuple[int, ...]]:
        seen: list[tuple[int, ...]] = []

        def pack(tensor: torch.Tensor) -> torch.Tensor:
            seen.append(tuple(tensor.shape))
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            x, weight = put(torch.ones(2, 3)), put(torch.ones(4, 3)).requires_grad_()
            F.linear(x, weight).sum().backward()
        torpor.sync()
        return seen

    assert saved() == saved()


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("bias", [False, True])
def test_a_slice_through_a_layer_without_gradients(put: Put, guard: type, bias: bool) -> None:
    """Views of a parameter need a gradient even where none is computed: torch looks at that."""

    def run(place: Put) -> list[torch.Tensor]:
        weight = torch.nn.Parameter(place(_random((16, 8), 1)))
        offset = place(_random((16,), 2)) if bias else None
        with guard():
            x = place(_random((2, 5, 8), 0))[:, -1:, :]
            return [F.linear(x, weight, offset), x @ weight.t()]

    _compare(run, put)


def test_views_of_a_normal_tensor_are_normal_in_inference_mode(put: Put) -> None:
    x = put(torch.arange(6.0).view(2, 3))
    with torch.inference_mode():
        views = [x.t(), x[0], x.view(-1), *x.unbind(), *x.split(1), x.detach()]
        assert not any(view.is_inference() for view in views)
        made = x + 1
        assert made.is_inference()
        assert made.t().is_inference()
    assert_same([view + 0 for view in views], [v + 0 for v in _views_of_six()])


def _views_of_six() -> list[torch.Tensor]:
    x = torch.arange(6.0).view(2, 3)
    return [x.t(), x[0], x.view(-1), *x.unbind(), *x.split(1), x.detach()]
