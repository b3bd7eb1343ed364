"""Making lazy tensors from values and data, and plain tensors from lazy ones."""

from __future__ import annotations

from typing import Any

import torch

from torpor import _torch, metrics
from torpor.backend.data import BackendData
from torpor.backend.registry import get_backend
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.node import Value
from torpor.ir.types import TensorType
from torpor.overrides.storage_ops import window
from torpor.trace.tensor import LazyTensor, View
from torpor.trace.values import root_value, window_onto

aten = torch.ops.aten
make_wrapper = _torch.make_wrapper


def set_bits(tensor: torch.Tensor, type_: TensorType) -> None:
    """Mark a wrapper as conjugated or negated memory."""
    if type_.conj:
        _torch.set_conj(tensor, True)
    if type_.neg:
        _torch.set_neg(tensor, True)


def wrap_storage(storage: LazyStorage) -> LazyTensor:
    """A tensor that covers all of `storage`."""
    tensor = make_wrapper(LazyTensor, *storage.type.wrapper)
    tensor._lazy_storage = storage
    tensor._lazy_view = None
    return tensor  # type: ignore[no-any-return]  # made by torch


def wrap_value(value: Value) -> LazyTensor | None:
    """A tensor that holds `value` in a new storage; None for an undefined result."""
    if value.type is None:
        return None
    storage = LazyStorage(value.type, value, None)
    TRACE.enlist(storage)
    return wrap_storage(storage)


def wrap_like(viewed: torch.Tensor, type_: TensorType) -> LazyTensor:
    """A wrapper that is an inference tensor if and only if `viewed` is, in any mode."""
    with torch.inference_mode(viewed.is_inference()):
        return make_wrapper(LazyTensor, *type_.wrapper)  # type: ignore[no-any-return]  # made by torch


def wrap_plainly(tensor: LazyTensor) -> LazyTensor:
    """The same tensor with only the dispatch keys of its device."""
    type_ = TensorType.of_tensor(tensor)
    alike = make_wrapper(LazyTensor, *type_.wrapper[:7])
    alike._lazy_storage, alike._lazy_view = tensor._lazy_storage, tensor._lazy_view
    set_bits(alike, type_)
    return alike  # type: ignore[no-any-return]  # made by torch


def wrap_view(
    storage: LazyStorage,
    view: View | None,
    type_: TensorType,
    viewed: torch.Tensor | None = None,
) -> LazyTensor:
    """A tensor that views `storage` through `view`; `viewed` is the tensor it is a view of."""
    if viewed is not None and torch.is_inference_mode_enabled():
        tensor: Any = wrap_like(viewed, type_)
    else:
        tensor = make_wrapper(LazyTensor, *type_.wrapper)
    tensor._lazy_storage = storage
    tensor._lazy_view = view
    if type_.conj or type_.neg:
        set_bits(tensor, type_)
    return tensor  # type: ignore[no-any-return]  # made by torch


def wrap_window(storage: LazyStorage, type_: TensorType) -> LazyTensor:
    """A view of `storage` with any dtype, size and strides."""
    if type_ is storage.type.concrete:
        return wrap_storage(storage)
    with TRACE.lock:
        view = window_onto(root_value(storage), type_)
        return wrap_view(storage, view, view.value.type)


def data_storage(tensor: torch.Tensor, device: torch.device) -> LazyStorage:
    """A storage on `device` that takes ownership of a plain tensor nobody else writes to."""
    tensor = as_root(tensor)
    type_ = TensorType.of_tensor(tensor, device)
    metrics.count("BytesIn", type_.nbytes)
    backend = get_backend()
    data = backend.data_from_tensor(tensor, type_, backend.backend_device(device))
    return LazyStorage(type_, None, data)


def as_root(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy if it does not start at the beginning of its memory or has lazy bits."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.storage_offset():
        return clone_plain(tensor)
    return tensor


def clone_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the strides that `clone` gives it: the same if they are dense."""
    return tensor.detach().clone()


def is_traceable(tensor: torch.Tensor) -> bool:
    """Whether a lazy tensor can replace it: it is strided, not quantized, and not nested."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def wrap_data(tensor: torch.Tensor, device: torch.device) -> LazyTensor:
    """A lazy tensor on `device` that takes ownership of a plain tensor nobody else writes to."""
    return wrap_storage(data_storage(tensor, device))


def plain(tensor: LazyTensor) -> torch.Tensor:
    """A plain tensor with the contents of `tensor`, sharing the buffer: never write to it."""
    storage = tensor._lazy_storage
    data: BackendData = sync.read(storage)
    metrics.count("BytesOut", data.type.nbytes)
    return seen_by(tensor, get_backend().tensor_from_data(data))


def seen_by(tensor: LazyTensor, real: torch.Tensor) -> torch.Tensor:
    """The view that `tensor` has of its memory, applied to the plain tensor `real`."""
    if tensor._lazy_view is None and real.shape == tensor.shape:
        return real
    return window(
        real, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def plain_copy(tensor: LazyTensor) -> torch.Tensor:
    """A plain tensor with a copy of the contents of `tensor`."""
    return clone_plain(plain(tensor))


def become(tensor: LazyTensor, other: LazyTensor) -> LazyTensor:
    """Give `tensor` the sizes, strides and storage of `other`."""
    _torch.set_metadata(tensor, other)
    tensor._lazy_storage, tensor._lazy_view = other._lazy_storage, other._lazy_view
    return tensor
