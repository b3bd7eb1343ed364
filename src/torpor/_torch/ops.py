"""Ops: their schemas, their kernels per dispatch key, and the libraries that define them.

Uses `torch._ops`, `torch._library`, the dispatcher's kernel table, and pytrees of arguments.
"""

from __future__ import annotations

import functools
import importlib
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._ops import OpOverload as OpOverload
from torch._ops import OpOverloadPacket as OpOverloadPacket
from torch.utils import _pytree as pytree

tree_map = pytree.tree_map
tree_leaves = pytree.tree_leaves


def torch_decompositions() -> dict[str, Callable[..., Any]]:
    """Torch's decompositions by op name: of non-core ATen ops, and of `prims`."""
    from torch import _prims
    from torch._decomp import core_aten_decompositions, decomposition_table

    table = {
        str(op): function
        for op, function in decomposition_table.items()
        if isinstance(op, OpOverload) and torch.Tag.core not in op.tags
    }
    table.update({str(op): function for op, function in core_aten_decompositions().items()})
    for prim in vars(_prims).values():
        if isinstance(prim, OpOverload) and hasattr(prim, "impl_aten"):
            table[str(prim)] = prim.impl_aten
    return table


def set_op_attribute(op: OpOverload, name: str, value: Any) -> None:
    """Store an attribute on a torch op: on the hot path, one lookup without hashing."""
    setattr(op, name, value)


def drop_op_attribute(op: OpOverload, name: str) -> None:
    """Remove what `set_op_attribute` stored; no-op if there is nothing."""
    vars(op).pop(name, None)


_libraries: list[torch.library.Library] = []


@functools.cache
def define_ops(namespace: str, schemas: tuple[str, ...]) -> list[OpOverload]:
    """Define ops with these schemas and no kernels, in a namespace of ours, permanently."""
    library = torch.library.Library(namespace, "DEF")
    names = [library.define(schema) for schema in schemas]
    _libraries.append(library)
    packets = getattr(torch.ops, namespace)
    return [getattr(packets, name).default for name in names]


def parse_schema(text: str) -> Any:
    """Parse `text` as a schema; `RuntimeError` if it is invalid."""
    return _C.parse_schema(text)


def is_size(type_: Any) -> bool:
    """Whether a schema's argument type is `SymInt`, or a list of them."""
    real: Any = type_
    while hasattr(real, "getElementType"):
        real = real.getElementType()
    return str(real.kind()) == "SymIntType"


def custom_op_overload(op: Any) -> OpOverload | None:
    """The overload behind a function made by `torch.library.custom_op`; None for others."""
    overload = getattr(op, "_opoverload", None)
    return overload if isinstance(overload, OpOverload) else None


def ops_in(namespace: str) -> list[str]:
    """The names of all ops in a namespace: `acme::scale.overload`."""
    names = _C._dispatch_get_all_op_names()
    return sorted(name for name in names if name.startswith(f"{namespace}::"))


def is_taken_op_name(base: str, overload: str = "") -> bool:
    """Whether `torch.ops.<namespace>.<base>` or its `.<overload>` is an attribute, not an op."""
    empty = type(torch.ops.aten)("torpor_names")  # a namespace without ops
    if hasattr(empty, base):
        return True
    packet = torch.ops.aten.relu
    return hasattr(packet, overload) and overload not in packet.overloads() if overload else False


def source_of_op(name: str) -> str | None:
    """The Python file that defines the op `namespace::name`; None if it is defined in C++."""
    from torch._library.custom_ops import OPDEFS

    definition = OPDEFS.get(name)
    if definition is not None:
        return str(definition._init_fn.__code__.co_filename)
    found = re.search(r"^debug: registered at (.+\.py):\d+", _C._dispatch_dump(name), re.MULTILINE)
    return None if found is None else found[1]


def op_table() -> list[Any]:
    """torch's op_db: operators with sample inputs; needs numpy and expecttest."""
    module = importlib.import_module("torch.testing._internal.common_methods_invocations")
    return list(module.op_db)


def is_composite(op: OpOverload) -> bool:
    """Whether the op is decomposed above autograd, so that torch normally does not dispatch it."""
    return bool(_C._dispatch_has_kernel_for_dispatch_key(op.name(), "CompositeImplicitAutograd"))


def take_apart(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """Run a composite op decomposed as in eager; NotImplemented if it is not composite.

    `OpOverload.decompose` prefers decompositions for compilers, with other last bits and messages.
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
    """Ops that make a tensor from nothing and select their kernel by the `device` argument."""
    found = []
    for name in _FACTORIES:
        packet, _, overload = name.partition(".")
        op = getattr(getattr(torch.ops.aten, packet, None), overload or "default", None)
        if op is not None and not is_composite(op):
            found.append(op)
    return found


@functools.cache
def composite_ops_with_cpu_kernels() -> frozenset[OpOverload]:
    """Composite ops that have a CPU kernel of their own."""
    found = set()
    for name in ("silu_backward", "mish_backward", "native_channel_shuffle"):
        op = getattr(torch.ops.aten, name).default
        if is_composite(op) and _C._dispatch_has_kernel_for_dispatch_key(op.name(), "CPU"):
            found.add(op)
    return frozenset(found)


class Kernels:
    """Kernels for ops of torch under one dispatch key, registered and unregistered together."""

    def __init__(self, key: str, kernels: dict[OpOverload, Callable[..., Any]]) -> None:
        self._key = key
        self._kernels = kernels
        self._library: torch.library.Library | None = None

    def set(self, active: bool) -> None:
        """Register or unregister the kernels."""
        if active and self._library is None:
            self._library = torch.library.Library("aten", "IMPL")
            for op, kernel in self._kernels.items():
                self._library.impl(op, kernel, self._key)
        elif not active and self._library is not None:
            self._library._destroy()
            self._library = None


def kernel(op: OpOverload, key: str) -> Callable[..., Any]:
    """The current kernel of `op` for a dispatch key; takes the dispatch key set as well."""
    found: Callable[..., Any] = torch.library.get_kernel(op, key).call_boxed
    return found


def kernel_object(kernel: Callable[..., Any]) -> Any:
    """The torch object behind a function returned by `kernel`."""
    return kernel.__self__  # type: ignore[attr-defined]  # a bound method


def on_higher_order_op(around: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    """Wrap `dispatch(op, key)`, through which every call of a higher-order op goes."""
    kind: Any = torch._ops.HigherOrderOperator
    kind.dispatch = around(kind.dispatch)


def is_op(target: object) -> bool:
    """Whether `target` is an overload of an op."""
    return isinstance(target, OpOverload)
