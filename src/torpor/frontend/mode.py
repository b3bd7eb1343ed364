"""Laziness on concrete devices: for single tensors, modules, a block, or the whole process."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch

from torpor import _torch
from torpor.errors import UnsupportedError
from torpor.frontend.exchange import Convert
from torpor.frontend.sharing import Adoption
from torpor.frontend.switching import ASKED
from torpor.observe.site import warn_once
from torpor.ops.spec import Mode, ReturnKind, spec_of
from torpor.trace.dispatch import dispatch
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import is_traceable, plain_copy, wrap_data

aten = torch.ops.aten

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


# -- torpor.lazy -------------------------------------------------------------------------------


def lazy(thing: Any) -> Any:
    """A lazy version of `thing`, on the device it is on.

    Returns a lazy copy of a tensor; changes a module or an optimizer in place and returns it, with
    parameters keeping their identity; recurses into lists, tuples and dicts.
    """
    ASKED.explicitly = True
    adoption = Adoption(copy=True)
    return _convert(thing, lambda tensor: _lazy_tensor(tensor, adoption))


def eager(thing: Any) -> Any:
    """The inverse of `torpor.lazy`: `thing` with plain tensors, computed now.

    A tensor on the device `lazy` moves to the physical device behind it.
    """
    return _convert(thing, _plain_tensor)


def _convert(thing: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    with _torch.without_modes():
        if isinstance(thing, torch.nn.Module):
            return thing._apply(convert)  # references to parameters stay valid
        if isinstance(thing, torch.optim.Optimizer):
            return convert_state(thing, convert)
        if not isinstance(thing, (torch.Tensor, list, tuple, dict)):
            raise TypeError(
                "expected a tensor, a module, an optimizer or a container of tensors, "
                f"got {type(thing).__name__}"
            )
        return _torch.tree_map(
            lambda leaf: convert(leaf) if isinstance(leaf, torch.Tensor) else leaf,
            thing,
            is_leaf=lambda part: isinstance(part, torch.Size),  # torch may know it as a tuple
        )


class _BecomeLazy(torch.autograd.Function):
    """Plain to lazy in forward, differentiable; its gradient is plain."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, adoption: Adoption) -> Any:
        return adoption.adopt(tensor, tensor.device)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return (plain_copy(grad) if isinstance(grad, LazyTensor) else grad), None


_enter: Callable[[torch.Tensor, Adoption], torch.Tensor] = _BecomeLazy.apply


def _lazy_tensor(tensor: torch.Tensor, adoption: Adoption) -> torch.Tensor:
    if isinstance(tensor, LazyTensor):
        return tensor
    if _torch.is_dtensor(tensor):
        return _torch.of_local_part(tensor, lambda part: _lazy_tensor(part, adoption))
    if not is_traceable(tensor) or tensor.device.type == "meta":
        raise UnsupportedError(
            f"a lazy tensor is strided and has memory, not {tensor.layout} on {tensor.device}"
        )
    if type(tensor) not in _PLAIN_TYPES:
        warn_once(
            "subclass",
            f"a {type(tensor).__name__} stays plain: a lazy tensor cannot be one of another class",
        )
        return tensor
    if not tensor.is_leaf:
        return _enter(tensor, adoption)
    result = adoption.adopt(tensor, tensor.device)
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(result, tensor.requires_grad)
    return result.requires_grad_(tensor.requires_grad)


def _plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    if _torch.is_dtensor(tensor):
        return _torch.of_local_part(tensor, _plain_tensor)
    if not isinstance(tensor, LazyTensor):
        return tensor
    real = plain_copy(tensor)
    if getattr(tensor, "_is_param", False):
        return torch.nn.Parameter(real, tensor.requires_grad)
    return real.requires_grad_(tensor.requires_grad and tensor.is_leaf)


def convert_state(
    optimizer: torch.optim.Optimizer, convert: Convert, of: type[torch.Tensor] = torch.Tensor
) -> torch.optim.Optimizer:
    """Convert state with the shape of its parameter; others, such as step counters, stay.

    Only for parameters that are tensors `of` that class.
    """
    for parameter, state in optimizer.state.items():
        if not isinstance(parameter, of) or not isinstance(state, dict):
            continue
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.shape == parameter.shape and value.dim():
                state[name] = convert(value)
    return optimizer


# -- torpor.mode -------------------------------------------------------------------------------


class LazyMode(_torch.DispatchMode):  # type: ignore[misc]  # torch does not annotate it
    """Everything created inside is lazy on its own device.

    Plain tensors from outside are read with their contents at that moment; writes to them and views
    of them stay eager, so that other references see what eager would show. Tensors on borrowed
    memory, tensors without elements, and tensors made by `DataLoader` workers stay plain too.
    """

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if LazyTensor in types:
            return dispatch(LazyTensor, func, types, args, kwargs)
        if func is aten.lift_fresh.default:
            return self._fresh(args[0])
        if not self._traces(func, args, kwargs) or _torch.is_data_worker():
            return func(*args, **kwargs)
        return dispatch(LazyTensor, func, types, args, kwargs)

    def _fresh(self, tensor: torch.Tensor) -> torch.Tensor:
        """Make a result of `torch.tensor`, to which there is no other reference, lazy.

        A tensor on borrowed memory (for example NumPy's) stays plain, as its owner may write to it.
        So does an optimizer's step counter, which is read at every step.
        """
        plain = (
            not _is_traceable(tensor)
            or not tensor.numel()
            or not tensor.untyped_storage().resizable()
            or (not tensor.dim() and _in_optimizer())
            or _torch.is_data_worker()
        )
        return tensor if plain else wrap_data(tensor, tensor.device)

    def _traces(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether the op makes new tensors, from nothing or from tensors that torpor can read."""
        spec = spec_of(func)
        if spec.mode not in (Mode.RECORD, Mode.RANDOM) or spec.mutated:
            return False
        if not spec.returns or any(r.kind is not ReturnKind.FRESH for r in spec.returns):
            return False
        tensors = [t for t in _torch.tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)]
        if not all(map(_is_traceable, tensors)):
            return False
        return bool(tensors) or (self._takes_device(spec, kwargs) and not _is_empty(args))

    def _takes_device(self, spec: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the op is a factory; passes its device explicitly, which the graph needs."""
        if not any(a.name == "device" for a in spec.arguments):
            return False
        if kwargs.get("layout") not in (None, torch.strided) or kwargs.get("pin_memory"):
            return False
        device = kwargs.get("device") or torch.get_default_device()
        if device.type in ("lazy", "meta"):
            return False
        kwargs["device"] = device
        return True


def _is_empty(args: tuple[Any, ...]) -> bool:
    """Whether a factory is asked for an empty tensor, which torch then moves to other memory.

    `torch.empty(0).set_(storage)` is how torch, in C++ too, reads files, shares memory between
    processes and copies storages.
    """
    return bool(args) and isinstance(args[0], (list, tuple)) and 0 in args[0]


def _in_optimizer() -> bool:
    """Whether the calling code is one of torch's optimizers."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        name = str(frame.f_globals.get("__name__"))
        if name.startswith("torch.optim."):
            return True
        if not name.startswith(("torpor.", "torch.")):
            return False
        frame = frame.f_back
    return False


def _is_traceable(tensor: torch.Tensor) -> bool:
    return type(tensor) in _PLAIN_TYPES and is_traceable(tensor) and tensor.device.type != "meta"


@contextmanager
def mode() -> Iterator[None]:
    """Everything created inside is lazy, on its concrete device."""
    ASKED.explicitly = True
    with LazyMode():
        yield
