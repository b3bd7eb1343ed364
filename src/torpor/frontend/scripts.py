"""TorchScript and lazy tensors.

A scripted function, or a module scripted with lazy parameters, is recorded op by op: it runs in the
interpreter, unfused, since fused code would access memory. A module with plain tensors inside, as
made by `torch.jit.load` and `torch.jit.trace`, gets plain inputs. Files contain plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torpor import _torch
from torpor.errors import UnsupportedError
from torpor.frontend.foreign import in_mode, lazy_tensors, run_plainly, tell_fallback
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import plain_copy

_SIMPLE = (torch.Tensor, torch.nn.Parameter, int, float, bool, str, type(None))
_has_constants: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


class _Scripted:
    """Whether any module in this process was scripted with lazy parameters."""

    any = False


def _first_lazy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> LazyTensor | None:
    if not kwargs and all(type(arg) in _SIMPLE for arg in args):
        return None
    return next(lazy_tensors((args, kwargs), depth=0), None)


def _call(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps calls of TorchScript functions and methods."""

    @functools.wraps(call)
    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        lazy = _first_lazy(args, kwargs)
        if lazy is None and not _Scripted.any and not in_mode():
            return call(self, *args, **kwargs)
        if _is_recorded(self):
            with _torch.script_as_drawn():
                return call(self, *args, **kwargs)
        if lazy is None and not in_mode():
            return call(self, *args, **kwargs)
        tell_fallback(
            "TorchScript",
            "its results are lazy. `torpor.lazy(model)` of the model that was scripted or traced "
            "records it",
        )
        device = torch.device("cpu") if lazy is None else lazy.device
        return run_plainly(functools.partial(call, self), args, kwargs, device)

    return __call__


def _is_recorded(called: Any) -> bool:
    """Whether it contains no plain tensors, so that its ops on lazy tensors make lazy ones."""
    owner = _torch.script_owner(called)
    if owner is not None:
        return any(isinstance(t, LazyTensor) for _, _, t in _torch.script_tensors(owner))
    if called not in _has_constants:
        _has_constants[called] = _torch.script_has_constants(called)
    return not _has_constants[called]


def _script(script: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `torch.jit.script`, which takes over a module's tensors."""

    @functools.wraps(script)
    def call(obj: Any, *args: Any, _frames_up: int = 0, **kwargs: Any) -> Any:
        if not args:  # it resolves names in its caller's frame
            kwargs["_frames_up"] = _frames_up + 1
        made = script(obj, *args, **kwargs)
        if isinstance(made, torch.jit.ScriptModule):
            tensors = _torch.script_tensors(_torch.script_module(made))
            _Scripted.any |= any(isinstance(t, LazyTensor) for _, _, t in tensors)
        return made

    return call


# -- saving: the writers access memory -----------------------------------------------------------


@contextmanager
def _with_plain_tensors(module: Any) -> Iterator[None]:
    """Replace a TorchScript module's lazy tensors by plain ones within a block."""
    tensors = _torch.script_tensors(module)
    found = [(owner, name, t) for owner, name, t in tensors if isinstance(t, LazyTensor)]
    try:
        with _torch.without_dispatch_modes():
            copies = {id(t): plain_copy(t) for _, _, t in found}  # preserves sharing
            for owner, name, tensor in found:
                owner.setattr(name, copies[id(tensor)].requires_grad_(tensor.requires_grad))
            yield
    finally:
        for owner, name, tensor in found:
            owner.setattr(name, tensor)


def _save(write: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(write)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        with _with_plain_tensors(self):
            return write(self, *args, **kwargs)

    return call


def _freeze(freeze: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps `torch.jit.freeze`, which turns tensors into constants."""

    @functools.wraps(freeze)
    def call(mod: Any, *args: Any, **kwargs: Any) -> Any:
        with _with_plain_tensors(_torch.script_module(mod)):
            return freeze(mod, *args, **kwargs)

    return call


def _apply(apply: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps moves of TorchScript modules, whose tensors cannot be swapped for lazy ones."""

    @functools.wraps(apply)
    def call(self: Any, fn: Callable[[torch.Tensor], torch.Tensor], *rest: Any, **kw: Any) -> Any:
        def convert(tensor: torch.Tensor) -> torch.Tensor:
            moved = fn(tensor)
            if isinstance(moved, LazyTensor) and not isinstance(tensor, LazyTensor):
                raise UnsupportedError(
                    "the tensors of a TorchScript module cannot become lazy: call it with lazy "
                    "inputs, or script the module after it was made lazy"
                )
            return moved

        return apply(self, convert, *rest, **kw)

    return call


def install() -> None:
    """Wrap TorchScript's entry points."""
    _torch.on_script_call(_call)
    _torch.on_script_save(_save)
    _torch.on_script_move(_apply)
    _torch.replace_function("torch.jit._script.script", _script)
    _torch.replace_function("torch.jit._freeze.freeze", _freeze)
