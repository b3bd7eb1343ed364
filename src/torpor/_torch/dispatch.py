"""Thread-local dispatcher state: dispatch keys, dispatch modes, function transforms, autocast.

Uses the dispatcher's thread-local key sets, and the stacks of modes and of transforms.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import _C
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

DispatchMode: Any = TorchDispatchMode  # its methods are not annotated
"""The base class of a mode that intercepts every op, below autograd."""

disabled_torch_function = _C._disabled_torch_function_impl


def modes() -> list[Any]:
    """The active dispatch modes, outermost first."""
    return list(_get_current_dispatch_mode_stack())


def without_torch_function() -> AbstractContextManager[Any]:
    """Disable `__torch_function__` and its modes, including the default device."""
    return _C.DisableTorchFunction()


def without_modes() -> AbstractContextManager[Any]:
    """Run the body without dispatch modes: plain tensors stay plain."""
    if _C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
        return _modes_aside()
    return _C.DisableTorchFunction()


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Run the body without dispatch modes, keeping modes of `__torch_function__`."""
    with _disable_current_modes():
        yield


@contextmanager
def _modes_aside() -> Iterator[None]:
    with _C.DisableTorchFunction(), _disable_current_modes():
        yield


_BIT_KEYS = (_C.DispatchKey.Conjugate, _C.DispatchKey.Negative, _C.DispatchKey.ZeroTensor)
"""Keys that torch excludes while it calls us, and that kernels making conjugate views need."""


@contextmanager
def kernels() -> Iterator[None]:
    """Run the body below autograd, like eager's kernels, with the grad mode on.

    Some kernels save state for backward only if the grad mode is on. Below autograd, writes do not
    bump versions, and inference tensors can be written to.
    """
    with _C.DisableTorchFunction(), torch.enable_grad(), _C._AutoDispatchBelowAutograd():
        excluded = _C._dispatch_tls_local_exclude_set().add(_C.DispatchKey.ADInplaceOrView)
        for key in _BIT_KEYS:
            excluded = excluded.remove(key)
        with _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded):
            yield


def below_autograd() -> AbstractContextManager[Any]:
    """Run the body below autograd: composite ops on lazy tensors reach us undecomposed."""
    return _C._AutoDispatchBelowAutograd()


_AUTOCAST_KEYS = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU).add(_C.DispatchKey.AutocastCUDA)


def without_autocast() -> AbstractContextManager[Any]:
    """Run the body below autocast: nothing is cast."""
    return _C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


_AUTOGRAD_KEYS = (
    _C.DispatchKey.AutogradFunctionality,
    _C.DispatchKey.AutogradOther, _C.DispatchKey.AutogradNestedTensor,
)  # fmt: skip


@contextmanager
def above_autograd() -> Iterator[None]:
    """Run the body at the level of user code, where autograd sees its ops.

    In inference mode that excludes autograd, but not the tracking of views.
    """
    excluded = _C._dispatch_tls_local_exclude_set()
    keys = () if torch.is_inference_mode_enabled() else _AUTOGRAD_KEYS
    for key in (_C.DispatchKey.ADInplaceOrView, *keys, *_BIT_KEYS):
        excluded = excluded.remove(key)
    included = _C._dispatch_tls_local_include_set()
    with _C._ForceDispatchKeyGuard(included, excluded):
        yield


_PYTHON_KEYS = (_C.DispatchKey.Python, _C.DispatchKey.PythonTLSSnapshot)


def is_python_off() -> bool:
    """Whether dispatch to tensor subclasses is off, as while `torch.tensor` reads list items."""
    return bool(_C._dispatch_tls_is_dispatch_key_excluded(_C.DispatchKey.Python))


@contextmanager
def python_on() -> Iterator[None]:
    """Run the body with dispatch to tensor subclasses on."""
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in _PYTHON_KEYS:
        excluded = excluded.remove(key)
    with _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded):
        yield


def is_any_autocast_on() -> bool:
    """Whether autocast is on for any device."""
    return bool(_C._is_any_autocast_enabled())


def is_transforming() -> bool:
    """Whether a function transform (`torch.func`) is active."""
    return bool(_C._are_functorch_transforms_active())


def is_tracing() -> bool:
    """Whether a compiler, TorchScript or `torch.func` is tracing."""
    return bool(
        torch.compiler.is_compiling() or _C._get_tracing_state() is not None or is_transforming()
    )


def as_on_another_thread() -> AbstractContextManager[Any]:
    """Run the body as on a fresh thread: without modes, inference mode, autocast or transforms of
    `torch.func`."""
    if (
        torch.is_inference_mode_enabled()
        or is_any_autocast_on()
        or _C._functorch.peek_interpreter_stack() is not None
    ):
        return _all_aside()
    return without_modes()


@contextmanager
def _all_aside() -> Iterator[None]:
    from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

    inference = torch.inference_mode(False)
    with temporarily_clear_interpreter_stack(), without_modes(), inference, _C._DisableAutocast():
        yield
