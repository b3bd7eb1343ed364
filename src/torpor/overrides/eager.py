"""Runs single ops immediately: fallbacks, data-dependent ops, random ops."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch, metrics
from torpor.backend.registry import get_backend
from torpor.errors import annotate
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.types import TensorType
from torpor.observe.site import site
from torpor.ops.spec import OpSpec, ReturnKind
from torpor.overrides.draws import DRAWING
from torpor.overrides.resize import resize
from torpor.overrides.storage_ops import window
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import physical, write
from torpor.trace.wrap import (
    clone_plain,
    data_storage,
    is_traceable,
    plain,
    wrap_data,
    wrap_storage,
    wrap_window,
)

Read = Callable[[LazyTensor], torch.Tensor]


def run_eager(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on plain tensors, and make its results and writes lazy."""
    return _run(spec, spec.bind(args, kwargs), plain)


def run_random(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a random op immediately, so that its results and the generator's state equal eager's.

    An op that only overwrites its tensor, or uses only its size, does not wait for its data.
    """
    cell = metrics.op_cell(f"lazy::{spec.target._opname}")
    cell[0] += 1
    return _run(spec, spec.bind(args, kwargs), _reading(spec))


def _reading(spec: OpSpec) -> Read:
    """How an op that runs immediately gets its tensors: the data, if it depends on them."""
    if spec.takes_type_alone:
        return _blank
    if spec.tensors:
        count_sync(spec)
    return plain


def count_fallback(spec: OpSpec) -> None:
    """Count an op that had to run eagerly because its type could not be inferred."""
    metrics.count_line(f"{spec.target.namespace}::{spec.target._opname}", str(site()))
    metrics.count("Fallback")


def count_sync(spec: OpSpec) -> None:
    """Count an op that cannot be recorded because it needs data."""
    metrics.count_line(f"Sync::{spec.target._opname}", str(site()))


def try_on_zeros(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Run an op on zeros of its arguments' types, to raise what eager would raise."""
    reals = _Reals(spec, spec.bind(args, kwargs), _zeros)
    positional, keywords = spec.call_arguments(reals.arguments)
    with _torch.kernels():
        spec.target(*positional, **keywords)


def _zeros(tensor: LazyTensor) -> torch.Tensor:
    return _blank(tensor).zero_() if tensor.numel() else _blank(tensor)


def _blank(tensor: LazyTensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=physical(tensor.device)
    )


def _run(spec: OpSpec, bound: list[Any], read: Read) -> Any:
    device = _virtual_device(bound)
    reals = _Reals(spec, bound, read)
    if read is plain:
        sync.rest()
    positional, keywords = spec.call_arguments(reals.arguments)
    try:
        with DRAWING, _torch.kernels():
            result = spec.target(*positional, **keywords)
    except Exception as error:  # raised on the actual data: no need to check with zeros
        raise annotate(error, spec.name, str(site())) from None
    reals.write_back()
    results = result if len(spec.returns) > 1 else (result,) if spec.returns else ()
    wrapped = [
        _wrap(returned, value, bound, device)
        for returned, value in zip(spec.returns, results, strict=True)
    ]
    if not spec.returns:
        return None
    return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)


class _Reals:
    """Plain tensors for the arguments of an op, with copies of those it writes to.

    Arguments that share a storage which is written to become views of one copy of it, so that they
    alias as in eager.
    """

    def __init__(self, spec: OpSpec, bound: list[Any], read: Read) -> None:
        self.read = _read_for_fallback if read is plain else read
        self.written: list[tuple[LazyTensor, torch.Tensor]] = []
        self.memories: dict[LazyStorage, torch.Tensor] = {}
        self.shared = _shared_storages(spec, bound) if read is plain else set()
        self.arguments = [
            self._argument(value, argument.mutated)
            for argument, value in zip(spec.arguments, bound, strict=True)
        ]

    def _argument(self, arg: Any, mutated: bool) -> Any:
        if isinstance(arg, LazyTensor):
            real = self._tensor(arg, mutated)
            if mutated:
                self.written.append((arg, real))
            return real
        if isinstance(arg, (list, tuple)):
            return [self._argument(item, mutated) for item in arg]
        return physical(arg) if type(arg) is torch.device else arg

    def _tensor(self, tensor: LazyTensor, mutated: bool) -> torch.Tensor:
        if tensor._lazy_storage in self.shared:
            return self._look(tensor)
        real = self.read(tensor)
        return writable(real) if mutated and self.read is _read_for_fallback else real

    def _look(self, tensor: LazyTensor) -> torch.Tensor:
        storage = tensor._lazy_storage
        memory = self.memories.get(storage)
        if memory is None:
            memory = self.memories[storage] = writable(_read_for_fallback(wrap_storage(storage)))
        return window(
            memory,
            tensor.dtype,
            tensor.shape,
            tensor.stride(),
            int(tensor.storage_offset()),
            tensor.is_conj(),
            tensor.is_neg(),
        )

    def write_back(self) -> None:
        """Give the written tensors the new contents of their copies."""
        for tensor, real in self.written:
            if tensor._lazy_storage not in self.memories:
                write_data(tensor, real)
        for storage, memory in self.memories.items():
            write_data(wrap_storage(storage), memory)


