"""What is active on this thread: dispatch keys, dispatch modes, function transforms, autocast.

It reaches the dispatcher's thread-local key sets and the stacks of modes and of transforms.
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
"""Base of a mode that sees every op, below autograd."""

disabled_torch_function = _C._disabled_torch_function_impl


def modes() -> list[Any]:
    """The dispatch modes that are active, outermost first."""
    return list(_get_current_dispatch_mode_stack())


def without_torch_function() -> AbstractContextManager[Any]:
    """Switches off `__torch_function__` and its modes, the default device among them."""
    return _C.DisableTorchFunction()


def without_modes() -> AbstractContextManager[Any]:
    """Runs the body as if no dispatch mode were active: plain tensors stay plain."""
    if _C._len_torch_dispatch_stack() or _len_torch_dispatch_stack_pre_dispatch():
        return _modes_aside()
    return _C.DisableTorchFunction()


@contextmanager
def without_dispatch_modes() -> Iterator[None]:
    """Runs the body as if no dispatch mode were active; modes of `__torch_function__` stay."""
    with _disable_current_modes():
        yield


@contextmanager
def _modes_aside() -> Iterator[None]:
    with _C.DisableTorchFunction(), _disable_current_modes():
        yield


_BIT_KEYS = (_C.DispatchKey.Conjugate, _C.DispatchKey.Negative, _C.DispatchKey.ZeroTensor)
"""What torch switches off while it calls us, and a kernel that makes a conjugate view needs."""


@contextmanager
def kernels() -> Iterator[None]:
    """Runs the body below autograd, where eager runs its kernels: the grad mode stays on.

    Some kernels look at the grad mode and keep something for backward only if it is on. Nobody
    counts writes down there, and inference tensors are written to like all others.
    """
    with _C.DisableTorchFunction(), torch.enable_grad(), _C._AutoDispatchBelowAutograd():
        excluded = _C._dispatch_tls_local_exclude_set().add(_C.DispatchKey.ADInplaceOrView)
        for key in _BIT_KEYS:
            excluded = excluded.remove(key)
        with _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded):
            yield


def below_autograd() -> AbstractContextManager[Any]:
    """Runs the body below autograd: a composite op on lazy tensors reaches us whole."""
    return _C._AutoDispatchBelowAutograd()


_AUTOCAST_KEYS = _C.DispatchKeySet(_C.DispatchKey.AutocastCPU).add(_C.DispatchKey.AutocastCUDA)


def without_autocast() -> AbstractContextManager[Any]:
    """Runs the body below autocast: nothing is cast."""
    return _C._ExcludeDispatchKeyGuard(_AUTOCAST_KEYS)


_AUTOGRAD_KEYS = (
    _C.DispatchKey.AutogradFunctionality,
    _C.DispatchKey.AutogradOther, _C.DispatchKey.AutogradNestedTensor,
)  # fmt: skip


@contextmanager
def above_autograd() -> Iterator[None]:
    """Runs the body where the user's code runs: autograd sees its ops again.

    In inference mode that is below autograd too, but not below the bookkeeping of views.
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
    """torch does not ask tensor subclasses now: `torch.tensor` reads the items of a list so."""
    return bool(_C._dispatch_tls_is_dispatch_key_excluded(_C.DispatchKey.Python))


@contextmanager
def python_on() -> Iterator[None]:
    """Runs the body with tensor subclasses asked again."""
    excluded = _C._dispatch_tls_local_exclude_set()
    for key in _PYTHON_KEYS:
        excluded = excluded.remove(key)
    with _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded):
        yield


def is_any_autocast_on() -> bool:
    """Ops are cast on some kind of device now."""
    return bool(_C._is_any_autocast_enabled())


def is_transforming() -> bool:
    """A function transform (`torch.func`) is at work."""
    return bool(_C._are_functorch_transforms_active())


def is_tracing() -> bool:
    """A compiler, TorchScript, `torch.func` or a mode that is no `mode` of torpor's looks on."""
    return bool(
        torch.compiler.is_compiling() or _C._get_tracing_state() is not None or is_transforming()
    )


def as_on_another_thread() -> AbstractContextManager[Any]:
    """Runs the body as on a thread where the user has switched nothing on: no mode, no inference
    mode, no autocast, no transform of `torch.func`."""
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
