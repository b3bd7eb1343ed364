"""Everything torpor takes from inside torch, in one place.

A new torch release that moves one of these breaks here, and the test of the same name in
`tests/unit/test_torch_internals.py` says which.
"""

from __future__ import annotations

import copy
import ctypes
import functools
import importlib
import importlib.util
import itertools
import logging
import os
import pickle
import re
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Final, NamedTuple

import torch
from torch import _C
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch._ops import _len_torch_dispatch_stack_pre_dispatch
from torch.autograd import profiler
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _disable_current_modes,
    _get_current_dispatch_mode_stack,
)

DispatchMode: Any = TorchDispatchMode  # its methods are not annotated
"""Base of a mode that sees every op, below autograd."""

make_wrapper: Callable[..., Any] = torch.Tensor._make_wrapper_subclass
"""Makes a tensor with sizes, strides, dtype and device, and no memory."""


@functools.cache
def lazy_keys(device_type: str) -> tuple[Any, ...]:
    """Further arguments of `make_wrapper` that put a tensor on a concrete device under `Lazy` too.

    Then autograd treats it as it treats tensors on the device `lazy`, and plain tensors on the
    same device know nothing of torpor.
    """
    if device_type == "lazy":
        return ()
    keys = _C.DispatchKeySet(_C.DispatchKey.Lazy)
    autocast = getattr(_C.DispatchKey, f"Autocast{device_type.upper()}", None)
    if autocast is not None:
        keys = keys.add(autocast)
    return (False, False, None, False, False, keys)


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


def has_saved_tensors_hooks() -> bool:
    """Hooks of `torch.autograd.graph.saved_tensors_hooks` are active on this thread."""
    return _C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_any_autocast_on() -> bool:
    """Ops are cast on some kind of device now."""
    return bool(_C._is_any_autocast_enabled())


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


def dispatch_keys(tensor: torch.Tensor) -> str:
    """The dispatch keys of a tensor, as text."""
    return str(_C._dispatch_keys(tensor))


@functools.cache
def define_ops(namespace: str, schemas: tuple[str, ...]) -> list[OpOverload]:
    """Ops with these schemas and no kernels, under a namespace of ours; they stay."""
    library = torch.library.Library(namespace, "DEF")
    names = [library.define(schema) for schema in schemas]
    _libraries.append(library)
    packets = getattr(torch.ops, namespace)
    return [getattr(packets, name).default for name in names]


_libraries: list[torch.library.Library] = []


def parse_schema(text: str) -> Any:
    """The schema that `text` is, as torch reads it; `RuntimeError` if it is none."""
    return _C.parse_schema(text)


def drop_op_attribute(op: OpOverload, name: str) -> None:
    """Take away what `set_op_attribute` put on an op; nothing if it has none."""
    vars(op).pop(name, None)


def custom_op_overload(op: Any) -> OpOverload | None:
    """The overload that a function made by `torch.library.custom_op` calls; None for others."""
    overload = getattr(op, "_opoverload", None)
    return overload if isinstance(overload, OpOverload) else None


def ops_in(namespace: str) -> list[str]:
    """The names of all ops of a namespace: `acme::scale.overload`."""
    names = _C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith(f"{namespace}::"))


def is_taken_op_name(base: str, overload: str = "") -> bool:
    """`torch.ops.<namespace>.<base>` or its `.<overload>` is something else than an op."""
    empty = type(torch.ops.aten)("torpor_names")  # a namespace without ops
    if hasattr(empty, base):
        return True
    packet = torch.ops.aten.relu
    return hasattr(packet, overload) and overload not in packet.overloads() if overload else False


