"""Modules and optimizers: how they are called, moved, compiled and stepped.

Uses private methods and hooks of `nn.Module`, and the choice of foreach and fused optimizers.
"""

from __future__ import annotations

import functools
import importlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import _C
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)


def on_move(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap `nn.Module._apply`, which moves and casts modules."""
    module: Any = torch.nn.Module
    module._apply = functools.wraps(module._apply)(around(module._apply))


def on_compile(hook: Callable[[torch.nn.Module], None]) -> None:
    """Call `hook(module)` before `module.compile()`."""
    module: Any = torch.nn.Module
    original = module.compile

    @functools.wraps(original)
    def compile(self: Any, *args: Any, **kwargs: Any) -> Any:
        hook(self)
        return original(self, *args, **kwargs)

    module.compile = compile


def on_registration(hook: Callable[[torch.nn.Module, str, Any], None]) -> None:
    """Call `hook(module, name, value)` before a parameter, buffer or submodule is registered."""
    modules = torch.nn.modules.module
    modules.register_module_parameter_registration_hook(hook)
    modules.register_module_buffer_registration_hook(hook)
    modules.register_module_module_registration_hook(hook)


def is_compiled(module: torch.nn.Module) -> bool:
    """Whether `torch.compile` runs the module."""
    if module._compiled_call_impl is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def has_hooks(module: torch.nn.Module) -> bool:
    """Whether calling the module does more than call its `forward`."""
    names: Any = sys.modules[torch.nn.Module.__module__]
    return bool(
        module._forward_hooks or module._forward_pre_hooks
        or module._backward_hooks or module._backward_pre_hooks
        or names._global_forward_hooks or names._global_forward_pre_hooks
        or names._global_backward_hooks or names._global_backward_pre_hooks
        or type(module)._call_impl is not torch.nn.Module._call_impl
    )  # fmt: skip


def wrap_module_call(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap `nn.Module.__call__`."""
    torch.nn.Module.__call__ = around(torch.nn.Module.__call__)  # type: ignore[method-assign]  # the purpose


_ASKED = torch.nn.Module._call_impl.__code__.co_names
_IS_TRACING = "_is_tracing" if "_is_tracing" in _ASKED else "_get_tracing_state"  # until 2.13
_CALL_NAMES = (
    "torch", "_C", _IS_TRACING, "_slow_forward", "forward", "_backward_hooks",
    "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_global_backward_pre_hooks",
    "_global_backward_hooks", "_global_forward_hooks", "_global_forward_pre_hooks",
)  # fmt: skip
"""All names that `nn.Module._call_impl` uses before calling `forward` of a module without hooks."""


class ModuleCall(NamedTuple):
    """`nn.Module.__call__`, and the conditions under which a call is just a call of `forward`."""

    function: Any
    calls: Any  # thread-local state: whether `inside` another call
    implementation: Any  # the default `_call_impl`, which a class may override
    names: dict[str, Any]  # globals of torch, among them ...
    hooks: tuple[str, ...]  # ... the global hooks
    is_known: bool  # whether this version of torch checks nothing else


def wrap_outermost_call(
    around: Callable[[Callable[..., Any]], Callable[..., Any]], calls: Any
) -> ModuleCall:
    """Wrap `nn.Module.__call__`, for calls made while `calls.inside` is false.

    A nested call does what torch does, with a fast path to `forward` for modules without hooks,
    which are most.
    """
    module: Any = torch.nn.Module  # methods are replaced and compared
    names: Any = sys.modules[module.__module__]
    call, implementation = module.__call__, module._call_impl
    is_known = call is module._wrapped_call_impl and _ASKED[: len(_CALL_NAMES)] == _CALL_NAMES
    outermost = around(call)
    is_compiling = torch.compiler.is_dynamo_compiling  # Dynamo treats it as a constant
    is_traced = getattr(_C, _IS_TRACING)

    def __call__(self: Any, *args: Any, **kwargs: Any) -> Any:
        if is_compiling():
            return call(self, *args, **kwargs)
        if not calls.inside:
            return outermost(self, *args, **kwargs)
        if (
            is_known
            and self._compiled_call_impl is None
            and type(self)._call_impl is implementation
            and not (
                self._forward_hooks or self._forward_pre_hooks
                or self._backward_hooks or self._backward_pre_hooks
                or names._global_forward_hooks or names._global_forward_pre_hooks
                or names._global_backward_hooks or names._global_backward_pre_hooks
                or is_traced() or "_call_impl" in self.__dict__
            )
        ):  # fmt: skip
            return self.forward(*args, **kwargs)
        return call(self, *args, **kwargs)

    module.__call__ = functools.wraps(call)(__call__)
    hooks = tuple(name for name in _CALL_NAMES if name.startswith("_global_"))
    return ModuleCall(__call__, calls, implementation, vars(names), hooks, is_known)


def module_attributes() -> tuple[Any, tuple[str, ...]] | None:
    """`nn.Module.__getattr__` and the tables it searches, in order; None if it does more."""
    function: Any = torch.nn.Module.__getattr__
    code = function.__code__
    tables = ("_parameters", "_buffers", "_modules")
    texts = tuple(constant for constant in code.co_consts if type(constant) is str)
    known = ("__dict__", "AttributeError", "type", "__name__")
    return (function, tables) if code.co_names == known and texts[:3] == tables else None


def on_parameter_groups(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap `Optimizer.add_param_group`, through which an optimizer gets all parameters."""
    optimizer: Any = torch.optim.Optimizer
    original = optimizer.add_param_group
    optimizer.add_param_group = functools.wraps(original)(around(original))


def register_step_hook(hook: Callable[..., None]) -> Any:
    """Call `hook(optimizer, args, kwargs)` after every `optimizer.step()` in the process."""
    return register_optimizer_step_post_hook(_not_inlined(hook))


def _not_inlined(hook: Callable[..., None]) -> Callable[..., None]:
    """TorchDynamo would guard on what torpor counts, and compile anew at every step."""

    @torch._disable_dynamo
    def call(optimizer: Any, args: Any, kwargs: Any) -> None:
        hook(optimizer, args, kwargs)

    return call


def after_zero_grad(hook: Callable[[], None]) -> None:
    """Call `hook()` after every `zero_grad()` of an optimizer or a module."""
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        owner.zero_grad = _followed(owner.zero_grad, hook)  # type: ignore[method-assign]


def _followed(method: Callable[..., None], hook: Callable[[], None]) -> Callable[..., None]:
    @functools.wraps(method)
    def followed(*args: Any, **kwargs: Any) -> None:
        method(*args, **kwargs)
        hook()

    return followed


def register_step_pre_hook(hook: Callable[..., None]) -> Any:
    """The same before every `optimizer.step()`."""
    return register_optimizer_step_pre_hook(_not_inlined(hook))


_SAME_BITS = ("adadelta", "adagrad", "adam", "adamax", "rmsprop", "rprop", "sgd")
"""Optimizers whose foreach implementation is bit-identical to their loop over parameters."""


def prefer_foreach(
    tensor_type: type[torch.Tensor], are_apart: Callable[[list[torch.Tensor]], bool]
) -> None:
    """Make optimizers default to foreach for tensors of `tensor_type`: far fewer ops.

    Unless parameters share memory: a loop updates them in turn, each from what the last one left.
    On the device `lazy` their fused implementation is available too, if requested.
    """
    from torch.optim import optimizer, sgd
    from torch.utils import _foreach_utils

    lists: tuple[list[Any], ...] = (
        optimizer._foreach_supported_types,
        _foreach_utils._foreach_supported_types,
    )
    for listed in lists:
        if tensor_type not in listed:
            listed.append(tensor_type)
    original = optimizer._default_to_fused_or_foreach

    @functools.wraps(original)
    def choose(
        params: list[torch.Tensor], differentiable: bool, use_fused: bool = False
    ) -> tuple[bool, bool]:
        if differentiable or not any(type(p) is tensor_type for p in params):
            return original(params, differentiable, use_fused)
        if not all(type(p) is tensor_type for p in params):
            return False, False
        if are_apart(params):
            return False, True
        return False, all(p.is_cuda for p in params)  # eager's own choice

    for name in _SAME_BITS:
        importlib.import_module(f"torch.optim.{name}")._default_to_fused_or_foreach = choose  # type: ignore[attr-defined]  # a plain module
    sgd.sgd = _keeping_gradients(sgd.sgd, tensor_type)
    devices = _foreach_utils._get_foreach_kernels_supported_devices
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: [*devices(), "lazy"]
    fused = optimizer._get_fused_kernels_supported_devices
    optimizer._get_fused_kernels_supported_devices = lambda: [*fused(), "lazy"]


def _keeping_gradients(step: Callable[..., None], tensor_type: type[torch.Tensor]) -> Any:
    """SGD's loop over parameters keeps their gradients; with Nesterov momentum, foreach does not.

    So where foreach was not the user's choice, it gets copies.
    """

    @functools.wraps(step)
    def around(params: list[Any], grads: list[Any], *args: Any, **kwargs: Any) -> None:
        writes = kwargs["nesterov"] and not kwargs["weight_decay"] and not kwargs["maximize"]
        is_chosen = kwargs.get("foreach") is not None
        if writes and not is_chosen and any(type(grad) is tensor_type for grad in grads):
            grads = [grad.clone() for grad in grads]
        step(params, grads, *args, **kwargs)

    return around
