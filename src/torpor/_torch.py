"""Everything torpor takes from inside torch, in one place.

A new torch release that moves one of these breaks here, and the test of the same name in
`tests/unit/test_torch_internals.py` says which.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import _C
from torch._ops import OpOverload as OpOverload
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

DispatchMode: Any = TorchDispatchMode  # its methods are not annotated
"""Base of a mode that sees every op, below autograd."""

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Makes a tensor with sizes, strides, dtype and device, and no memory."""

disabled_torch_function = _C._disabled_torch_function_impl
set_conj: Callable[[torch.Tensor, bool], None] = _C._set_conj
set_neg: Callable[[torch.Tensor, bool], None] = _C._set_neg

set_metadata: Callable[[torch.Tensor, torch.Tensor], None] = torch.Tensor.data.__set__  # type: ignore[attr-defined]  # a getset, not an attribute
"""Gives a tensor the sizes, strides and dtype of another (the setter of `Tensor.data`)."""

tree_map = pytree.tree_map
tree_leaves = pytree.tree_leaves


def without_torch_function() -> AbstractContextManager[Any]:
    """Switches off `__torch_function__` and its modes, the default device among them."""
    return _C.DisableTorchFunction()


_BIT_KEYS = (_C.DispatchKey.Conjugate, _C.DispatchKey.Negative, _C.DispatchKey.ZeroTensor)
"""What torch switches off while it calls us, and a kernel that makes a conjugate view needs."""


@contextmanager
def kernels() -> Iterator[None]:
    """Runs the body below autograd, where eager runs its kernels: the grad mode stays on.

    Some kernels look at the grad mode and keep something for backward only if it is on.
    """
    with _C.DisableTorchFunction(), torch.enable_grad(), _C._AutoDispatchBelowAutograd():
        excluded = _C._dispatch_tls_local_exclude_set()
        for key in _BIT_KEYS:
            excluded = excluded.remove(key)
        with _C._ForceDispatchKeyGuard(_C._dispatch_tls_local_include_set(), excluded):
            yield


@contextmanager
def without_modes() -> Iterator[None]:
    """Runs the body as if no dispatch mode were active: plain tensors stay plain."""
    with _C.DisableTorchFunction(), _disable_current_modes():
        yield


@functools.cache
def fake_mode() -> Any:
    """The fake-tensor mode that infers types with no numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=False)
    mode.cache_enabled = False  # torch's cache has no bound; `ops.infer` keeps one that has
    return mode


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Keeps fake tensors from logging an op they refuse: the refusal is an answer too."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """What fake tensors raise for an op whose result type depends on numbers."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    return (DataDependentOutputException, DynamicOutputShapeException)


def unsupported_errors() -> tuple[type[BaseException], ...]:
    """What fake tensors raise for an op they know nothing about."""
    from torch._subclasses.fake_tensor import (
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )

    return (UnsupportedOperatorException, UnsupportedFakeTensorException, NotImplementedError)


def set_op_attribute(op: OpOverload, name: str, value: Any) -> None:
    """Keep something of ours on a torch op: one attribute look-up on the hot path, no hashing."""
    setattr(op, name, value)