def has_fake(op: OpOverload) -> bool:
    """An op of a library has a kernel for fake tensors."""
    from torch._library import custom_ops, simple_registry, utils

    made = custom_ops.OPDEFS.get(f"{op.namespace}::{op._opname}")
    if made is not None and made._opoverload is op:
        return made._abstract_fn is not None or utils.can_generate_trivial_fake_impl(op)
    if simple_registry.singleton.find(op.name()).fake_impl.kernel is not None:
        return True
    keys = ("Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(_C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def give_fake(op: OpOverload, fake: Callable[..., Any]) -> Callable[[], None]:
    """Give an op of a library that has none a kernel for fake tensors; what takes it away again."""
    from torch._library import custom_ops

    made = custom_ops.OPDEFS.get(f"{op.namespace}::{op._opname}")
    if made is not None and made._opoverload is op:
        made._abstract_fn = fake
        return lambda: setattr(made, "_abstract_fn", None)
    library = torch.library.Library(op.namespace, "FRAGMENT")
    torch.library.register_fake(op, fake, lib=library, allow_override=True)
    return library._destroy


def is_composite(op: OpOverload) -> bool:
    """The op is made of other ops, also for autograd: torch normally never shows it to us."""
    return bool(_C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


_MADE_OF_OTHERS = (
    "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)  # fmt: skip


def type_source(op: OpOverload) -> str:
    """What tells fake tensors the result of an op: a kernel for meta tensors, its parts, or fakes.

    The empty string if there is nothing.
    """
    importlib.import_module("torch._meta_registrations")
    fakes = importlib.import_module("torch._subclasses.fake_impls").op_implementations_dict
    decompositions = importlib.import_module("torch._decomp").decomposition_table
    if op in fakes:
        return "fake"
    if _C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"):
        return "meta"
    has_parts = any(_C._dispatch_has_kernel_for_dispatch_key(op.name(), k) for k in _MADE_OF_OTHERS)
    return "parts" if has_parts or op in decompositions else ""


class Kernels:
    """Kernels for ops of torch under one dispatch key, put in place and taken away together."""

    def __init__(self, key: str, kernels: dict[OpOverload, Callable[..., Any]]) -> None:
        self._key = key
        self._kernels = kernels
        self._library: torch.library.Library | None = None

    def set(self, active: bool) -> None:
        """Put the kernels in place, or take them away."""
        if active and self._library is None:
            self._library = torch.library.Library("aten", "IMPL")
            for op, kernel in self._kernels.items():
                self._library.impl(op, kernel, self._key)
        elif not active and self._library is not None:
            self._library._destroy()
            self._library = None


def on_higher_derivatives(
    forward_mode: AbstractContextManager[Any], again: AbstractContextManager[Any]
) -> None:
    """Enter `forward_mode` in every forward-mode level, `again` in every backward with a graph."""
    forward_ad: Any = torch.autograd.forward_ad
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level

    @functools.wraps(enter)
    def enter_dual_level() -> Any:
        level = enter()
        forward_mode.__enter__()
        return level

    @functools.wraps(leave)
    def exit_dual_level(*, level: int | None = None) -> None:
        leave(level=level)
        forward_mode.__exit__(None, None, None)

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_dual_level, exit_dual_level
    engine = torch.autograd.graph._engine_run_backward

    @functools.wraps(engine)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        if args[2]:  # gradients, keep_graph, create_graph, ...
            with again:
                return engine(outputs, *args, **kwargs)
        return engine(outputs, *args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):  # one imports it from the other by name
        setattr(module, "_engine_run_backward", run_backward)  # noqa: B010  # untyped names


def take_apart(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op as eager takes it apart; NotImplemented if it is none.

    `OpOverload.decompose` prefers forms written for compilers, whose bits and messages differ.
    """
    if not is_composite(op):
        return NotImplemented
    return op._op_dk(_C.DispatchKey.CompositeImplicitAutograd, *args, **kwargs)


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


def is_held(tensor: torch.Tensor) -> bool:
    """Somebody besides its Python object holds the tensor: a graph of autograd, torch itself."""
    return _holders(tensor) > 1


_holders: Callable[[torch.Tensor], int] = torch.Tensor._use_count  # type: ignore[attr-defined]  # not in the stubs


def swap(tensor: torch.Tensor, other: torch.Tensor) -> None:
    """Let two tensors change places behind their Python objects, but for hooks of `tensor`.

    `other` is not to be used any more.
    Classes and attributes are the caller's. Hooks of autograd belong to the tensor behind the
    object; the dictionaries that handles remove them from belong to the object.
    """
    hooks, after_grad = tensor._backward_hooks, tensor._post_accumulate_grad_hooks
    _C._swap_tensor_impl(tensor, other)
    tensor._backward_hooks = hooks
    tensor._post_accumulate_grad_hooks = after_grad
    other._backward_hooks = None
    if after_grad is not None:
        other._post_accumulate_grad_hooks = {}  # None would leave those that are there


def end_gradients(tensor: torch.Tensor, message: str) -> bool:
    """Let backward through graphs recorded before raise `message`; False if more than that is held.

    What accumulates the gradient of a leaf holds the leaf, for as long as a graph needs it.
    """
    if _holders(tensor) != 2 or not tensor.is_leaf or not tensor.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    if _holders(tensor) != 2:  # it was made by the question
        return False

    def refuse(_: Any) -> None:
        raise RuntimeError(message)

    node.register_prehook(refuse)
    return True


def may_change(tensor: torch.Tensor, holders: int = 1) -> bool:
    """No graph of autograd needs the tensor behind the object, which `holders` of torch hold.

    What accumulates its gradient may hold it too: a loss that was not dropped keeps that alive. Not
    if Python holds the accumulator: somebody has registered hooks with it.
    """
    if _holders(tensor) <= holders:
        return True
    if _holders(tensor) != holders + 1 or not tensor.is_leaf or not tensor.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return _holders(tensor) == holders + 1 and sys.getrefcount(node) <= _sole_references()


@functools.cache
def _sole_references() -> int:
    """References to an accumulator that nobody but a graph holds, as `may_change` counts them."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        kept = leaf * 2
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    count = sys.getrefcount(node)
    del kept
    return count


def pass_gradients_on(
    tensor: torch.Tensor, convert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Let gradients that graphs recorded before have for `tensor` reach what it is by then.

    `convert(gradient, tensor)` makes the gradient one that fits. Call it before `swap`.
    """
    if _holders(tensor) == 1:
        return
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    held = weakref.ref(tensor)

    def pass_on(gradients: tuple[Any, ...]) -> tuple[None]:
        target = held()
        if target is not None and gradients[0] is not None:
            gradient = convert(gradients[0], target)
            for hook in (target._backward_hooks or {}).values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            accumulate: Any = torch.autograd.graph.get_gradient_edge(target).node
            accumulate(gradient)
        return (None,)

    node.register_prehook(pass_on)


def on_move(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `nn.Module._apply`, which moves and casts modules, by what `around` makes of it."""
    module: Any = torch.nn.Module
    module._apply = functools.wraps(module._apply)(around(module._apply))


def on_set_data(
    lazy: type[torch.Tensor], become: Callable[[torch.Tensor, Any], torch.Tensor | None]
) -> None:
    """Let `plain.data = other`, `other` of the class `lazy`, be done by `become(plain, other)`.

    What that returns, if anything, is set in the place of `other`. torch would give a plain tensor
    the dispatch keys of a lazy one, and no memory.
    """
    data: Any = torch.Tensor.data

    def set_data(self: torch.Tensor, other: Any) -> None:
        new = become(self, other) if type(other) is lazy else other
        if new is not None:
            data.__set__(self, new)

    torch.Tensor.data = property(data.__get__, set_data)  # type: ignore[assignment]  # a getset


def on_parameter_groups(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `Optimizer.add_param_group`, which every parameter of an optimizer passes."""
    optimizer: Any = torch.optim.Optimizer
    original = optimizer.add_param_group
    optimizer.add_param_group = functools.wraps(original)(around(original))


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
    """Call `hook(module, name, value)` before a parameter, buffer or module becomes a module's."""
    modules = torch.nn.modules.module
    modules.register_module_parameter_registration_hook(hook)
    modules.register_module_buffer_registration_hook(hook)
    modules.register_module_module_registration_hook(hook)


def is_compiled(module: torch.nn.Module) -> bool:
    """`torch.compile` runs the module."""
    if module._compiled_call_impl is not None:
        return True
    dynamo = sys.modules.get("torch._dynamo.eval_frame")
    return dynamo is not None and isinstance(module, dynamo.OptimizedModule)


def is_data_worker() -> bool:
    """This process loads data for a `DataLoader` of another one."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker._worker_info is not None


def is_in_backward() -> bool:
    """Autograd is running backward on this thread."""
    return int(_C._current_graph_task_id()) != -1


def is_distributed() -> bool:
    """This process is one of several ranks."""
    distributed = torch.distributed
    return bool(distributed.is_available() and distributed.is_initialized())


def finish_gpu() -> None:
    """Wait for the GPUs, if this process uses one."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def is_tracing() -> bool:
    """A compiler, TorchScript, `torch.func` or a mode that is no `mode` of torpor's looks on."""
    return bool(
        torch.compiler.is_compiling() or _C._get_tracing_state() is not None or is_transforming()
    )


def modes() -> list[Any]:
    """The dispatch modes that are active, outermost first."""
    return list(_get_current_dispatch_mode_stack())


def users_besides(tensors: list[torch.Tensor]) -> bool:
    """Others than these plain tensors, all on one memory, are on it too."""
    users, holders = _users_and_holders(tensors[0])
    most_users, most_holders = _users_of_one()
    return users > most_users + len(tensors) - 1 or holders > most_holders


def register_step_hook(hook: Callable[..., None]) -> Any:
    """Call `hook(optimizer, args, kwargs)` after every `optimizer.step()` in the process."""
    return register_optimizer_step_post_hook(hook)


def register_step_pre_hook(hook: Callable[..., None]) -> Any:
    """Call `hook(optimizer, args, kwargs)` before every `optimizer.step()` in the process."""
    return register_optimizer_step_pre_hook(hook)


def wrap_module_call(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Replace `nn.Module.__call__` by what `around` makes of it."""
    torch.nn.Module.__call__ = around(torch.nn.Module.__call__)  # type: ignore[method-assign]  # the purpose


_CALL_NAMES = (
    "torch", "_C", "_get_tracing_state", "_slow_forward", "forward", "_backward_hooks",
    "_backward_pre_hooks", "_forward_hooks", "_forward_pre_hooks", "_global_backward_pre_hooks",
    "_global_backward_hooks", "_global_forward_hooks", "_global_forward_pre_hooks",
)  # fmt: skip
"""All that `nn.Module._call_impl` looks at before it calls `forward` of a module without hooks."""


class ModuleCall(NamedTuple):
    """`nn.Module.__call__`, and what decides that a call comes to a call of `forward`."""

    function: Any
    calls: Any  # `inside` another one, or not
    implementation: Any  # a class may have one of its own
    names: dict[str, Any]  # globals of torch, and among them ...
    hooks: tuple[str, ...]  # ... the hooks of all modules
    is_known: bool  # torch looks at nothing else


def wrap_outermost_call(
    around: Callable[[Callable[..., Any]], Callable[..., Any]], calls: Any
) -> ModuleCall:
    """Let `nn.Module.__call__` be what `around` makes of it while `calls.inside` is false.

    A call inside another one does what torch does; a module without hooks, as most are, has its
    `forward` called with nothing in between.
    """
    module: Any = torch.nn.Module  # its methods are replaced and compared
    names: Any = sys.modules[module.__module__]
    call, implementation = module.__call__, module._call_impl
    is_known = (
        call is module._wrapped_call_impl
        and implementation.__code__.co_names[: len(_CALL_NAMES)] == _CALL_NAMES
    )
    outermost = around(call)
    is_compiling = torch.compiler.is_dynamo_compiling  # Dynamo knows the answer when it traces this
    is_traced = _C._get_tracing_state

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
    """`nn.Module.__getattr__`, and where it looks for a name, in order; None if it does more."""
    function: Any = torch.nn.Module.__getattr__
    code = function.__code__
    tables = ("_parameters", "_buffers", "_modules")
    texts = tuple(constant for constant in code.co_consts if type(constant) is str)
    known = ("__dict__", "AttributeError", "type", "__name__")
    return (function, tables) if code.co_names == known and texts[:3] == tables else None


_SAME_BITS = ("adadelta", "adagrad", "adam", "adamax", "rmsprop", "rprop", "sgd")
"""Optimizers whose foreach form computes the very bits of their loop over parameters."""


def prefer_foreach(tensor_type: type[torch.Tensor]) -> None:
    """Let optimizers choose their foreach form for tensors of `tensor_type`: far fewer ops.

    On the device `lazy` they have their fused form too, where it is asked for.
    """
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
    fused = optimizer._get_fused_kernels_supported_devices
    optimizer._get_fused_kernels_supported_devices = lambda: [*fused(), "lazy"]


def register_device_module(name: str, module: Any) -> None:
    """Make `module` the namespace `torch.<name>` of a device."""
    if not hasattr(torch, name):
        torch._register_device_module(name, module)


def attention_switches() -> tuple[Any, ...]:
    """The process-wide switches that decide which attention kernel is chosen."""
    return (
        _C._get_flash_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_overrideable_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
        tuple(_C._get_sdp_priority_order()),
        _C._get_deterministic_algorithms(),
        _C._get_deterministic_algorithms_warn_only(),
    )


def attention_choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    p: float,
    causal: bool,
    scale: float | None,
) -> int:
    """The number of the attention kernel torch chooses for plain tensors like these."""
    with without_torch_function():
        return int(torch._fused_sdp_choice(query, key, value, None, p, causal, scale=scale))


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


def is_differentiating_forward() -> bool:
    """Forward-mode differentiation or a function transform is at work on this thread."""
    return _level() or is_transforming()


def is_transforming() -> bool:
    """A function transform (`torch.func`) is at work."""
    return bool(_C._are_functorch_transforms_active())


def kernel(op: OpOverload, key: str) -> Callable[..., Any]:
    """The kernel that `op` has for a dispatch key now; called with the keys it is called with."""
    found: Callable[..., Any] = torch.library.get_kernel(op, key).call_boxed
    return found


def kernel_object(kernel: Callable[..., Any]) -> Any:
    """The object of torch that a function of `kernel` calls."""
    return kernel.__self__  # type: ignore[attr-defined]  # a bound method


def on_default_dtype(finish: Callable[[], None], changed: Callable[[], None]) -> None:
    """Call `finish` before the default dtype changes, `changed` after it has.

    It decides result types unseen, when an op is recorded and again when it is computed.
    """

    def watch(name: str) -> None:
        original = getattr(torch, name)

        @functools.wraps(original)
        def set_default(value: Any) -> None:
            before = torch.get_default_dtype()
            if value is not before:
                finish()
            original(value)
            if torch.get_default_dtype() is not before:
                changed()

        setattr(torch, name, set_default)

    watch("set_default_dtype")
    watch("set_default_tensor_type")


def accept_lazy_losses(
    physical: Callable[[torch.device], torch.device], prepare: Callable[[OpOverload], None]
) -> None:
    """Let `linear_cross_entropy` choose on the device `lazy` what it chooses on the physical one.

    `prepare` is called with the op behind it before its first use.
    """
    name = "torch.nn.modules.linear_cross_entropy"
    if importlib.util.find_spec(f"{name}_options") is None:  # torch 2.11 does not have it
        return
    options = importlib.import_module(f"{name}_options").LinearCrossEntropyOptions
    original = options._adjust

    @functools.cache
    def first_use() -> None:
        importlib.import_module(name)
        prepare(torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default)

    @functools.wraps(original)
    def adjust(self: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        first_use()
        if device is not None and device.type == "lazy":
            device = physical(device)
        return original(self, *args, device=device, **kwargs)

    options._adjust = adjust


def memory_of(tensor: torch.Tensor) -> int:
    """What names the memory of a plain tensor while it lives; see `users_of`."""
    return int(tensor.untyped_storage()._cdata)


users_of: Callable[[int], int] = _C._storage_Use_Count
"""How many tensors and storage objects are on a memory."""


def untyped(storage: Any) -> Any:
    """The untyped form of a storage object, without torch's warning about typed ones."""
    return getattr(storage, "_untyped_storage", storage)


def weak_memories(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """What names the memories of tensors, `cdata` of each: no other gets that name meanwhile."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def _users_and_holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many are on the memory of a tensor, and how many hold the one Python object for it."""
    storage = tensor.untyped_storage()
    return users_of(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _users_of_one() -> tuple[int, int]:
    return _users_and_holders(torch.empty(1))


def shares_memory(tensor: torch.Tensor) -> bool:
    """Another tensor or a storage object is on the memory of a plain tensor."""
    users, holders = _users_and_holders(tensor)
    most_users, most_holders = _users_of_one()
    return users > most_users or holders > most_holders


class _Generators(threading.local):
    """What becomes of states that compilers set on this thread."""

    by_copies = False
    ignored = False


_generators = _Generators()


@contextmanager
def set_cuda_states_by_copies() -> Iterator[None]:
    """On this thread `torch.cuda.set_rng_state` gives the generator a new state to draw from.

    It has the numbers asked for; to set the numbers of the old state, as Inductor does after each
    compile, would start the dropout of cuDNN's recurrent networks anew.
    """
    _watch_states()
    before, _generators.by_copies = _generators.by_copies, True
    try:
        yield
    finally:
        _generators.by_copies = before


@contextmanager
def leave_states_alone() -> Iterator[None]:
    """On this thread no generator gets a state: others draw meanwhile, and would draw that again.

    Inductor sets after each compile what it found before it.
    """
    _watch_states()
    before, _generators.ignored = _generators.ignored, True
    try:
        yield
    finally:
        _generators.ignored = before


@functools.cache
def _watch_states() -> None:
    original, original_of_cuda = torch.random.set_rng_state, torch.cuda.set_rng_state

    @functools.wraps(original)
    def set_rng_state(new_state: torch.Tensor) -> None:
        if not _generators.ignored:
            original(new_state)

    @functools.wraps(original_of_cuda)
    def set_rng_state_of_cuda(new_state: torch.Tensor, device: Any = "cuda") -> None:
        if _generators.ignored:
            return
        if not _generators.by_copies:
            original_of_cuda(new_state, device)
            return
        where = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        index = torch.cuda.current_device() if where.index is None else where.index
        generator = torch.cuda.default_generators[index]
        state = generator.clone_state()
        state.set_state(new_state)
        generator.graphsafe_set_state(state)

    torch.random.set_rng_state = set_rng_state
    torch.cuda.set_rng_state = set_rng_state_of_cuda


def accept_lazy_states(plain: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Let the states of generators be set to what `plain` makes of a tensor: they read memory."""
    places: list[Any] = [torch.random, torch, torch.cuda.random, torch.cuda]
    for place in places:
        place.set_rng_state = _with_plain_state(place.set_rng_state, plain)


def _with_plain_state(original: Any, plain: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    @functools.wraps(original)
    def set_rng_state(new_state: torch.Tensor, *args: Any, **kwargs: Any) -> None:
        with without_modes():
            original(plain(new_state), *args, **kwargs)

    return set_rng_state


class _Bytes:
    """Memory of a GPU, and what keeps it from being unmapped."""

    def __init__(self, address: int, size: int, keep: object) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


def window_on(tensor: torch.Tensor, keep: object) -> torch.Tensor:
    """A tensor on the memory of another, which it does not own; `keep` lives as long as it does."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    if tensor.is_cuda:
        memory = _Bytes(storage.data_ptr(), storage.nbytes(), keep)
        whole = torch.as_tensor(memory, device=tensor.device)
    else:
        array = type("Bytes", (ctypes.c_char * storage.nbytes(),), {})
        buffer = array.from_address(storage.data_ptr())  # type: ignore[attr-defined]  # of ctypes
        buffer.keep = keep
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return made.set_(whole.untyped_storage(), *place)


copy_each: Callable[[list[torch.Tensor], list[torch.Tensor]], None] = torch._foreach_copy_
"""Copies the tensors of a second list over those of a first, with as few kernels as may be."""


def cuda_stream(device: int) -> int:
    """The address of the stream on which this thread's kernels run; no object is made for it."""
    stream: int = _C._cuda_getCurrentRawStream(device)  # in builds for CUDA
    return stream


def end_allocating_to_pool(device: int, pool: Any) -> None:
    """Let tensors of `device` be allocated as ever, after a capture of a CUDA graph that broke."""
    _C._cuda_endAllocateToPool(device, pool)
    _C._cuda_releasePool(device, pool)


def forget_cublas_workspaces() -> None:
    """Free what cuBLAS keeps for each stream, part of which lies in the memory of CUDA graphs."""
    if torch.cuda.is_initialized():
        _C._cuda_clearCublasWorkspaces()


_SCRIPT_INTS: Any = _C.ListType(_C.IntType.get())
_SCRIPT_TENSORS: Any = _C.ListType(_C.TensorType.get())
_SCRIPT_LAYOUTS: Any = _C.ListType(_SCRIPT_INTS)

SCRIPT_TYPES: dict[str, Any] = {
    "Tensor": _C.TensorType.get(),
    "Tensor[]": _SCRIPT_TENSORS,
    "int": _C.IntType.get(),
    "int[]": _SCRIPT_INTS,
    "int[][]": _SCRIPT_LAYOUTS,
    "(Tensor[], int[][], int[])": _C.TupleType([_SCRIPT_TENSORS, _SCRIPT_LAYOUTS, _SCRIPT_INTS]),
}
"""Types of values in a TorchScript graph; others are taken from the schemas of ops."""

SCRIPT_MEMORY_FORMATS: dict[torch.memory_format, int] = {
    torch.contiguous_format: 0,
    torch.preserve_format: 1,
    torch.channels_last: 2,
    torch.channels_last_3d: 3,
}
"""The numbers that stand for memory formats in a TorchScript graph."""


@functools.cache
def script_dtype(dtype: torch.dtype) -> int:
    """The number that stands for a dtype in a TorchScript graph."""
    graph = script_graph()  # its nodes live as long as it does
    return int(graph.insertConstant(dtype).node().i("value"))


def script_graph() -> Any:
    """An empty TorchScript graph."""
    return _C.Graph()


def script_function(name: str, graph: Any) -> Callable[..., Any]:
    """A TorchScript graph with an executor of its own, to be called with its inputs."""
    return _C._create_function_from_graph(name, graph)


@contextmanager
def script_as_drawn() -> Iterator[None]:
    """Lets TorchScript run graphs on this thread as they are drawn: nothing fused or dropped."""
    before = _C._get_graph_executor_optimize()
    _C._set_graph_executor_optimize(False)
    try:
        yield
    finally:
        _C._set_graph_executor_optimize(before)


def source_of_op(name: str) -> str | None:
    """The Python file that defines the op `namespace::name`; None where C++ does."""
    from torch._library.custom_ops import OPDEFS

    told = OPDEFS.get(name)
    if told is not None:
        return str(told._init_fn.__code__.co_filename)
    found = re.search(r"^debug: registered at (.+\.py):\d+", _C._dispatch_dump(name), re.MULTILINE)
    return None if found is None else found[1]


def op_table() -> list[Any]:
    """torch's own table of operators with sample inputs; needs numpy and expecttest."""
    module = importlib.import_module("torch.testing._internal.common_methods_invocations")
    return list(module.op_db)


# -- compilers of fx graphs ------------------------------------------------------------------------


def fakes_by_decomposition(op: Any) -> bool:
    """Fake tensors take `op` apart to find its result, though it has a kernel for meta tensors."""
    from torch._decomp import decomposition_table, meta_table

    if op not in decomposition_table or op in meta_table:
        return False
    return bool(_C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"))


def new_fake_mode() -> Any:
    """A fake-tensor mode of its own, for one trace; all sizes are numbers.

    It has a shape environment, without which Inductor does not keep what it compiles on disk.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=False, shape_env=sizes, static_shapes=True)


def last_traced_node() -> torch.fx.Node:
    """The node that `make_fx` added last to the graph it is tracing on this thread."""
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    assert mode is not None, "called while make_fx traces"
    graph = mode.tracer.graph
    return next(iter(reversed(graph.nodes)), graph._root)


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The ops that Inductor wants to be taken apart while tracing."""
    import torch._inductor.lowering  # noqa: F401  # some decompositions take it to be there
    from torch._inductor.decomposition import select_decomp_table

    return select_decomp_table()


def inductor_options() -> list[str]:
    """Every setting of Inductor, by its dotted name."""
    from torch._inductor import list_options

    return list(list_options())


def inductor_compile(
    module: torch.fx.GraphModule,
    inputs: list[torch.Tensor],
    mode: Any,
    options: dict[str, Any],
) -> Any:
    """Compile a functional graph of ATen ops on fake inputs; the result takes a list of tensors.

    `mode` is the inputs' fake-tensor mode. Results have the strides of the graph's own.
    """
    from torch._inductor import config as settings
    from torch._inductor.compile_fx import _recursive_joint_graph_passes, compile_fx_inner
    from torch._inductor.utils import BoxedBool
    from torch._inductor.virtualized import V

    _mend_local_buffers()
    with settings.patch(options), tracing_with(mode), torch.no_grad():
        with mode, V.set_fake_mode(mode):
            module = _recursive_joint_graph_passes(module) or module
        (output,) = (node for node in module.graph.nodes if node.op == "output")
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))
        return compile_fx_inner(
            module,
            inputs,
            cudagraphs=BoxedBool(False),
            is_inference=True,
        )


@functools.cache
def _mend_local_buffers() -> None:
    """Let Inductor fuse loops over rows through a buffer of one row where rows come one by one.

    Its C++ goes over sixteen rows at once as well: each writes over the one before it (torch 2.11
    to 2.13). Such loops are then compiled without the buffer, as others are that do not match.
    """
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    fused: Any = cpp.OuterLoopFusedSchedulerNode
    may_fuse = fused.check_outer_fusion_loop_level_attr

    @functools.wraps(may_fuse)
    def check(self: Any, kernels: Any, depth: int) -> bool:
        if getattr(V.local_buffer_context, "local_buffers", None):
            loops = [loop for kernel in kernels for loop in kernel.loop_nest.loops[:depth]]
            if any(loop.steps != 1 for loop in loops):
                return False
        return bool(may_fuse(self, kernels, depth))

    fused.check_outer_fusion_loop_level_attr = check


def inductor_prefers_channels_last(module: torch.fx.GraphModule) -> bool:
    """Whether Inductor would rather have the channels of pictures side by side.

    It says so of graphs with convolutions; their derivatives alone take things as they come.
    """
    op = torch.ops.aten.convolution.default
    if not module.graph.find_nodes(op="call_function", target=op):
        return False
    from torch._inductor.graph import GraphLowering

    return bool(GraphLowering.decide_layout_opt(module, is_inference=False))


def inductor_settings() -> str | None:
    """Every setting of Inductor that changes what it makes; None if some cannot be told in text."""
    from torch._inductor import config as settings

    changes: Any = settings  # a module whose methods are made at run time
    return _inductor_settings(changes.get_hash())


@functools.lru_cache(maxsize=16)
def _inductor_settings(hashed: bytes) -> str | None:
    from torch._inductor import config as settings

    changes: Any = settings
    if any(getattr(settings, name, None) for name in _CUSTOM_PASSES):
        return None
    text = repr(sorted(changes.save_config_portable(ignore_private_configs=False).items()))
    return None if " at 0x" in text else text


_CUSTOM_PASSES = (
    "post_grad_custom_pre_pass", "post_grad_custom_post_pass", "joint_custom_pre_pass",
    "joint_custom_post_pass", "pre_grad_custom_pass", "_pre_fusion_custom_pass",
    "_post_fusion_custom_pass", "custom_partitioner_fn",
)  # fmt: skip


_BEYOND_SOURCE = (
    # what code may need beside its source and its constants
    "inputs_to_check", "torchbind_constants", "opaque_value_type_classes", "frozen_param_names",
    "_wrap_compiled_regions",
)  # fmt: skip


def inductor_module(code: Any) -> tuple[str, dict[str, Any], dict[str, torch.Tensor]] | None:
    """The Python source that Inductor made, the names in it once it has run, and its constants.

    None if that is not all `code` needs: it is for a GPU, or it is not Inductor's.
    """
    from torch._inductor.codecache import PyCodeCache
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(code, CompiledFxGraph):
        return None
    on_gpu = not set(code.device_types) <= {"cpu", "meta"}
    if on_gpu or any(getattr(code, name, None) for name in _BEYOND_SOURCE):
        return None
    for module in reversed(PyCodeCache.modules):
        if getattr(module, "key", None) == code.cache_key:
            return code.source_code, vars(module), dict(code.constants or {})
    return None


def inductor_pickle(code: Any) -> bytes | None:
    """What `inductor_compile` returned as Inductor's own cache keeps it; None if it cannot."""
    from torch._inductor.output_code import CompiledFxGraph

    if not isinstance(code, CompiledFxGraph):
        return None
    kept = copy.copy(code)
    kept.prepare_for_serialization()
    return pickle.dumps(kept)


def inductor_unpickle(data: bytes, inputs: list[torch.Tensor], mode: Any) -> Any:
    """The code that `inductor_pickle` was given; `data` are run: they have to be trusted.

    `inputs` are fake tensors of `mode` like those it was compiled for.
    """
    from torch._inductor.codecache import FxGraphCache
    from torch._inductor.output_code import CompiledFxGraphConstants
    from torch._inductor.utils import BoxedBool

    constants = CompiledFxGraphConstants()
    code, _ = FxGraphCache.cache_hit_post_compile(pickle.loads(data), {}, constants)
    if code is None:
        raise RuntimeError("Inductor could not restore the code")
    options: Any = {**code.fx_kwargs, "cudagraphs": BoxedBool(False), "is_backward": False}
    with tracing_with(mode), torch.no_grad():
        code.post_compile(inputs, constants, options)
    return code


_loads = itertools.count()


def load_kernel(name: str, path: str) -> Any:
    """The module `name` in a shared library that Inductor made of C++.

    It is loaded under a name of its own: Inductor takes for its own what it finds under that name.
    """
    pointer = _C._dynamo.guards._torchinductor_pyobject_tensor_data_ptr  # type: ignore[attr-defined]  # not in the stubs
    os.environ["_TORCHINDUCTOR_PYOBJECT_TENSOR_DATA_PTR"] = str(pointer)
    own = f"torpor_kernel_{next(_loads)}.{name.rpartition('.')[2]}"
    spec = importlib.util.spec_from_file_location(own, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no shared library")
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.modules.pop(own, None)
    return module


_in_background = threading.local()


@contextmanager
def kernels_in_background() -> Iterator[Callable[[], None]]:
    """Inductor goes on while kernels are compiled; the function that is given waits for all.

    What Inductor compiles on this thread meanwhile must not run before. A kernel that cannot be
    compiled is an error of that function.
    """
    wait = _patched_wait()
    waiting: list[tuple[Any, dict[str, Any]]] = []

    def finish() -> None:
        for compiler, names in waiting:
            wait(compiler, names)

    _in_background.kernels = waiting
    try:
        yield finish
    finally:
        _in_background.kernels = None


@functools.cache
def start_inductor_workers() -> None:
    """Start the processes that compile kernels for GPUs; until they run, kernels wait for another.

    It does not wait for them.
    """
    from torch._inductor.async_compile import AsyncCompile

    workers: Any = AsyncCompile
    workers.use_process_pool()


def forget_inductor_threads() -> None:
    """After a fork: let Inductor make the threads anew that call the C++ compiler.

    It does so for its processes alone, and would wait for threads that the child does not have.
    """
    module = sys.modules.get("torch._inductor.async_compile")
    if module is not None:
        module.AsyncCompile.pool.cache_clear()


@functools.cache
def _patched_wait() -> Callable[[Any, dict[str, Any]], None]:
    """Let Inductor ask whether to wait for kernels; how it waits."""
    from torch._inductor.async_compile import AsyncCompile

    compiler: Any = AsyncCompile  # there is no setting for it
    wait: Callable[[Any, dict[str, Any]], None] = compiler.wait

    def wait_now_or_later(self: Any, scope: dict[str, Any]) -> None:
        waiting = getattr(_in_background, "kernels", None)
        if waiting is None:
            wait(self, scope)
        else:
            waiting.append((self, scope))

    compiler.wait = wait_now_or_later
    return wait


def best_vectors_work() -> bool:
    """The C++ compiler can use the widest vectors of this processor: no others need be tried.

    Inductor would try all of them, one after the other, and then take the widest.
    """
    return try_best_vectors().result()


@functools.cache
def try_best_vectors() -> Future[bool]:
    """Find out in the background."""
    from torch._inductor import codecache, cpp_builder, cpu_vec_isa  # noqa: F401  # are all used

    has = cpu_vec_isa.x86_isa_checker()
    fitting = (i for i in cpu_vec_isa.supported_vec_isa_list if set(str(i).split()) <= {*has})
    widest = next(fitting, False)
    if "ATEN_CPU_CAPABILITY" in os.environ:  # others were chosen
        widest = False
    thread = ThreadPoolExecutor(1)
    try:
        return thread.submit(bool, widest)
    finally:
        thread.shutdown(wait=False)


def tracing_with(mode: Any) -> AbstractContextManager[Any]:
    """Tells compilers which fake-tensor mode the inputs of a graph are from."""
    from torch._guards import TracingContext, tracing

    return tracing(TracingContext(mode))


_REFUSED_OP = re.compile(r"^\s*target: ([\w.]+)", re.MULTILINE)


def ops_inductor_refused(error: BaseException) -> set[str]:
    """The ATen ops that Inductor could not lower, read off its error."""
    return set(_REFUSED_OP.findall(str(error)))


def dynamo_backends() -> list[str]:
    """The names of all of TorchDynamo's backends, those for debugging included."""
    from torch._dynamo.backends.registry import list_backends

    return [name for name in list_backends(exclude_tags=()) if name != "torpor"]


def dynamo_compiler(name: str) -> Callable[..., Any]:
    """The function behind a name of TorchDynamo's backends."""
    from torch._dynamo.backends.registry import lookup_backend

    return lookup_backend(name)


def dynamo_training_backend(
    compile_graph: Callable[[torch.fx.GraphModule, int, bool], Callable[..., Any]],
    decompositions: dict[Any, Callable[..., Any]] | None = None,
) -> Callable[..., Any]:
    """A TorchDynamo backend that compiles forward and backward graphs with `compile_graph`.

    The graphs are functional graphs of ATen ops, but for inputs that are written to in the end, by
    `copy_`; a compiled one takes its inputs as one list. What is cheap, such as a view of a weight,
    is computed again in backward rather than kept for it.
    `compile_graph` is also told how many results are for the user: those after them are kept for
    backward, and may have any strides; and whether it is a forward graph, whose results lie in one
    memory where they do in the graph. Gradients never do: autograd may add to one in place.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    def compile_boxed(
        module: torch.fx.GraphModule, shown: int, is_forward: bool
    ) -> Callable[..., Any]:
        compiled = compile_graph(module, shown, is_forward)

        def run(args: list[Any]) -> Any:
            return compiled(args)

        run._boxed_call = True  # type: ignore[attr-defined]  # how AOTAutograd tells
        return run

    def forward(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        context = torch._guards.TracingContext.try_get()
        about = None if context is None else context.fw_metadata
        returned = len(module.graph.output_node().args[0])  # type: ignore[arg-type]  # a tuple
        shown = returned if about is None else about.num_forward_returns
        return compile_boxed(module, shown, True)

    def backward(module: torch.fx.GraphModule, inputs: list[Any]) -> Callable[..., Any]:
        return compile_boxed(module, len(module.graph.output_node().args[0]), False)  # type: ignore[arg-type]  # a tuple

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        keep_inference_input_mutations=True,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=decompositions,
    )


current_autograd_node: Callable[[], Any] = _C._current_autograd_node
"""The node of the backward pass that is being run by this thread; None outside of one."""

next_sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""The number that autograd will give to the next node of this thread."""


def is_profiler_on() -> bool:
    """Some thread is being profiled by `torch.profiler`."""
    return profiler._is_profiler_enabled


is_profiler_on_this_thread: Callable[[], bool] = _C._autograd._profiler_enabled
"""This thread is profiled, and by a profiler that sees no other thread."""

profiler_span: Callable[[str], AbstractContextManager[Any]] = _C._profiler._RecordFunctionFast
"""Shows its body under a name on the timeline of `torch.profiler`."""


def dynamo_graphs() -> int:
    """How many graphs TorchDynamo has compiled in this process."""
    from torch._dynamo.utils import counters

    return int(counters["stats"]["unique_graphs"])


def torch_lazy_system() -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], int]]:
    """Starts PyTorch's own lazy tensors, where torpor is not: cut, wait, and compiles so far."""
    import torch._lazy.metrics
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()

    def compiles() -> int:
        return int(torch._lazy.metrics.counter_value("UncachedCompile") or 0)

    return torch._lazy.mark_step, torch._lazy.wait_device_ops, compiles


@functools.lru_cache(maxsize=4096)
def _wrapped_number(text: str, number: Any) -> torch.Tensor:
    with without_modes(), torch.inference_mode(False), above_autograd(), torch.enable_grad():
        product = torch.ones((), requires_grad=True, device="cpu") * number
        kept: torch.Tensor = getattr(product.grad_fn, "_saved_other")  # noqa: B009  # unknown to types
        return kept


def wrapped_number(number: Any) -> torch.Tensor:
    """The tensor that stands for a Python number among the arguments of an op; do not write to it.

    It gives way in type promotion, as the number does: no `torch.tensor(number)` is like it. Torch
    shows it nowhere but in what autograd keeps of a product.
    """
    return _wrapped_number(repr(number), number)


def is_size(type_: Any) -> bool:
    """The type of an argument of a schema is `SymInt`, or a list of them."""
    real: Any = type_
    while hasattr(real, "getElementType"):
        real = real.getElementType()
    return str(real.kind()) == "SymIntType"


class OpenSizes:
    """Fake tensors whose sizes are torch's own symbols, and what torch assumed about these."""

    def __init__(self, hints: dict[str, int]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch._subclasses.fake_tensor import FakeTensorMode
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv

        self.environment = ShapeEnv(
            allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False, duck_shape=False
        )
        self.mode = FakeTensorMode(allow_non_fake_inputs=False, shape_env=self.environment)
        self.sizes: dict[str, Any] = {}
        self._names: dict[Any, str] = {}
        for name, hint in hints.items():
            source = ConstantSource(name)
            symbol = self.environment.create_symbol(hint, source, dynamic_dim=DimDynamic.DYNAMIC)
            self._names[symbol] = name
            self.sizes[name] = self.environment.create_symintnode(symbol, hint=hint, source=source)

    @contextmanager
    def tracing(self) -> Iterator[None]:
        """Runs the body on fake tensors, below autograd; kernels that know symbols go first."""
        from torch._dispatch.python import enable_python_dispatcher

        quietly = (without_torch_function(), torch.no_grad(), quiet_fakes())
        with quietly[0], quietly[1], quietly[2], enable_python_dispatcher(), self.mode:
            yield

    def tensor(self, type_: Any, device: torch.device) -> torch.Tensor:
        """A fake tensor of that type, whose sizes may be symbols."""
        if type(type_.offset) is int and type_.offset == 0:
            made = torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=device)
        else:
            base = torch.empty((type_.offset + type_.span,), dtype=type_.dtype, device=device)
            made = base.as_strided(type_.shape, type_.stride, type_.offset)
        if type_.conj:
            made = made.conj()
        return made._neg_view() if type_.neg else made

    def formula(self, number: Any) -> Any:
        """What a number is made of: an int, or a sum of products of names and of other formulas.

        A formula is `(terms, divisor)`, a term `(number, factors)`; the sum is divided and rounded
        down. None if the number is no such thing.
        """
        if type(number) is not torch.SymInt:
            return number
        return _formula(self._without_choices(number.node.expr), self._names)

    def _without_choices(self, expression: Any) -> Any:
        """The least or greatest in the place of `Min` and `Max`: one more assumption."""
        from torch.utils._sympy.functions import Max, Min

        while choices := expression.atoms(Min, Max):
            choice = min(choices, key=lambda one: one.count_ops())  # innermost first
            found = choice.args[0]
            for other in choice.args[1:]:
                less = found <= other if isinstance(choice, Min) else found >= other
                found = found if self.environment.evaluate_expr(less) else other
            expression = expression.xreplace({choice: found})
        return expression

    def at(self, number: Any, values: dict[str, int]) -> int:
        """What a number is for these values of the names."""
        if type(number) is not torch.SymInt:
            return int(number)
        return int(number.node.expr.xreplace({s: values[n] for s, n in self._names.items()}))

    def conditions(self) -> list[str]:
        """What was assumed about sizes, as Python on their names."""
        import sympy  # type: ignore[import-untyped]  # has no types
        from torch.utils._sympy.printers import PythonPrinter

        renamed = {s: sympy.Symbol(n, integer=True, positive=True) for s, n in self._names.items()}
        texts = [
            PythonPrinter().doprint(guard.expr.xreplace(renamed))
            for guard in self.environment.guards
        ]
        return list(dict.fromkeys(texts))


_NUMBERS: Final[dict[type, type]] = {torch.SymInt: int, torch.SymFloat: float}


def fold_known_sizes(module: torch.fx.GraphModule) -> None:
    """Put numbers in the place of arithmetic on sizes that turned out to be constants.

    A trace may find out late that it is for one size only. What it wrote down before is arithmetic
    on constants then, at which Inductor fails: it takes all that is divided for whole numbers.
    """
    from torch.fx.node import map_arg

    known: dict[torch.fx.Node, int | float] = {}
    for node in module.graph.nodes:
        if node.all_input_nodes and not known.keys().isdisjoint(node.all_input_nodes):
            node.args, node.kwargs = map_arg((node.args, node.kwargs), lambda n: known.get(n, n))
        value = node.meta.get("val")
        if node.op == "call_function" and type(value) in _NUMBERS and _is_constant(value):
            known[node] = _NUMBERS[type(value)](value)
    for node in reversed(known):
        module.graph.erase_node(node)
    module.recompile()


def _is_constant(number: torch.SymInt | torch.SymFloat) -> bool:
    return not number.node.expr.free_symbols


def _formula(expression: Any, names: dict[Any, str]) -> Any:
    import sympy

    terms = []
    for term in sympy.Add.make_args(sympy.expand(expression, deep=False)):
        factor, others = 1, []
        for part in sympy.Mul.make_args(term):
            base, power = part.as_base_exp()
            if part.is_Integer:
                factor *= int(part)
                continue
            one = names.get(base) if base.is_Symbol else _rounded_down(base, names)
            if one is None or not power.is_Integer or power < 1:
                return None
            others += [one] * int(power)
        terms.append((factor, tuple(others)))
    return tuple(terms), 1


def _rounded_down(expression: Any, names: dict[Any, str]) -> Any:
    from torch.utils._sympy.functions import FloorDiv

    if not isinstance(expression, FloorDiv) or not expression.args[1].is_Integer:
        return None
    inside, divisor = _formula(expression.args[0], names), int(expression.args[1])
    return None if inside is None or divisor < 1 else (inside[0], divisor)


# -- parts of torch that meet lazy tensors without an op -------------------------------------------


class _Imports:
    """Calls functions with modules right after they are imported; a finder of Python's."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Callable[[Any], None]]] = {}

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """The spec that the other finders have for `name`, if somebody waits for it."""
        if name not in self.hooks:
            return None
        others = (f for f in sys.meta_path if f is not self)
        spec = next(filter(None, (f.find_spec(name, path, target) for f in others)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.hooks.pop(name))  # type: ignore[assignment]  # used like one
        return spec


class _Loader:
    """A loader of Python's that calls functions with what it has loaded."""

    def __init__(self, loader: Any, hooks: list[Callable[[Any], None]]) -> None:
        self.loader = loader
        self.hooks = hooks

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def exec_module(self, module: Any) -> None:
        """Run the module, then the functions."""
        module.__loader__ = module.__spec__.loader = self.loader
        self.loader.exec_module(module)
        for hook in self.hooks:
            hook(module)


_imports = _Imports()


def after_import(name: str, hook: Callable[[Any], None]) -> None:
    """Call `hook` with a module of torch's: now, or when somebody imports it."""
    if name in sys.modules:
        hook(sys.modules[name])
        return
    _imports.hooks.setdefault(name, []).append(hook)
    if _imports not in sys.meta_path:
        sys.meta_path.insert(0, _imports)


def replace_function(name: str, around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let the function `module.function` of torch's be what `around` makes of it.

    It is replaced wherever torch shows it under that name; nothing happens if torch has none.
    """
    module_name, _, attribute = name.rpartition(".")

    def replace(module: Any) -> None:
        original = getattr(module, attribute, None)
        if original is None:
            return
        made = around(original)
        for key, other in list(sys.modules.items()):
            shown = vars(other).get(attribute)
            shown = getattr(shown, "_torchdynamo_orig_callable", shown)  # kept from TorchDynamo
            if _is_torchs(key) and shown is original:
                setattr(other, attribute, made)

    after_import(module_name, replace)


def _is_torchs(module: str) -> bool:
    return module == "torch" or module.startswith("torch.")


class MetLazy(BaseException):
    """TorchDynamo has met a lazy tensor; `source` is the expression that leads to it.

    No `Exception`: TorchDynamo turns those into errors of its own.
    """

    def __init__(self, source: str) -> None:
        super().__init__(source)
        self.source = source


def on_dynamo_frame(
    meets_lazy: Callable[[Any], bool],
    is_lazy: Callable[[object], bool],
    remember: Callable[[Any, str], None],
) -> None:
    """Let a frame run uncompiled, with all it calls, where TorchDynamo would meet a lazy tensor.

    `meets_lazy` is asked before a frame is traced; what it does not find is found when TorchDynamo
    makes a variable of it, and `remember` is called with the frame and the way to the tensor. What
    was compiled for plain tensors stays.
    """

    def watch_frames(module: Any) -> None:
        wrapper = module.CatchErrorsWrapper
        convert = wrapper.__call__

        @functools.wraps(convert)
        def __call__(self: Any, frame: Any, *args: Any, **kwargs: Any) -> Any:
            if meets_lazy(frame):
                return _uncompiled()
            try:
                return convert(self, frame, *args, **kwargs)
            except MetLazy as met:
                remember(frame, met.source)
                return _uncompiled()

        wrapper.__call__ = __call__

    def watch_variables(module: Any) -> None:
        builder = module.VariableBuilder
        wrap = builder.wrap_tensor

        @functools.wraps(wrap)
        def wrap_tensor(self: Any, value: Any) -> Any:
            if is_lazy(value):
                name = getattr(self.source, "name", "")  # a method before it became a property
                raise MetLazy(str(name() if callable(name) else name))
            return wrap(self, value)

        builder.wrap_tensor = wrap_tensor

    after_import("torch._dynamo.convert_frame", watch_frames)
    after_import("torch._dynamo.variables.builder", watch_variables)


def _uncompiled() -> Any:
    """What tells TorchDynamo to run one frame, and all it calls, as it is; others are compiled."""
    from torch._dynamo import types

    skip = types.FrameAction.SKIP
    strategy = types.FrameExecStrategy(skip, skip)
    count = getattr(_C._dynamo.eval_frame, "set_fullgraph_compiled_frame_count", None)
    if count is not None:
        count(-1)  # do not count: `fullgraph=True` is an error where no frame was compiled
    return types.ConvertFrameReturn(frame_exec_strategy=strategy, apply_to_code=False)


def make_fakes_with(type_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Let fake tensors be made of the tensor on `meta` that `type_of` gives for one, if any.

    The fake has the device of the tensor itself; whether it is a parameter is seen too.
    """

    def watch(module: Any) -> None:
        convert = module.FakeTensorConverter.from_real_tensor

        @functools.wraps(convert)
        def from_real_tensor(self: Any, mode: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
            stand_in = type_of(t)
            if stand_in is None:
                return convert(self, mode, t, *args, **kwargs)
            kwargs.pop("make_constant", None)  # there are no numbers to keep
            made = convert(self, mode, stand_in, False, *args[1:], **kwargs)
            made.fake_device = t.device
            return made

        module.FakeTensorConverter.from_real_tensor = from_real_tensor

    after_import("torch._subclasses.fake_tensor", watch)


def on_script_call(
    around: Callable[[Callable[..., Any]], Callable[..., Any]],
) -> None:
    """Let calls of TorchScript's functions and methods go through what `around` makes of them."""
    for kind in (_C.ScriptFunction, _C.ScriptMethod):
        kind.__call__ = around(kind.__call__)  # type: ignore[method-assign]  # the purpose
    call = _C.ScriptMethod.__call__

    def keep(module: Any) -> None:  # `torch.export` puts back what this module has found
        if hasattr(module, "_orig_scriptmethod_call"):
            module._orig_scriptmethod_call = call

    after_import("torch._higher_order_ops.torchbind", keep)


def script_owner(called: Any) -> Any:
    """The module that a method of TorchScript belongs to; None for a function."""
    return getattr(called, "owner", None)


_SCRIPT_WRITERS = (
    "save", "save_to_buffer", "_save_for_mobile", "_save_to_buffer_for_mobile",
)  # fmt: skip


def on_script_save(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let what writes modules of TorchScript to files be what `around` makes of it."""
    for name in _SCRIPT_WRITERS:
        writer = getattr(_C.ScriptModule, name, None)
        if writer is not None:
            setattr(_C.ScriptModule, name, around(writer))


def script_tensors(module: Any) -> Iterator[tuple[Any, str, torch.Tensor]]:
    """Parameters and buffers of a module of TorchScript and of those in it: owner, name, tensor."""
    tables: tuple[Any, ...] = (_C.ParameterDict, _C.BufferDict)
    for table in tables:
        for name, tensor in table(module).items():
            if tensor is not None:
                yield module, name, tensor
    for _, part in _C.ModuleDict(module).items():
        yield from script_tensors(part)


def script_has_constants(function: Any) -> bool:
    """There are tensors among the constants of a function of TorchScript; numbers do not count."""
    graph = function.inlined_graph  # its nodes live as long as it does
    constants = graph.findAllNodes("prim::Constant")
    tensors = (node for node in constants if node.output().type().kind() == "TensorType")
    return any(not node.hasAttribute("value") or node.t("value").dim() for node in tensors)


def on_script_move(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let how the tensors of a TorchScript module are converted be what `around` makes of it."""
    kind: Any = torch.jit.RecursiveScriptModule
    kind._apply = around(kind._apply)


def script_module(module: Any) -> Any:
    """The part in C++ of a module of TorchScript."""
    return module._c


def on_subclass(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let what makes a tensor of another class of a tensor be what `around` makes of it."""
    tensor: Any = torch.Tensor
    for name in ("_make_subclass", "__new__"):
        setattr(tensor, name, staticmethod(around(getattr(tensor, name))))
    as_subclass = around(lambda cls, tensor: original(tensor, cls))
    original = tensor.as_subclass
    tensor.as_subclass = functools.wraps(original)(lambda self, cls: as_subclass(cls, self))


def on_higher_order_op(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Let every call of a higher-order op go through what `around` makes of `dispatch(op, key)`."""
    kind: Any = torch._ops.HigherOrderOperator
    kind.dispatch = around(kind.dispatch)


def has_own_dispatch(kind: type[torch.Tensor]) -> bool:
    """Tensors of a class have a `__torch_dispatch__` that sees the ops on them."""
    return kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__
