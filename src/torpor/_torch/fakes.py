"""Fake tensors: the modes that make them, what they know of an op, and what they raise.

It reaches `torch._subclasses`, `torch._decomp`, and the fake kernels of `torch._library`.
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

from torpor._torch.import_hooks import after_import


@functools.cache
def fake_mode() -> Any:
    """The fake-tensor mode that infers types with no numbers."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    mode = FakeTensorMode(allow_non_fake_inputs=False)
    mode.cache_enabled = False  # torch's cache has no bound; `inference.infer` keeps one that has
    return mode


def new_fake_mode() -> Any:
    """A fake-tensor mode of its own, for one trace; all sizes are numbers.

    It has a shape environment, without which Inductor does not keep what it compiles on disk.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    sizes = ShapeEnv(allow_scalar_outputs=False, allow_dynamic_output_shape_ops=False)
    return FakeTensorMode(allow_non_fake_inputs=False, shape_env=sizes, static_shapes=True)


def tracing_with(mode: Any) -> AbstractContextManager[Any]:
    """Tells compilers which fake-tensor mode the inputs of a graph are from."""
    from torch._guards import TracingContext, tracing

    return tracing(TracingContext(mode))


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


def fakes_by_decomposition(op: Any) -> bool:
    """Fake tensors take `op` apart to find its result, though it has a kernel for meta tensors."""
    from torch._decomp import decomposition_table, meta_table

    if op not in decomposition_table or op in meta_table:
        return False
    return bool(_C._dispatch_has_kernel_for_dispatch_key(op.name(), "Meta"))


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