def _read_for_fallback(tensor: LazyTensor) -> torch.Tensor:
    """The data of `tensor`, on the device where the backend wants fallbacks to run."""
    real = plain(tensor)
    kind = get_backend().eager_fallback_device_type()
    if tensor.device.type != "lazy" or real.device.type == kind:
        return real
    return real.to(kind)


def _shared_storages(spec: OpSpec, bound: list[Any]) -> set[LazyStorage]:
    """Storages that are written to and that several arguments use."""
    count: Counter[LazyStorage] = Counter()
    written: set[LazyStorage] = set()
    for argument, value in zip(spec.arguments, bound, strict=True):
        for item in value if isinstance(value, (list, tuple)) else (value,):
            if isinstance(item, LazyTensor):
                count[item._lazy_storage] += 1
                if argument.mutated:
                    written.add(item._lazy_storage)
    return {storage for storage in written if count[storage] > 1}


def _virtual_device(bound: list[Any]) -> torch.device | None:
    """The device of the results of an op on `bound`; None: that of the kernel's results."""
    for arg in bound:
        if type(arg) is torch.device and arg.type == "lazy":
            return arg
    for arg in bound:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, LazyTensor) and item.device.type == "lazy":
                return item.device
    return None


def writable(real: torch.Tensor) -> torch.Tensor:
    """A copy to write to, with exactly the same strides, overlaps included."""
    if TensorType.of_tensor(real).is_injective:
        copy = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
        return copy.copy_(real)
    memory = real.untyped_storage().clone()
    offset = int(real.storage_offset())
    return window(real, real.dtype, real.shape, real.stride(), offset, memory=memory)


def write_data(tensor: LazyTensor, real: torch.Tensor) -> None:
    """Set the contents of `tensor` to a plain tensor that has no other writers."""
    storage = data_storage(real, tensor.device)
    assert storage.data is not None, "it was made of data"
    with TRACE.lock:
        if storage.type.shape != tuple(tensor.shape):
            resize(tensor, storage.type)
        own = tensor._lazy_storage
        if tensor._lazy_view is None and storage.type is own.type.concrete:
            if own.type is not storage.type:  # keeps symbolic sizes, for example a mask's
                TRACE.sized[storage.data] = own.type
            own.value = None
            own.hold(storage.data)
        else:
            write(tensor, TRACE.leaf_value(storage))


def _wrap(returned: Any, value: Any, bound: list[Any], device: torch.device | None) -> Any:
    if returned.kind is ReturnKind.ARGUMENT:
        return bound[returned.argument]
    if returned.kind is ReturnKind.OTHER:
        return value
    if isinstance(value, (list, tuple)):
        return [_wrap_one(returned, item, bound, device) for item in value]
    return _wrap_one(returned, value, bound, device)


def _wrap_one(returned: Any, value: Any, bound: list[Any], device: torch.device | None) -> Any:
    if value is None or not is_traceable(value):
        return value  # a layout that torpor does not trace
    device = device or value.device
    source = bound[returned.argument] if returned.kind is ReturnKind.VIEW else None
    if isinstance(source, LazyTensor):
        return wrap_window(source._lazy_storage, TensorType.of_tensor(value, device))
    return wrap_result(value, device)


def wrap_result(value: torch.Tensor, device: torch.device) -> LazyTensor:
    """A lazy tensor on `device` from a result of an eager kernel."""
    return wrap_data(_own(value), device)


def _own(value: torch.Tensor) -> torch.Tensor:
    """`value`, or a copy if it may share memory with another tensor."""
    return value if value.storage_offset() == 0 and not value._is_view() else clone_plain(value)


def run_on_plain_device(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """For calls such as `zeros_like(lazy, device="cpu")`, whose result is a plain tensor."""
    reals = _Reals(spec, spec.bind(args, kwargs), _reading(spec))
    positional, keywords = spec.call_arguments(reals.arguments)
    with _torch.kernels():
        return spec.target(*positional, **keywords)
