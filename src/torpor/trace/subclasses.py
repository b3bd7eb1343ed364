"""Tensor subclasses of others made from lazy tensors: they hold plain tensors.

Torch gives a tensor one Python object. A lazy tensor has one, so `as_subclass` cannot give it a
second of another class. A subclass that is made of lazy tensors by `__torch_dispatch__`, as masked
and nested tensors are, is not concerned.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch
from torpor.trace.foreign import as_plain, tell_fallback
from torpor.trace.tensor import LazyTensor

_as_subclass = torch.Tensor.as_subclass


def _plain_for(tensor: LazyTensor, cls: type) -> torch.Tensor:
    made = as_plain(tensor)
    tell_fallback(
        "as_subclass",
        f"a {cls.__name__} holds a plain tensor, here on {made.device}. Make the subclass of data "
        "before they meet lazy tensors, or do without it",
    )
    return made


def as_subclass(self: LazyTensor, cls: type) -> Any:
    """This tensor as one of another class: a plain one, unless that is a base of lazy ones."""
    if issubclass(LazyTensor, cls):
        return _as_subclass(self, cls)
    return _plain_for(self, cls).as_subclass(cls)


LazyTensor.as_subclass = as_subclass  # type: ignore[assignment,method-assign]  # typed by overloads


def _made_plain(make: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch that makes a tensor of another class: `make(cls, tensor, ...)`."""

    @functools.wraps(make)
    def call(*args: Any, **kwargs: Any) -> Any:
        if len(args) > 1 and type(args[1]) is LazyTensor and not issubclass(LazyTensor, args[0]):
            return make(args[0], _plain_for(args[1], args[0]), *args[2:], **kwargs)
        return make(*args, **kwargs)

    return call


def install() -> None:
    """Stand in front of what makes tensors of other classes."""
    _torch.on_subclass(_made_plain)
