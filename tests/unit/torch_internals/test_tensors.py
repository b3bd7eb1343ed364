"""What `_torch.tensors` takes from inside torch still is what torpor takes it for."""

from typing import Any

import pytest
import torch

import torpor
from torpor import _torch
from torpor.trace.tensor import LazyTensor


def test_dispatch_keys_of_a_lazy_tensor_are_those_that_reach_torpor(lazy: torch.Tensor) -> None:
    assert "Python" in _torch.dispatch_keys(lazy)
    assert "Python" not in _torch.dispatch_keys(torch.ones(1))


def test_make_wrapper_takes_sizes_strides_offset_dtype_layout_and_device() -> None:
    arguments = ((2, 3), (1, 2), 4, None, torch.float16, torch.strided, torch.device("lazy:0"))
    made = _torch.make_wrapper(LazyTensor, *arguments)
    assert type(made) is LazyTensor
    assert (tuple(made.shape), made.stride(), made.storage_offset()) == ((2, 3), (1, 2), 4)
    assert (made.dtype, made.device) == (torch.float16, torch.device("lazy:0"))


def test_set_conj_marks_a_tensor() -> None:
    tensor = torch.tensor([1 + 2j])
    _torch.set_conj(tensor, True)
    assert tensor.is_conj()
    assert tensor.item() == 1 - 2j


def test_set_neg_marks_a_tensor() -> None:
    tensor = torch.tensor([1.0])
    _torch.set_neg(tensor, True)
    assert tensor.is_neg()
    assert tensor.item() == -1


def test_set_metadata_gives_a_tensor_the_sizes_of_another() -> None:
    tensor, other = torch.zeros(2), torch.ones(3, 4, dtype=torch.int32)
    _torch.set_metadata(tensor, other)
    assert tensor.shape == (3, 4)
    assert tensor.dtype == torch.int32
    assert tensor.data_ptr() == other.data_ptr()


@pytest.mark.parametrize("number", [2, 0.1, True, 1j, -0.0, float("nan"), 2**62 + 1])
def test_wrapped_number_gives_way_in_type_promotion_as_the_number_does(number: Any) -> None:
    wrapped = _torch.wrapped_number(number)
    assert repr(wrapped.item()) == repr(number)
    assert not wrapped.requires_grad
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.complex64):
        tensor = torch.ones((), dtype=dtype)
        assert torch.result_type(tensor, wrapped) == torch.result_type(tensor, number)


def test_wrapped_number_is_plain_in_any_mode() -> None:
    with torpor.mode(), torch.no_grad(), torch.device("meta"):
        wrapped = _torch.wrapped_number(0.125)
    assert type(wrapped) is torch.Tensor
    assert wrapped.device.type == "cpu"


def test_lazy_keys_put_a_concrete_tensor_under_autograd_of_lazy() -> None:
    assert _torch.lazy_keys("lazy") == ()
    arguments = ((2,), (1,), 0, None, torch.float32, torch.strided, torch.device("cpu"))
    made = _torch.make_wrapper(LazyTensor, *arguments, *_torch.lazy_keys("cpu"))
    keys = torch._C._dispatch_keys(made)
    for name in ("CPU", "Lazy", "AutogradLazy", "AutocastCPU"):
        assert keys.has(getattr(torch._C.DispatchKey, name))
    assert made.device == torch.device("cpu")


def test_copy_each_copies_one_list_over_another() -> None:
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.int64)]
    _torch.copy_each(targets, [torch.ones(2), torch.tensor([1, 2, 3])])
    assert [target.tolist() for target in targets] == [[1, 1], [1, 2, 3]]


def test_swap_keeps_hooks_with_the_object() -> None:
    x, y, calls = torch.ones(2).requires_grad_(), torch.zeros(2).requires_grad_(), []
    handle = x.register_hook(lambda g: calls.append("before"))
    x.register_post_accumulate_grad_hook(lambda t: calls.append("after"))
    _torch.swap(x, y)
    assert (x.tolist(), y.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    x.sum().backward()
    handle.remove()
    x.sum().backward()
    assert calls == ["before", "after", "after"]


def test_on_set_data_is_asked_about_lazy_data_alone() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    x.data = y
    assert x.data_ptr() == y.data_ptr()
    x.data = torpor.lazy(y + 3)
    assert torpor.is_lazy(x)
    assert x.tolist() == x.data.tolist() == [3.0, 3.0]


def test_on_subclass_is_asked() -> None:
    for make in (torch.Tensor._make_subclass, torch.Tensor.__new__):
        assert make.__code__.co_filename.endswith("subclasses.py")

    class Sub(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Sub)) is type(Sub([1.0])) is Sub


def test_has_own_dispatch() -> None:
    class Sub(torch.Tensor):
        pass

    assert not _torch.has_own_dispatch(Sub)
    assert _torch.has_own_dispatch(LazyTensor)


def test_on_set_data_leaves_plain_tensors_as_they_are() -> None:
    x, y = torch.ones(2).requires_grad_(), torch.zeros(3)
    x.data = y
    assert (x.tolist(), x.requires_grad, x.data.requires_grad) == ([0, 0, 0], True, False)
    assert x.data_ptr() == y.data_ptr()
