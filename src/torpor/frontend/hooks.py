"""Automatic cuts: after an optimizer's step, and after an outermost module call without gradients.

If the backend requests it (`Backend.cuts_at_zero_grad`), the cut after an optimizer's step is
deferred until `zero_grad`, the next module call or the next read: gradients dropped by then are not
outputs of the step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch, config
from torpor.adaptive.bound import BOUND
from torpor.adaptive.cycles import cut_later, is_cut_due
from torpor.capture import optimizer_steps
from torpor.capture.modules import call_module
from torpor.execute.storage import TRACE
from torpor.frontend.api import sync
from torpor.frontend.enable import LAZINESS
from torpor.frontend.optimizers import before_step, note_step
from torpor.observe.scope import frames_of_modules
from torpor.trace.tensor import LazyTensor


def _after_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    if TRACE.is_open() and _is_lazy(optimizer):
        note_step(optimizer)
        if config.cut_after_optimizer and not cut_later(optimizer):
            sync()
    if LAZINESS.on and BOUND.is_on():
        BOUND.after_step(optimizer)


def _cut_if_due() -> None:
    if is_cut_due():
        sync()


def _before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    _cut_if_due()
    optimizer_steps.take_up(optimizer)
    before_step(optimizer, args, kwargs)


def _is_lazy(optimizer: Any) -> bool:
    return any(
        type(_torch.local_part(parameter)) is LazyTensor
        for group in optimizer.param_groups
        for parameter in group["params"]
    )


class _Calls(threading.local):
    """Whether this thread is inside a module call."""

    inside = False


_calls = _Calls()

MODULE_CALLS: list[_torch.ModuleCall] = []
"""How modules are called, once the hook is installed."""


def _outermost(call: Callable[..., Any]) -> Callable[..., Any]:
    """Wraps outermost module calls."""
    is_grad_enabled = torch.is_grad_enabled
    is_compiling = torch.compiler.is_compiling

    def outermost(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return call(self, *args, **kwargs)
        _cut_if_due()
        may_be_lazy = not LAZINESS.on or LAZINESS.before_call(self)
        _calls.inside = True
        try:
            if may_be_lazy and config.capture != "off" and _is_users():
                result = call_module(call, self, args, kwargs)
            else:
                result = call(self, *args, **kwargs)
        finally:
            _calls.inside = False
        if (
            not is_grad_enabled() and config.cut_after_module and TRACE.is_open()
            and _is_users() and _has_lazy((result, args, kwargs), self)
        ):  # fmt: skip
            sync()
        return result

    return outermost


def _has_lazy(passed: Any, module: torch.nn.Module) -> bool:
    """Whether lazy tensors are among a module call's arguments, results, parameters or buffers."""
    if any(type(_torch.local_part(leaf)) is LazyTensor for leaf in _torch.tree_leaves(passed)):
        return True
    held = itertools.chain(module.parameters(), module.buffers())
    return any(type(_torch.local_part(tensor)) is LazyTensor for tensor in held)


def _is_users() -> bool:
    """Whether this is not a thread of torpor's, which may call compilers' modules."""
    return not threading.current_thread().name.startswith("torpor-")


def install() -> None:
    """Register the hooks at the ends of steps."""
    _torch.register_step_pre_hook(_before_step)
    _torch.after_zero_grad(_cut_if_due)
    _torch.register_step_hook(_after_step)
    made = _torch.wrap_outermost_call(_outermost, _calls)
    frames_of_modules(made.function.__code__)
    MODULE_CALLS.append(made)
