"""Tensors as objects: wrappers without memory, metadata, tensor subclasses, wrapped numbers.

It reaches private constructors and setters of `torch.Tensor`, and the tensor behind the object.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import _C

from torpor._torch.dispatch import above_autograd, without_modes

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Makes a tensor with sizes, strides, dtype and device, and no memory."""


@functools.cache
def lazy_keys(device_type: str) -> tuple[Any, ...]:
    """Further arguments of `make_wrapper` that put a tensor on a concrete device under `Lazy` too.

    Then autograd treats it as it treats tensors on the device `lazy`, and plain tensors on the
    same device know nothing of torpor.
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
"""Copies the tensors of a second list over those of a first, with as few kernels as may be."""


@functools.lru_cache(maxsize=4096)
def _wrapped_number(text: str, number: Any) -> torch.Tensor:
    with without_modes(), torch.inference_mode(False), above_autograd(), torch.enable_grad():
        product = torch.ones((), requires_grad=True, device="cpu") * number
        kept: torch.Tensor = getattr(product.grad_fn, "_saved_other")  # noqa: B009  # unknown to types
        return kept


def wrapped_number(number: Any) -> torch.Tensor:
    """The tensor that stands for a Python number among the arguments of an op; do not write to it.

    It gives way in type promotion, as the number does: no `torch.tensor(number)` is like it. Torch
    shows it nowhere but in what autograd keeps of a product.
    """
    return _wrapped_number(repr(number), number)


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let two tensors change places behind their Python objects, but for hooks of `tensor`.

    `other` is not to be used any more.
    Classes and attributes are the caller's. Hooks of autograd belong to the tensor behind the
    object; the dictionaries that handles remove them from belong to the object.
    """
    hooks, after_grad = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    _C._swap_tensor_impl(tensor, other)
    tensor._backward_hooks = hooks
    tensor._post_accumulate_grad_hooks = after_grad
    other._backward_hooks = None
    if after_grad is not None:
        other._post_accumulate_grad_hooks = {}  # None would leave those that are there


def on_set_data(
    lazy: type[torch.Tensor], become: Callable[[torch.Tensor, Any], torch.Tensor | None]
) -> None:
    """Let `plain.data = other`, `other` of the class `lazy`, be done by `become(plain, other)`.

    What that returns, if anything, is set in the place of `other`. torch would give a plain tensor
    the dispatch keys of a lazy one, and no memory.
    """
    data: Any = torch.Tensor.data

    def set_data(self: torch.Tensor, other: Any) -> None:
        new = become(self, other) if type(other) is lazy else other
        if new is not None:
            data.__set__(self, new)

    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[assignment]  # a getset


def on_subclass(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let what makes a tensor of another class of a tensor be what `around` makes of it."""
    tensor: Any = torch.Tensor
    for name in ("_make_subclass", "__new__"):
        setattr(tensor, name, staticmethod(around(getattr(tensor, name))))
    as_subclass = around(lambda cls, tensor: original(tensor, cls))
    original = tensor.as_subclass
    tensor.as_subclass = functools.wraps(original)(lambda self, cls: as_subclass(cls, self))


def has_own_dispatch(kind: type[torch.Tensor]) -> bool:
    """Tensors of a class have a `__torch_dispatch__` that sees the ops on them."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
