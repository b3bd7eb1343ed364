"""What a table of interned nodes can confuse (DESIGN §3, known traps)."""

import math

import pytest
import torch
import torch.nn.functional as F

import torpor
from tests.comparison import Put, agree, assert_same

INTEGERS = torch.tensor([3, 0, -2])
FLOATS = torch.tensor([3.0, 0.0, -2.0])
BOOLEANS = torch.tensor([True, False, True])


def _compiles() -> int:
    return torpor.metrics.counters().get("UncachedCompile", 0)


@pytest.mark.parametrize("x", [INTEGERS, FLOATS, BOOLEANS], ids=["int", "float", "bool"])
def test_one_is_not_one_point_zero_is_not_true(put: Put, x: torch.Tensor) -> None:
    agree(put, lambda t: [t * number for number in (1, 1.0, True, 1 + 0j)], x)


@pytest.mark.parametrize("x", [INTEGERS, FLOATS, BOOLEANS], ids=["int", "float", "bool"])
def test_zero_is_not_zero_point_zero_is_not_false(put: Put, x: torch.Tensor) -> None:
    agree(put, lambda t: [torch.add(t, number) for number in (0, 0.0, False, 0j)], x)


def test_filling_tells_one_from_one_point_zero_from_true(put: Put) -> None:
    agree(put, lambda t: [torch.full_like(t, n) for n in (1, 1.0, True)], FLOATS)
    agree(put, lambda t: [torch.full((2,), n, device=t.device) for n in (1, 1.0, True)], FLOATS)
    agree(put, lambda t: [t.new_tensor(n) for n in (1, 1.0, True)], FLOATS)


def test_dtype_of_a_power_follows_the_exponents_type(put: Put) -> None:
    agree(put, lambda t: [t**2, t**2.0, t**True], INTEGERS)


def test_keyword_numbers_keep_their_type(put: Put) -> None:
    agree(put, lambda t: [torch.add(t, t, alpha=a) for a in (1, 1.0, 2, 2.0)], FLOATS)
    agree(put, lambda t: [torch.add(t, t, alpha=a) for a in (True, False)], BOOLEANS)


@pytest.mark.parametrize("order", [(0.0, -0.0), (-0.0, 0.0)])
def test_minus_zero_is_not_zero(put: Put, order: tuple[float, float]) -> None:
    x = torch.tensor([1.0, -1.0])
    agree(put, lambda t: [t * zero for zero in order], x)
    agree(put, lambda t: [torch.full_like(t, zero) for zero in order], x)
    agree(put, lambda t: [torch.copysign(t, zero) for zero in order], x)
    agree(put, lambda t: [1 / torch.full_like(t, zero) for zero in order], x)
    agree(put, lambda t: [t.masked_fill(t > 0, zero) for zero in order], x)
    agree(put, lambda t: [torch.clamp(t, min=-5.0).fill_(zero) for zero in order], x)


def test_minus_zero_inside_a_complex_number_is_kept(put: Put) -> None:
    numbers = [complex(r, i) for r in (0.0, -0.0) for i in (0.0, -0.0)]
    x = torch.tensor([1 + 1j])
    agree(put, lambda t: [torch.view_as_real(torch.full_like(t, n)) for n in numbers], x)


def test_minus_zero_inside_padding_is_kept(put: Put) -> None:
    agree(put, lambda t: [F.pad(t, (1, 1), value=zero) for zero in (0.0, -0.0)], FLOATS)


def test_nan_as_a_scalar_gives_nan(put: Put) -> None:
    agree(put, lambda t: [t + math.nan, t * math.nan, torch.full_like(t, math.nan)], FLOATS)


@pytest.mark.parametrize("number", [math.nan, complex(math.nan, 1)], ids=["float", "complex"])
def test_a_step_with_a_nan_scalar_compiles_once(put: Put, number: complex) -> None:
    x = put(FLOATS)
    before = _compiles()
    for _ in range(5):
        # A new NaN object each time: `nan != nan`, and identity does not help either.
        step = type(number)(str(number).strip("()"))
        (x + step).sum()
        y = x * step
        torpor.sync(y, wait=True)
    assert _compiles() - before <= 1


