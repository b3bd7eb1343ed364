"""Converts tensors in place: the object stays the same, its contents become another tensor's.

References to it, such as an optimizer's, see the new tensor; hooks, attributes and gradients are
kept. Used for all in-place conversions between plain and lazy tensors: modules that move,
`torpor.lazy`, `torpor.enable`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch
from torpor.frontend.methods import same_storage
from torpor.symbols.leaves import SIZES
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import plain_copy, wrap_data

Convert = Callable[[torch.Tensor], torch.Tensor]

_OWN = ("_lazy_storage", "_lazy_view", "_is_param")
"""Attributes of a lazy tensor's own; all others are the user's."""

_PLAIN = (torch.Tensor, torch.nn.Parameter)

_OLD_GRAPH = (
    "backward through a graph that was recorded before its parameters were moved to or from a lazy "
    "device; move a module before forward, or after forward and backward"
)


class HeldElsewhere(RuntimeError):
    """An autograd graph, or torch, holds the tensor: it cannot be converted in place now."""


def exchange(held: torch.Tensor, new: torch.Tensor) -> None:
    """Turn `held` into `new`, to which there is no other reference; `HeldElsewhere` if impossible.

    A graph recorded earlier keeps accumulating gradients into it, unless the device changes.
    """
    if held.device == new.device and _torch.may_change(held):
        _torch.pass_gradients_on(held, _matching)
    elif _torch.is_held(held) and not _torch.end_gradients(held, _OLD_GRAPH):
        raise HeldElsewhere(
            f"cannot move a tensor of shape {tuple(held.shape)} in place: a graph of autograd that "
            "was not run backward holds it; drop the loss, or move before forward"
        )
    _swap(held, new)
    if isinstance(held, LazyTensor):
        SIZES.fixed.add(held._lazy_storage)


def _matching(gradient: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """A gradient converted to match its tensor, which has been converted since."""
    if isinstance(tensor, LazyTensor):
        return lazy_copy(gradient)
    return plain_copy(gradient) if isinstance(gradient, LazyTensor) else gradient


def _swap(held: torch.Tensor, new: torch.Tensor) -> None:
    new = _alone(new)
    was_plain = not isinstance(held, LazyTensor)
    attributes = {name: value for name, value in vars(held).items() if name not in _OWN}
    is_parameter = isinstance(held, torch.nn.Parameter)
    cls = LazyTensor if isinstance(new, LazyTensor) else _PLAIN[is_parameter]
    new.requires_grad_(held.requires_grad)
    if isinstance(new, LazyTensor):
        attributes |= {"_lazy_storage": new._lazy_storage, "_lazy_view": new._lazy_view}
        attributes |= {"_is_param": True} if is_parameter else {}
    _torch.swap(held, new)
    held.__class__, held.__dict__ = cls, attributes
    new.__class__, new.__dict__ = torch.Tensor, {}
    if was_plain and _torch.is_held(new):  # by an old graph, which does not read it
        _torch.set_metadata(new, torch.empty((0,), dtype=new.dtype, device=new.device))


def _alone(tensor: torch.Tensor) -> torch.Tensor:
    """Another tensor on the same memory, as `tensor` itself may be referenced elsewhere."""
    return same_storage(tensor) if isinstance(tensor, LazyTensor) else tensor.detach()


def replace(held: torch.Tensor, new: torch.Tensor) -> None:
    """Turn `held` into `new`; at least one of them is lazy."""
    if new is held:
        return
    both_lazy = isinstance(held, LazyTensor) and isinstance(new, LazyTensor)
    if both_lazy and held.device.type == new.device.type:
        held.data = new
    else:
        exchange(held, new)


def move(tensor: torch.Tensor, new: torch.Tensor, convert: Convert) -> None:
    """Turn a parameter into `new`, and convert its gradient with `convert`."""
    grad = tensor.grad
    if grad is None:
        replace(tensor, new)
        return
    tensor.grad = None
    new_grad = convert(grad)
    try:
        replace(tensor, new)
    except HeldElsewhere:
        tensor.grad = grad
        raise
    tensor.grad = _moved(grad, new_grad)


def _moved(grad: torch.Tensor, new: torch.Tensor) -> torch.Tensor:
    """`grad` turned into `new`: the same object, unless something else holds the tensor."""
    if new is grad:
        return grad
    any_lazy = isinstance(grad, LazyTensor) or isinstance(new, LazyTensor)
    if any_lazy and grad.is_leaf and not _torch.is_held(grad):
        replace(grad, new)
        return grad
    return new.requires_grad_(grad.requires_grad)


def lazy_copy(tensor: torch.Tensor) -> torch.Tensor:
    """A lazy tensor with a copy of the current contents of `tensor`."""
    if isinstance(tensor, LazyTensor):
        return tensor
    return wrap_data(tensor.detach().clone(), tensor.device)


def _become(tensor: torch.Tensor, new: LazyTensor) -> torch.Tensor | None:
    """`tensor.data = new` for a plain tensor: it becomes lazy too, unless something holds it."""
    with _torch.without_modes(), torch.no_grad():
        if type(tensor) not in _PLAIN or _torch.is_held(tensor):
            return plain_copy(new)
        move(tensor, new, lazy_copy)
    return None


# -- modules that move -------------------------------------------------------------------------


class _Moves:
    """A conversion of a module's tensors that remembers its results for parameters."""

    def __init__(self, convert: Convert) -> None:
        self.convert = convert
        self.made: dict[int, torch.Tensor] = {}

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.made.pop(id(tensor), None)
        return self.convert(tensor) if made is None else made

    def is_ours(self, parameter: torch.Tensor | None) -> bool:
        """Move a parameter that is or becomes lazy; False leaves it to torch."""
        if parameter is None:
            return False
        new = self.convert(parameter)
        if isinstance(parameter, LazyTensor) or isinstance(new, LazyTensor):
            move(parameter, new, self.convert)
            return True
        self.made[id(parameter)] = new
        return False


def _around_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def _apply(self: Any, fn: Convert, recurse: bool = True) -> Any:
        if torch.compiler.is_compiling():
            return original(self, fn, recurse)
        if recurse:
            for child in self.children():
                child._apply(fn)
        moves = _Moves(fn)
        table: dict[str, Any] = self._parameters
        with torch.no_grad():
            others = {name: p for name, p in table.items() if not moves.is_ours(p)}
        if len(others) == len(table):
            return original(self, moves, False)
        vars(self)["_parameters"] = others
        try:
            return original(self, moves, False)
        finally:
            table.update(others)
            vars(self)["_parameters"] = table

    return _apply


def _around_set(original: Callable[..., None]) -> Callable[..., None]:
    """For `remove_parametrizations`: torch would swap lazy tensors, which a graph may hold."""

    def _maybe_set(dest: torch.Tensor, src: torch.Tensor) -> None:
        if not isinstance(dest, LazyTensor):
            return original(dest, src)
        dest.data = src
        return None

    return _maybe_set


def install() -> None:
    """Preserve identities when a module moves, or `.data` is set, and lazy tensors are involved."""
    _torch.on_move(_around_apply)
    _torch.on_set_data(LazyTensor, _become)
    _torch.replace_function("torch.nn.utils.parametrize._maybe_set", _around_set)
