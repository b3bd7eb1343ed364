"""The sweep must be green on eager against eager, and must see every planted fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ops.exclusions import EXCLUSIONS
from tests.ops.results import Result
from tests.ops.subjects import Subject
from tests.ops.sweep import EAGER_RERUNS, check_entry, entries, stir_the_allocator
from tests.ops.table import recorded_share, summarise, table

Call = Callable[..., Any]


class Faulty(Subject):
    """Eager torch with one fault in how it calls an op."""

    name = "faulty"

    def __init__(self, fault: Callable[..., Any]) -> None:
        self.fault = fault

    def call(self, function: Call, *args: Any, **kwargs: Any) -> Any:
        return self.fault(function, *args, **kwargs)


def on_output(change: Callable[[Any], Any]) -> Call:
    """A fault in what a call returns, where it returns something new."""

    def fault(function: Call, *args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return output if output is args[0] or "out" in kwargs else change(output)

    return fault


def found(entry: str, fault: Call) -> set[tuple[str, str]]:
    """(variant, kind) of every failure of an entry under a fault."""
    result = check_entry(entries()[entry], Faulty(fault))
    return {(f.variant, f.kind) for f in result.failures}


@pytest.mark.parametrize(
    "entry",
    [
        "add",
        "cat",
        "nn_functional_batch_norm",
        "nn_functional_dropout",
        "linalg_lstsq",
        "empty",
        "sort",
        "split",
        "to_sparse",
        "torch__scaled_mm",
        "arange",
        "chalf",
        "resize_",
    ],
)
def test_eager_equals_itself(entry: str) -> None:
    result = check_entry(entries()[entry], "eager")
    assert not result.failures
    assert result.samples
    assert result.runs


def test_asking_eager_again_shows_what_its_memory_held() -> None:
    """`gelsy` reads pivots that nobody has set: which columns they hold in front is chance."""
    a, b = torch.randn(3, 3, 3), torch.randn(3, 3, 3)
    results = set()
    for attempt in range(EAGER_RERUNS // 10):
        stir_the_allocator(b, attempt)
        results.add(tuple(torch.linalg.lstsq(a, b, driver="gelsy").solution.flatten().tolist()))
    assert len(results) > 1


def test_a_wrong_value_is_found_in_forward_and_backward() -> None:
    faults = found("mul", on_output(lambda t: t * 2 if t.dtype != torch.bool else ~t))
    assert {("forward", "values"), ("backward", "values")} <= faults


def test_a_wrong_gradient_is_found_where_the_forward_is_right() -> None:
    faults = found("sin", on_output(lambda t: t.detach().requires_grad_(t.requires_grad)))
    assert any(variant == "backward" for variant, _ in faults)
    assert not any(variant == "forward" for variant, _ in faults)


def test_a_last_bit_is_found() -> None:
    up = on_output(lambda t: t.nextafter(t + 1) if t.dtype == torch.float32 else t)
    assert ("forward", "values") in found("exp", up)


def test_nan_for_a_number_is_found() -> None:
    assert ("forward", "values") in found("exp", on_output(lambda t: t * float("nan")))


def test_wrong_strides_are_found() -> None:
    def fortran(t: Tensor) -> Tensor:
        return t.mT.contiguous().mT if t.dim() > 1 else t

    assert ("forward", "strides") in found("add", on_output(fortran))


def test_a_wrong_storage_offset_is_found() -> None:
    def at_zero(t: Tensor) -> Tensor:
        return torch.empty_strided(t.size(), t.stride(), dtype=t.dtype).copy_(t)

    assert ("forward", "storage_offset") in found("narrow", on_output(at_zero))


def test_a_wrong_dtype_is_found() -> None:
    assert ("forward", "dtype") in found("add", on_output(lambda t: t.to(torch.float64)))


def test_a_wrong_shape_is_found() -> None:
    assert ("forward", "shape") in found("add", on_output(lambda t: t.unsqueeze(0)))


def test_a_lost_requires_grad_is_found() -> None:
    assert ("backward", "requires_grad") in found("add", on_output(lambda t: t.detach()))


def test_a_list_for_a_tuple_is_found() -> None:
    assert ("forward", "value") in found("split", on_output(list))


def test_a_missing_output_is_found() -> None:
    assert ("forward", "value") in found("aminmax", on_output(lambda t: (t[0],)))


def test_in_place_without_a_write_is_found() -> None:
    def unwritten(function: Call, *args: Any, **kwargs: Any) -> Any:
        if function is not torch.Tensor.mul_:
            return function(*args, **kwargs)
        function(args[0].clone(), *args[1:], **kwargs)
        return args[0]

    assert {("in-place", "values"), ("in-place on a view", "values")} <= found("mul", unwritten)


def test_in_place_that_loses_its_views_is_found() -> None:
    def detached(function: Call, *args: Any, **kwargs: Any) -> Any:
        if function is not torch.Tensor.mul_:
            return function(*args, **kwargs)
        result = function(args[0].clone(), *args[1:], **kwargs)
        args[0].set_(result.detach())
        return args[0]

    assert ("in-place on a view", "values") in found("mul", detached)


def test_in_place_that_returns_another_tensor_is_found() -> None:
    def another(function: Call, *args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        return output[...] if output is args[0] else output

    assert ("in-place", "value") in found("mul", another)


def test_out_without_a_write_is_found() -> None:
    def unwritten(function: Call, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Any:
        result = function(*args, **kwargs)
        return result if out is None else out

    faults = found("mul", unwritten)
    assert {("out", "values"), ("out strided", "values"), ("out resized", "shape")} <= faults


def test_out_that_writes_between_its_elements_is_found() -> None:
    def flooding(function: Call, *args: Any, out: Tensor | None = None, **kwargs: Any) -> Any:
        if out is not None and out._base is not None:
            out._base.zero_()
        return function(*args, **kwargs) if out is None else function(*args, **kwargs, out=out)

    assert found("mul", flooding) >= {("out strided", "values")}


def test_a_view_that_became_a_copy_is_found() -> None:
    faults = found("unsqueeze", on_output(lambda t: t.clone()))
    assert {("write output", "values"), ("write input", "values")} <= faults


def test_a_copy_that_became_a_view_is_found() -> None:
    def aliasing(function: Call, *args: Any, **kwargs: Any) -> Any:
        return args[0][...]

    faults = found("clone", aliasing)
    assert {("write output", "values"), ("write input", "values")} <= faults


def test_an_input_written_by_mistake_is_found() -> None:
    def careless(function: Call, *args: Any, **kwargs: Any) -> Any:
        output = function(*args, **kwargs)
        if not args[0].requires_grad:
            args[0].zero_()
        return output

    assert ("forward", "values") in found("exp", careless)


def test_another_random_draw_is_found() -> None:
    def unseeded(function: Call, *args: Any, **kwargs: Any) -> Any:
        return torch.bernoulli(*args, **kwargs)

    assert ("forward", "values") in found("bernoulli", unseeded)


def test_a_wrong_exception_is_found() -> None:
    def retyped(function: Call, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError as error:
            raise ValueError("another type") from error

    assert ("forward", "exception type") in found("gather", retyped)


def test_a_swallowed_exception_is_found() -> None:
    def swallowed(function: Call, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except RuntimeError:
            return args[0]

    assert ("forward", "does not raise") in found("gather", swallowed)


def test_an_exception_eager_does_not_raise_is_found() -> None:
    def refusing(function: Call, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError("no")

    assert ("forward", "raises") in found("add", refusing)


def test_an_error_that_only_a_read_brings_is_found() -> None:
    class Late(Subject):
        name = "late"

        def sync(self, tensors: Any) -> None:
            raise RuntimeError("boom")

    kinds = {f.kind for f in check_entry(entries()["add"], Late()).failures}
    assert kinds == {"raises"}


def test_a_tensor_that_is_not_the_subjects_own_is_found() -> None:
    class Disowning(Subject):
        name = "disowning"

        def owns(self, tensor: Tensor) -> bool:
            return False

    assert {f.kind for f in check_entry(entries()["add"], Disowning()).failures} == {"not lazy"}


def test_fallbacks_and_syncs_are_told_apart() -> None:
    class Counting(Subject):
        name = "counting"
        calls = 0

        def call(self, function: Call, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            return function(*args, **kwargs)

        def counters(self) -> dict[str, int]:
            return {"aten::add": self.calls, "Sync::item": 2 * self.calls, "lazy::mul": self.calls}

    result = check_entry(entries()["add"], Counting())
    assert result.status == "fell back"
    assert set(result.fallbacks) == {"add"}
    assert result.syncs["item"] == 2 * result.fallbacks["add"] > 0


def test_an_excluded_entry_does_not_run() -> None:
    name, reason = next(iter(EXCLUSIONS.items()))
    result = check_entry(entries()[name], "eager")
    assert (result.status, result.excluded, result.runs) == ("excluded", reason, 0)


def test_results_survive_json() -> None:
    result = check_entry(entries()["neg"], Faulty(on_output(lambda t: t + 1)))
    again = Result.from_json(result.to_json())
    assert again == result
    assert "neg" in summarise([again])
    assert "faulty" in table([again])


def test_the_recorded_share_leaves_exclusions_aside() -> None:
    results = [
        Result("a", "lazy"),
        Result("b", "lazy", fallbacks={"b": 1}),
        Result("c", "lazy", excluded="why"),
    ]
    assert recorded_share(results) == 0.5