def test_nan_does_not_become_another_steps_number(put: Put) -> None:
    x = put(FLOATS)
    for number in (math.nan, 1.0, math.nan, math.inf, -math.inf, math.nan):
        assert_same(x + number, FLOATS + number)
        torpor.sync(wait=True)


@pytest.mark.parametrize("number", [2**31, 2**53 + 1, 2**63 - 1, -(2**63)])
def test_large_integers_keep_every_bit(put: Put, number: int) -> None:
    agree(put, lambda t: [torch.full_like(t, number), (t * 0) + number], INTEGERS)


def test_neighbouring_floats_are_different_numbers(put: Put) -> None:
    numbers = [0.1, math.nextafter(0.1, 1), math.nextafter(0.1, 0)]
    agree(put, lambda t: [t + n for n in numbers], FLOATS.double())


def test_a_changing_number_gives_each_steps_own_value(put: Put) -> None:
    x, eager = put(FLOATS), FLOATS.clone()
    for number in (0.5, 0.25, 0.25, 3, 3.0, True, -0.0, 0.0, 0, 1e300, 2):
        assert_same(x * number, eager * number)
        torpor.sync(wait=True)


def test_a_changing_number_changes_no_dtype(put: Put) -> None:
    x = put(INTEGERS)
    for number in (2, 2.0, 3, 3.0, True, 4):
        assert_same(x * number, INTEGERS * number)
        torpor.sync(wait=True)


def test_sizes_and_numbers_that_change_together_stay_apart(put: Put) -> None:
    x, eager = put(torch.arange(24.0)), torch.arange(24.0)
    for rows in (2, 3, 4, 6, 2):
        assert_same((x.view(rows, -1) + rows).sum(0), (eager.view(rows, -1) + rows).sum(0))
        torpor.sync(wait=True)


def test_a_python_list_changed_later_is_not_seen(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        shape = [2, 3]
        y = x.view(shape)
        shape[0], shape[1] = 3, 2
        return y, x.view(shape)

    agree(put, program, torch.arange(6.0))


def test_equal_expressions_in_one_trace_are_computed_separately_seen_equal(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        a, b = x.exp(), x.exp()
        a.add_(1)  # writing one must not write the other, though both were one node
        return a, b

    agree(put, program, FLOATS)


def test_two_empty_factories_are_two_buffers(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        a, b = torch.zeros_like(x), torch.zeros_like(x)
        torpor.sync()
        a.add_(1)
        torpor.sync()
        b.add_(5)
        return a, b

    agree(put, program, FLOATS)


def test_two_roots_that_are_one_value_are_two_buffers_after_a_sync(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        a, b = x * 2, x * 2
        torpor.sync(wait=True)
        a.mul_(10)
        torpor.sync(wait=True)
        return a, b

    agree(put, program, FLOATS)


def test_two_tensors_on_one_buffer_are_one_leaf(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        other = x.detach()
        x.add_(1)
        y = other * 2
        torpor.sync(wait=True)
        other.mul_(3)
        return x, other, y

    agree(put, program, FLOATS)


def test_the_same_values_in_two_buffers_are_two_leaves(put: Put) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> object:
        z = x + y
        x.add_(1)
        return x, y, z

    agree(put, program, FLOATS, FLOATS.clone())


def test_swapped_leaves_give_swapped_results(put: Put) -> None:
    def program(x: torch.Tensor, y: torch.Tensor) -> object:
        first = x - y
        torpor.sync(wait=True)
        second = y - x
        torpor.sync(wait=True)
        third = x - x
        return first, second, third

    agree(put, program, FLOATS, torch.tensor([1.0, 5.0, 7.0]))


def test_leaves_of_other_types_are_other_nodes(put: Put) -> None:
    def program(*leaves: torch.Tensor) -> object:
        results = []
        for leaf in leaves:
            results.append(leaf + 1)
            torpor.sync(wait=True)
        return results

    base = torch.arange(4.0)
    agree(put, program, base, base.int(), base.double(), base.view(2, 2), base.bool())


def test_leaves_of_other_strides_keep_their_strides(put: Put) -> None:
    def program(x: torch.Tensor) -> object:
        a = x.t().clone(memory_format=torch.preserve_format)
        torpor.sync(wait=True)
        b = x.clone()
        torpor.sync(wait=True)
        return a + 1, b + 1, a * 2

    agree(put, program, torch.arange(9.0).view(3, 3))