def is_composite(op: OpOverload) -> bool:
    """The op is made of other ops, also for autograd: torch normally never shows it to us."""
    return bool(_C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


_FACTORIES = (
    "arange", "arange.start", "arange.start_step", "bartlett_window", "blackman_window",
    "empty.memory_format", "empty_strided", "empty_permuted", "eye", "eye.m", "full",
    "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand",
    "randint", "randint.low", "randn", "randperm", "range", "range.step", "scalar_tensor",
    "tril_indices", "triu_indices", "zeros", "rand.generator", "randn.generator",
    "randint.generator", "randint.low_generator", "randperm.generator", "normal.float_float",
    "_efficientzerotensor",
)  # fmt: skip


def factory_ops() -> list[OpOverload]:
    """Ops that make a tensor from nothing and choose their kernel by the `device` argument."""
    found = []
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None and not is_composite(op):
            found.append(op)
    return found


rebuild_tensor = torch._utils._rebuild_tensor_v2
rebuild_parameter = torch._utils._rebuild_parameter


def typed_storage(tensor: torch.Tensor) -> Any:
    """The storage of a plain tensor in the form `torch.save` writes."""
    return tensor._typed_storage()


def register_step_hook(hook: Callable[..., None]) -> Any:
    """Call `hook(optimizer, args, kwargs)` after every `optimizer.step()` in the process."""
    return register_optimizer_step_post_hook(hook)


def wrap_module_call(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `nn.Module.__call__` by what `around` makes of it."""
    torch.nn.Module.__call__ = around(torch.nn.Module.__call__)  # type: ignore[method-assign]  # the purpose


_SAME_BITS = ("adadelta", "adagrad", "adam", "adamax", "rmsprop", "rprop", "sgd")
"""Optimizers whose foreach form computes the very bits of their loop over parameters."""


def prefer_foreach(tensor_type: type[torch.Tensor]) -> None:
    """Let optimizers choose their foreach form for tensors of `tensor_type`: far fewer ops."""
    from torch.optim import optimizer
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
        if not differentiable and any(type(p) is tensor_type for p in params):
            return False, all(type(p) is tensor_type for p in params)
        return original(params, differentiable, use_fused)

    for name in _SAME_BITS:
        importlib.import_module(f"torch.optim.{name}")._default_to_fused_or_foreach = choose  # type: ignore[attr-defined]  # a plain module
    devices = _foreach_utils._get_foreach_kernels_supported_devices
    _foreach_utils._get_foreach_kernels_supported_devices = lambda: [*devices(), "lazy"]


def register_device_module(name: str, module: Any) -> None:
    """Make `module` the namespace `torch.<name>` of a device."""
    if not hasattr(torch, name):
        torch._register_device_module(name, module)


def attention_switches() -> tuple[bool, ...]:
    """The process-wide switches that decide which attention kernel is chosen."""
    return (
        _C._get_flash_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_overrideable_sdp_enabled(),
    )


def attention_choice(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scale: float | None
) -> int:
    """The number of the attention kernel torch chooses for plain tensors like these."""
    with without_torch_function():
        return int(torch._fused_sdp_choice(query, key, value, None, 0.0, causal, scale=scale))


@functools.cache
def composite_ops_with_cpu_kernels() -> frozenset[OpOverload]:
    """Composite ops that the CPU computes whole, with a kernel of its own."""
    found = set()
    for name in ("silu_backward", "mish_backward", "native_channel_shuffle"):
        op = getattr(torch.ops.aten, name).default
        if is_composite(op) and _C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"):
            found.add(op)
    return frozenset(found)


def accept_lazy_autocast() -> None:
    """Let `torch.is_autocast_enabled("lazy")` be False where torch refuses the question."""
    original = torch.is_autocast_enabled

    @functools.wraps(original)
    def is_autocast_enabled(*args: Any) -> bool:
        return False if args and args[0] == "lazy" else original(*args)

    torch.is_autocast_enabled = is_autocast_enabled  # type: ignore[assignment]  # overloads


def accept_lazy_attention() -> None:
    """Let `nn.MultiheadAttention` take its fused path on the device `lazy` too."""
    from torch.nn.modules import activation

    original = activation._check_arg_device
    activation._check_arg_device = lambda x: (
        original(x) or (x is not None and x.device.type == "lazy")
    )


def has_tangent(tensor: torch.Tensor) -> bool:
    """The tensor carries a forward-mode derivative."""
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None if _level() else False


def _level() -> bool:
    return torch.autograd.forward_ad._current_level >= 0


def on_default_dtype(changed: Callable[[], None]) -> None:
    """Call `changed` whenever the default dtype changes: it decides result types unseen."""

    def watch(name: str) -> None:
        original = getattr(torch, name)

        @functools.wraps(original)
        def set_default(value: Any) -> None:
            before = torch.get_default_dtype()
            original(value)
            if torch.get_default_dtype() is not before:
                changed()

        setattr(torch, name, set_default)

    watch("set_default_dtype")
    watch("set_default_tensor_type")


def accept_lazy_losses() -> None:
    """Let `linear_cross_entropy` choose on the device `lazy` what it chooses on the CPU."""
    name = "torch.nn.modules.linear_cross_entropy_options"
    if importlib.util.find_spec(name) is None:  # torch 2.11 does not have it
        return
    table = importlib.import_module(name)._AUTO_DEFAULTS
    table.update({("lazy", dtype): v for (device, dtype), v in [*table.items()] if device == "cpu"})


def has_no_memory(storage: torch.UntypedStorage) -> bool:
    """The storage of a wrapper: it has a size and no memory behind it."""
    try:
        return storage.data_ptr() == 0
    except RuntimeError:  # torch 2.13 refuses to tell a null address
        return True
