"""What `_torch.dispatch` takes from inside torch still is what torpor takes it for."""

from typing import Any, ClassVar

import torch

import torpor
from torpor import _torch
from torpor.trace.tensor import LazyTensor

aten = torch.ops.aten


def test_disabled_torch_function_is_what_torch_gives_a_class_that_wants_no_calls() -> None:
    assert _torch.disabled_torch_function is torch._C._disabled_torch_function_impl
    assert LazyTensor.__torch_function__ is _torch.disabled_torch_function


class Seen(_torch.DispatchMode):  # type: ignore[misc]  # torch does not annotate it
    """Notes every op that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append((func, torch.is_grad_enabled()))
        return func(*args, **(kwargs or {}))


def test_dispatchmode_sees_every_op_below_autograd() -> None:
    with Seen() as seen:
        torch.ones(2, requires_grad=True) + 1
    assert [op for op, _ in seen.ops] == [aten.ones.default, aten.add.Tensor]


def test_without_modes_hides_a_mode() -> None:
    with Seen() as seen, _torch.without_modes():
        torch.ones(2)
    assert seen.ops == []


def test_as_on_another_thread_no_mode_is_on() -> None:
    with torch.inference_mode(), Seen() as seen:
        with _torch.as_on_another_thread():
            made = torch.ones(2)
        assert torch.ones(2).is_inference()
    assert not made.is_inference()
    assert len(seen.ops) == 1
    with Seen() as seen, _torch.as_on_another_thread():
        torch.ones(2)
    assert seen.ops == []


def test_as_on_another_thread_autocast_is_off() -> None:
    square = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with _torch.as_on_another_thread():
            assert (square @ square).dtype is torch.float32
        assert (square @ square).dtype is torch.bfloat16


def test_as_on_another_thread_no_transform_is_on() -> None:
    plain = torch.ones(2)

    def squared(x: torch.Tensor) -> torch.Tensor:
        with _torch.as_on_another_thread():
            made = plain.detach()
            assert _torch.memory_of(made) == _torch.memory_of(plain)
        return (x * x).sum()

    assert torch.equal(torch.func.grad(squared)(torch.ones(2)), torch.full((2,), 2.0))


def test_without_torch_function_switches_the_default_device_off() -> None:
    with torch.device("meta"), _torch.without_torch_function():
        assert torch.ones(2).device.type == "cpu"


def test_kernels_run_below_autograd_with_the_grad_mode_on() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad(), Seen() as seen, _torch.kernels():
        result = leaf * 2
    assert not result.requires_grad
    assert seen.ops == [(aten.mul.Tensor, True)]


class Number:
    """What `torch.tensor` reads as a number, and how torch is set up meanwhile."""

    seen: ClassVar[list[bool]] = []

    def __float__(self) -> float:
        self.seen.append(_torch.is_python_off())
        with _torch.python_on():
            self.seen.append(_torch.is_python_off())
        return 1.0


def test_is_python_off_inside_torch_tensor() -> None:
    torch.tensor([Number()], dtype=torch.float32)
    assert Number.seen[-2]
    assert not _torch.is_python_off()


def test_python_on_inside_torch_tensor() -> None:
    torch.tensor([Number()], dtype=torch.float32)
    assert not Number.seen[-1]


def test_below_autograd_brings_a_composite_op_whole() -> None:
    index = torch.tensor([0, 1])
    with Seen() as seen, _torch.below_autograd():
        torch.ops.aten.one_hot.default(index, 2)
    assert [op for op, _ in seen.ops] == [aten.one_hot.default]


def test_is_transforming_inside_vmap() -> None:
    seen = []
    torch.vmap(lambda x: seen.append(_torch.is_transforming()) or x)(torch.ones(2))
    assert seen == [True]
    assert not _torch.is_transforming()


def test_is_any_autocast_on_inside_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.is_any_autocast_on()
    assert not _torch.is_any_autocast_on()


def test_without_autocast_nothing_is_cast() -> None:
    square = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with _torch.without_autocast():
            assert (square @ square).dtype is torch.float32
        assert (square @ square).dtype is torch.bfloat16


def test_above_autograd_makes_a_kernels_ops_differentiable_again() -> None:
    x = torch.ones(2, requires_grad=True)
    with _torch.below_autograd():
        assert (x * 2).grad_fn is None
        with _torch.above_autograd():
            assert (x * 2).grad_fn is not None
        assert (x * 2).grad_fn is None


def test_is_tracing_inside_a_transform() -> None:
    seen = []
    torch.func.vmap(lambda x: (seen.append(_torch.is_tracing()), x)[1])(torch.ones(2))
    assert seen == [True]
    assert not _torch.is_tracing()


def test_modes_are_those_that_are_active() -> None:
    with torpor.mode():
        assert [type(mode).__name__ for mode in _torch.modes()] == ["LazyMode"]
    assert _torch.modes() == []


def test_without_dispatch_modes() -> None:
    with torpor.mode():
        with _torch.without_dispatch_modes():
            assert _torch.modes() == []
            assert not torpor.is_lazy(torch.ones(2))
        assert torpor.is_lazy(torch.ones(2))


def test_modes() -> None:
    assert _torch.modes() == []
    with torpor.mode():
        assert [type(mode).__name__ for mode in _torch.modes()] == ["LazyMode"]
