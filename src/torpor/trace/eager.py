"""Running one op at once, on the numbers: fallbacks, data-dependent ops, random draws."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch, metrics
from torpor.execute.storage import TRACE
from torpor.ir.types import TensorType
from torpor.ops import rules
from torpor.ops.spec import ArgKind, OpSpec, ReturnKind
from torpor.ops.storage_ops import window
from torpor.trace.site import site
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import physical, write
from torpor.trace.wrap import clone_plain, data_storage, plain, resize, wrap_data, wrap_window


def run_eager(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run an op on real tensors, and make its results and writes lazy again."""
    return _run(spec, spec.bind(args, kwargs), plain)


def run_random(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Draw at once: the numbers, and the state of the generator, are eager's in program order.

    An op that only overwrites its tensor, or takes only its size, does not wait for it.
    """
    cell = metrics.op_cell(f"lazy::{spec.target._opname}")
    cell[0] += 1
    read = _blank if spec.target._opname in rules.SHAPE_ONLY else plain
    if read is plain and any(a.kind is ArgKind.TENSOR for a in spec.arguments):
        metrics.count_line(f"Sync::{spec.target._opname}", str(site()))
    return _run(spec, spec.bind(args, kwargs), read)


def count_fallback(spec: OpSpec) -> None:
    """Count an op that had to run eagerly for want of a type rule, with the user's line."""
    metrics.count_line(f"{spec.target.namespace}::{spec.target._opname}", str(site()))
    metrics.count("Fallback")


def count_sync(spec: OpSpec) -> None:
    """Count an op that cannot be recorded by its nature, with the user's line."""
    metrics.count_line(f"Sync::{spec.target._opname}", str(site()))


def try_on_zeros(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Let eager judge an op by the types of its arguments: raises what eager raises."""
    bound = spec.bind(args, kwargs)
    real = [_real(a, arg.mutated, _zeros) for arg, a in zip(spec.arguments, bound, strict=True)]
    positional, keywords = spec.call_arguments(real)
    with _torch.kernels():
        spec.target(*positional, **keywords)


def _zeros(tensor: LazyTensor) -> torch.Tensor:
    return _blank(tensor).zero_() if tensor.numel() else _blank(tensor)


def _blank(tensor: LazyTensor) -> torch.Tensor:
    return torch.empty_strided(
        tensor.shape, tensor.stride(), dtype=tensor.dtype, device=physical(tensor.device)
    )


def _run(spec: OpSpec, bound: list[Any], read: Callable[[LazyTensor], torch.Tensor]) -> Any:
    device = _virtual_device(bound)
    real = [_real(a, arg.mutated, read) for arg, a in zip(spec.arguments, bound, strict=True)]
    positional, keywords = spec.call_arguments(real)
    with _torch.kernels():
        result = spec.target(*positional, **keywords)
    for position in spec.mutated:
        _write_back(bound[position], real[position])
    results = result if len(spec.returns) > 1 else (result,) if spec.returns else ()
    wrapped = [
        _wrap(returned, value, bound, device)
        for returned, value in zip(spec.returns, results, strict=True)
    ]
    if not spec.returns:
        return None
    return wrapped[0] if len(wrapped) == 1 else tuple(wrapped)


def _virtual_device(bound: list[Any]) -> torch.device | None:
    """The device the results of an op on `bound` belong to; None where the kernel's is right."""
    for arg in bound:
        if type(arg) is torch.device and arg.type == "lazy":
            return arg
    for arg in bound:
        for item in arg if isinstance(arg, (list, tuple)) else (arg,):
            if isinstance(item, LazyTensor) and item.device.type == "lazy":
                return item.device
    return None


def _real(arg: Any, mutated: bool, read: Callable[[LazyTensor], torch.Tensor]) -> Any:
    if isinstance(arg, LazyTensor):
        real = read(arg)
        return _writable(real) if mutated and read is plain else real
    if isinstance(arg, (list, tuple)):
        return [_real(item, mutated, read) for item in arg]
    if type(arg) is torch.device:
        return physical(arg)
    return arg


def _writable(real: torch.Tensor) -> torch.Tensor:
    """A copy that may be written to, with the very strides, overlaps included."""
    if TensorType.of_tensor(real).is_injective:
        copy = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
        return copy.copy_(real)
    memory = real.untyped_storage().clone()
    return window(real, real.dtype, real.shape, real.stride(), real.storage_offset(), memory=memory)


def _write_back(target: Any, real: Any) -> None:
    if isinstance(target, (list, tuple)):
        for item, value in zip(target, real, strict=True):
            _write_back(item, value)
    elif isinstance(target, LazyTensor):
        write_data(target, real)


def write_data(tensor: LazyTensor, real: torch.Tensor) -> None:
    """Let `tensor` hold the numbers of a plain tensor that nobody else writes to."""
    storage = data_storage(real, tensor.device)
    with TRACE.lock:
        if storage.type.shape != tuple(tensor.shape):
            resize(tensor, storage.type)
        if tensor._lazy_view is None and storage.type is tensor._lazy_storage.type:
            tensor._lazy_storage.value, tensor._lazy_storage.data = None, storage.data
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
    if value is None or value.layout is not torch.strided or value.is_quantized:
        return value  # a layout torpor does not trace stays a plain tensor
    device = device or value.device
    source = bound[returned.argument] if returned.kind is ReturnKind.VIEW else None
    if isinstance(source, LazyTensor):
        return wrap_window(source._lazy_storage, TensorType.of_tensor(value, device))
    return wrap_data(_own(value, bound), device)


def _own(value: torch.Tensor, bound: list[Any]) -> torch.Tensor:
    """`value`, or a copy of it where it might share memory with something torpor must not see."""
    return value if value.storage_offset() == 0 and not value._is_view() else clone_plain(value)
