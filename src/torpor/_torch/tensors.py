"""Tensors as objects: wrappers without memory, metadata, tensor subclasses, wrapped numbers.

Uses private constructors and setters of `torch.Tensor`, and the TensorImpl behind the object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _C

from torpor._torch.dispatch import above_autograd, without_modes

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Makes a tensor with sizes, strides, dtype and device, but without memory."""


@functools.cache
def lazy_keys(device_type: str) -> tuple[Any, ...]:
    """More arguments of `make_wrapper` that add the key `Lazy` to a tensor on a concrete device.

    Then autograd treats it like a tensor on the device `lazy`, while plain tensors on the same
    device are unaffected.
    """
    if device_type == "lazy":
        return ()
    keys = _C.DispatchKeySet(_C.DispatchKey.Lazy)
    autocast = getattr(_C.DispatchKey, f"Autocast{device_type.upper()}", None)
    if autocast is not None:
        keys = keys.add(autocast)
    return (False, False, None, False, False, keys)


def dispatch_keys(tensor: torch.Tensor) -> str:
    """The dispatch keys of a tensor, as text."""
    return str(_C._dispatch_keys(tensor))


set_conj: Callable[[torch.Tensor, bool], None] = _C._set_conj
set_neg: Callable[[torch.Tensor, bool], None] = _C._set_neg

set_metadata: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a getset, not an attribute
"""Gives a tensor the sizes, strides and dtype of another (the setter of `Tensor.data`)."""

copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copies the tensors of the second list into those of the first, in as few kernels as possible."""


@functools.lru_cache(maxsize=4096)
def _wrapped_number(text: str, number: Any) -> torch.Tensor:
    with without_modes(), torch.inference_mode(False), above_autograd(), torch.enable_grad():
        product = torch.ones((), requires_grad=True, device="cpu") * number
        kept: torch.Tensor = getattr(product.grad_fn, "_saved_other")  # noqa: B009  # not in the stubs
        return kept


def wrapped_number(number: Any) -> torch.Tensor:
    """The tensor that stands for a Python number among an op's arguments; do not write to it.

    It has a number's precedence in type promotion, which no `torch.tensor(number)` has. Torch only
    exposes it as what autograd saves for a product.
    """
    return _wrapped_number(repr(number), number)


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Exchange the tensors behind two Python objects, except the hooks of `tensor`.

    `other` must not be used afterwards. Classes and attributes are up to the caller. Autograd hooks
    belong to the tensor behind the object; the dictionaries that handles remove them from belong to
    the object.
    """
    hooks, after_grad = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    _C._swap_tensor_impl(tensor, other)
    tensor._backward_hooks = hooks
    tensor._post_accumulate_grad_hooks = after_grad
    other._backward_hooks = None
    if after_grad is not None:
        other._post_accumulate_grad_hooks = {}  # None would keep the present ones


def on_set_data(
    lazy: type[torch.Tensor], become: Callable[[torch.Tensor, Any], torch.Tensor | None]
) -> None:
    """Handle `plain.data = other`, for `other` of class `lazy`, by `become(plain, other)`.

    Its result, if any, is assigned instead of `other`. torch would give a plain tensor the dispatch
    keys of a lazy one, without memory.
    """
    data: Any = torch.Tensor.data

    def set_data(self: torch.Tensor, other: Any) -> None:
        new = become(self, other) if type(other) is lazy else other
        if new is not None:
            data.__set__(self, new)

    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[assignment]  # a getset


def on_subclass(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap the functions that make a tensor of another class from a tensor."""
    tensor: Any = torch.Tensor
    for name in ("_make_subclass", "__new__"):
        setattr(tensor, name, staticmethod(around(getattr(tensor, name))))
    as_subclass = around(lambda cls, tensor: original(tensor, cls))
    original = tensor.as_subclass
    tensor.as_subclass = functools.wraps(original)(lambda self, cls: as_subclass(cls, self))


def has_own_dispatch(kind: type[torch.Tensor]) -> bool:
    """Whether the class has its own `__torch_dispatch__`."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
