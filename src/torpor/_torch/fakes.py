"""Fake tensors: the modes that make them, the ops they support, and what they raise.

Uses `torch._subclasses`, `torch._decomp`, and the fake kernels of `torch._library`.
"""

from __future__ import annotations

import functools
import importlib
import logging
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import _C
from torch._ops import OpOverload
from torch.utils._pytree import tree_leaves, tree_map_only

from torpor._torch.import_hooks import after_import


@functools.cache
def fake_mode() -> Any:
    """The fake-tensor mode for type inference without data."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=False)
    mode.cache_enabled = False  # torch's cache is unbounded; `inference.infer` has a bounded one
    return mode


def new_fake_mode() -> Any:
    """A new fake-tensor mode for one trace with static sizes.

    It has a shape environment, without which Inductor does not cache compiled code on disk.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=False, shape_env=sizes, static_shapes=True)


def tracing_with(mode: Any) -> AbstractContextManager[Any]:
    """Tell compilers which fake-tensor mode a graph's inputs belong to."""
    from torch._guards import TracingContext, tracing

    return tracing(TracingContext(mode))


@contextmanager
def quiet_fakes() -> Iterator[None]:
    """Suppress logs of fake tensors about unsupported ops, which are an expected outcome."""
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    before, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = before


def data_dependent_errors() -> tuple[type[BaseException], ...]:
    """The errors that fake tensors raise for an op whose result type depends on data."""
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    return (DataDependentOutputException, DynamicOutputShapeException)


def unsupported_errors() -> tuple[type[BaseException], ...]:
    """The errors that fake tensors raise for an unsupported op."""
    from torch._subclasses.fake_tensor import (
        UnsupportedFakeTensorException,
        UnsupportedOperatorException,
    )

    return (UnsupportedOperatorException, UnsupportedFakeTensorException, NotImplementedError)


def has_fake(op: OpOverload) -> bool:
    """Whether a library's op has a kernel for fake tensors."""
    from torch._library import custom_ops, simple_registry, utils

    made = custom_ops.OPDEFS.get(f"{op.namespace}::{op._opname}")
    if made is not None and made._opoverload is op:
        return made._abstract_fn is not None or utils.can_generate_trivial_fake_impl(op)
    if simple_registry.singleton.find(op.name()).fake_impl.kernel is not None:
        return True
    keys = ("Meta", "CompositeExplicitAutograd", "CompositeImplicitAutograd")
    return any(_C._dispatch_has_kernel_for_dispatch_key(op.name(), key) for key in keys)


def give_fake(op: OpOverload, fake: Callable[..., Any]) -> Callable[[], None]:
    """Register a fake kernel for a library's op without one; returns a function to remove it."""
    from torch._library import custom_ops

    made = custom_ops.OPDEFS.get(f"{op.namespace}::{op._opname}")
    if made is not None and made._opoverload is op:
        made._abstract_fn = fake
        return lambda: setattr(made, "_abstract_fn", None)
    library = torch.library.Library(op.namespace, "FRAGMENT")
    torch.library.register_fake(op, fake, lib=library, allow_override=True)
    return library._destroy


_MADE_OF_OTHERS = (
    "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional",
    "CompositeImplicitAutograd",
)  # fmt: skip


def type_source(op: OpOverload) -> str:
    """Where fake tensors get an op's result from: "meta" kernel, its "parts", or a "fake" rule.

    Empty if there is nothing.
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


def fakes_by_decomposition(op: Any) -> bool:
    """Whether fake tensors decompose `op` although it has a meta kernel."""
    from torch._decomp import decomposition_table, meta_table

    if op not in decomposition_table or op in meta_table:
        return False
    return bool(_C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"))


def make_fakes_with(type_of: Callable[[torch.Tensor], torch.Tensor | None]) -> None:
    """Make fake tensors from the meta tensor that `type_of` returns for a tensor, if any.

    The fake gets the device of the original tensor, and is a parameter if that is.
    """

    def watch(module: Any) -> None:
        convert = module.FakeTensorConverter.from_real_tensor

        @functools.wraps(convert)
        def from_real_tensor(self: Any, mode: Any, t: Any, *args: Any, **kwargs: Any) -> Any:
            stand_in = type_of(t)
            if stand_in is None:
                return convert(self, mode, t, *args, **kwargs)
            kwargs.pop("make_constant", None)  # there is no data to keep
            made = convert(self, mode, stand_in, False, *args[1:], **kwargs)
            made.fake_device = t.device
            return made

        module.FakeTensorConverter.from_real_tensor = from_real_tensor

    after_import("torch._subclasses.fake_tensor", watch)


def among_fakes(cls: type, func: OpOverload, args: tuple[Any, ...], kwargs: Any) -> Any:
    """An op on tensors of `cls` and fake ones, if those accept real tensors; or NotImplemented."""
    from torch._subclasses.fake_tensor import FakeTensor

    fakes = (leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, FakeTensor))
    mode = next((fake.fake_mode for fake in fakes), None)
    if mode is None or not mode.allow_non_fake_inputs:
        return NotImplemented
    with mode:
        args, kwargs = tree_map_only(cls, mode.from_tensor, (args, kwargs))
        return func(*args, **kwargs)


def make_fx_takes(cls: type) -> None:
    """Let `make_fx` treat tensors of `cls` as the plain ones they stand for.

    It would leave ops on constants of another class to that class, and their results out of its
    graph: numbers of the tracing run became constants.
    """

    def watch(module: Any) -> None:
        module.HANDLED_TYPES += (cls,)

    after_import("torch.fx.experimental.proxy_tensor", watch)
