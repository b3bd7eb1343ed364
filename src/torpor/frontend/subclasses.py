"""Other tensor subclasses made from lazy tensors: they get plain tensors.

A torch tensor has exactly one Python object. A lazy tensor has its own, so `as_subclass` cannot
give it a second one of another class. Subclasses that wrap tensors using `__torch_dispatch__`, such
as masked and nested tensors, are not affected.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch
from torpor.errors import UnsupportedError
from torpor.frontend.foreign import as_plain, in_mode, tell_fallback
from torpor.trace.tensor import LazyTensor


def _made_plainly(make: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps torch's functions that make a subclass instance: `make(cls, tensor, ...)`."""

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        if not args or issubclass(LazyTensor, args[0]):
            return make(*args, **kwargs)
        if len(args) > 1 and isinstance(args[1], LazyTensor):
            args = args[0], _plain_for(args[1], args[0]), *args[2:]
        if not in_mode():
            return make(*args, **kwargs)
        with _torch.without_dispatch_modes():
            return make(*args, **kwargs)

    return call


def _plain_for(tensor: LazyTensor, cls: type) -> torch.Tensor:
    made = as_plain(tensor)
    tell_fallback(
        "as_subclass",
        f"a {cls.__name__} holds a plain tensor, here on {made.device}. Make the subclass of data "
        "before they meet lazy tensors, or do without it",
    )
    return made


# -- Triton kernels: they get addresses, and write to them ---------------------------------------


def _address(data_ptr: Callable[[LazyTensor], int]) -> Callable[[LazyTensor], int]:
    @functools.wraps(data_ptr)
    def call(self: LazyTensor) -> int:
        if str(sys._getframe(1).f_globals.get("__name__")).startswith("triton."):
            raise UnsupportedError(
                "a Triton kernel cannot be given lazy tensors: what it writes would be lost. Make "
                "it an op with `torch.library.triton_op` or `torch.library.custom_op`, or give it "
                "`torpor.eager(tensor)`"
            )
        return data_ptr(self)

    return call


def _copied_plainly(copy: Callable[..., Any]) -> Callable[..., Any]:
    """A deep copy of a plain tensor is plain in `mode()` too: torch expects its own class."""

    @functools.wraps(copy)
    def deep_copy(self: torch.Tensor, memo: Any) -> Any:
        if not in_mode():
            return copy(self, memo)
        with _torch.without_dispatch_modes():
            return copy(self, memo)

    return deep_copy


def install() -> None:
    """Wrap the functions that make instances of other subclasses."""
    _torch.on_subclass(_made_plainly)
    torch.Tensor.__deepcopy__ = _copied_plainly(torch.Tensor.__deepcopy__)  # type: ignore[method-assign]  # the purpose
    LazyTensor.data_ptr = _address(LazyTensor.data_ptr)  # type: ignore[assignment,method-assign]  # the purpose
