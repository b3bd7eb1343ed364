"""Making lazy tensors from values and from data, and plain tensors from lazy ones."""

from __future__ import annotations

import gc
from typing import Any
from weakref import WeakKeyDictionary

import torch

from torpor import _torch, metrics
from torpor.backend.data import BackendData
from torpor.backend.registry import get_backend
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.node import Value
from torpor.ir.types import TensorType
from torpor.ops.storage_ops import window
from torpor.trace.tensor import LazyTensor, View
from torpor.trace.values import apply, physical, root_value, window_onto

aten = torch.ops.aten
make_wrapper = _torch.make_wrapper


def set_bits(tensor: torch.Tensor, type_: TensorType) -> None:
    """Mark a wrapper as conjugated or negated memory."""
    if type_.conj:
        _torch.set_conj(tensor, True)
    if type_.neg:
        _torch.set_neg(tensor, True)


def wrap_storage(storage: LazyStorage) -> LazyTensor:
    """A tensor that is all of `storage`."""
    tensor = make_wrapper(LazyTensor, *storage.type.wrapper)
    tensor._lazy_storage = storage
    tensor._lazy_view = None
    return tensor  # type: ignore[no-any-return]  # made by torch


def wrap_value(value: Value) -> LazyTensor | None:
    """A tensor with memory of its own that holds `value`; None for an undefined result."""
    if value.type is None:
        return None
    storage = LazyStorage(value.type, value, None)
    TRACE.enlist(storage)
    return wrap_storage(storage)


def wrap_like(viewed: torch.Tensor, type_: TensorType) -> LazyTensor:
    """A wrapper that is an inference tensor only if `viewed` is one, whatever the mode."""
    with torch.inference_mode(viewed.is_inference()):
        return make_wrapper(LazyTensor, *type_.wrapper)  # type: ignore[no-any-return]  # made by torch


def wrap_plainly(tensor: LazyTensor) -> LazyTensor:
    """The same tensor under the dispatch keys of its device alone."""
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
    """A tensor that looks at `storage` through `view`; `viewed` is the tensor it is a view of."""
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
    """A tensor that looks at `storage` through a window of any dtype, size and strides."""
    if type_ is storage.type.concrete:
        return wrap_storage(storage)
    with TRACE.lock:
        view = window_onto(root_value(storage), type_)
        return wrap_view(storage, view, view.value.type)


def data_storage(tensor: torch.Tensor, device: torch.device) -> LazyStorage:
    """A storage on `device` that takes over a plain tensor nobody else writes to."""
    tensor = as_root(tensor)
    type_ = TensorType.of_tensor(tensor, device)
    metrics.count("BytesIn", type_.nbytes)
    backend = get_backend()
    data = backend.data_from_tensor(tensor, type_, backend.backend_device(device))
    return LazyStorage(type_, None, data)


def as_root(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor`, or a copy of it, as all of its memory from the start."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    if tensor.storage_offset():
        return clone_plain(tensor)
    return tensor


def clone_plain(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with the same strides where they are dense, as `clone` makes them."""
    return tensor.detach().clone()


def is_traceable(tensor: torch.Tensor) -> bool:
    """The tensor is strided and holds one number in each place: a lazy one can stand for it."""
    return tensor.layout is torch.strided and not (tensor.is_quantized or tensor.is_nested)


def wrap_data(tensor: torch.Tensor, device: torch.device) -> LazyTensor:
    """A lazy tensor on `device` that takes over a plain tensor nobody else writes to."""
    return wrap_storage(data_storage(tensor, device))


def plain(tensor: LazyTensor) -> torch.Tensor:
    """A plain tensor with the numbers of `tensor`, on the buffer itself: read it, never write."""
    storage = tensor._lazy_storage
    data: BackendData = sync.read(storage)
    metrics.count("BytesOut", data.type.nbytes)
    return seen_by(tensor, get_backend().tensor_from_data(data))


def seen_by(tensor: LazyTensor, real: torch.Tensor) -> torch.Tensor:
    """What `tensor` sees of its memory, which is that of the plain tensor `real`."""
    if tensor._lazy_view is None and real.shape == tensor.shape:
        return real
    return window(
        real, tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()),
        tensor.is_conj(), tensor.is_neg(),
    )  # fmt: skip


def plain_copy(tensor: LazyTensor) -> torch.Tensor:
    """A plain tensor with the numbers of `tensor` in memory of its own."""
    return clone_plain(plain(tensor))


def become(tensor: LazyTensor, other: LazyTensor) -> LazyTensor:
    """Let `tensor` be what `other` is: sizes, strides, storage."""
    _torch.set_metadata(tensor, other)
    tensor._lazy_storage, tensor._lazy_view = other._lazy_storage, other._lazy_view
    return tensor


_GROWN: WeakKeyDictionary[LazyStorage, LazyStorage] = WeakKeyDictionary()
"""What memory without elements has grown to; who looks at none of them need not know."""


def memory_of(tensor: LazyTensor) -> LazyStorage:
    """The storage that windows onto the memory of `tensor` look at."""
    storage = tensor._lazy_storage
    return storage if storage.type.numel else _GROWN.get(storage, storage)


def resize(tensor: LazyTensor, type_: TensorType) -> LazyTensor:
    """Give `tensor` another size on its storage, which grows if it must."""
    type_ = type_.at_offset(int(tensor.storage_offset()))
    storage = memory_of(tensor)
    if type_.numel and type_.nbytes > storage.type.nbytes:
        storage = grow(storage, type_)
    return become(tensor, wrap_window(storage, type_))


def grow(storage: LazyStorage, type_: TensorType) -> LazyStorage:
    """`storage` with room for `type_`; everybody on it moves along, new memory is not set."""
    if storage.type.numel == 0:
        grown = _GROWN[storage] = _blank_storage(type_)
        return grown
    old = plain(wrap_storage(storage))
    flat = torch.empty(
        (type_.offset + type_.span,), dtype=type_.dtype, device=physical(type_.device)
    )
    count = old.untyped_storage().nbytes()
    bytes_of_old, bytes_of_new = (window(t, torch.uint8, (count,), (1,), 0) for t in (old, flat))
    bytes_of_new.copy_(bytes_of_old)
    grown = data_storage(flat, type_.device)
    before, tensors = storage.type, _whole_tensors(storage)
    with TRACE.lock:
        storage.type, storage.data, storage.value = grown.type, grown.data, None
    for tensor in tensors:  # no longer all of it
        tensor._lazy_view = wrap_window(storage, before.concrete)._lazy_view
    return storage


def _blank_storage(type_: TensorType) -> LazyStorage:
    """Memory with room for `type_`, recorded, not set."""
    shape, stride = type_.shape, type_.stride
    if type_.offset:
        shape, stride = (type_.offset + type_.span,), (1,)
    with TRACE.lock:
        bound = [shape, stride, type_.dtype, None, type_.device, None]
        value = apply(aten.empty_strided.default, bound).outputs[0]
        storage = LazyStorage(value.type, value, None)
        TRACE.enlist(storage)
    return storage


def _whole_tensors(storage: LazyStorage) -> list[LazyTensor]:
    """Every tensor that is all of `storage`; a storage does not know them, so Python is asked."""
    holders = gc.get_referrers(storage)
    attributes = [h for h in holders if type(h) is dict and h.get("_lazy_storage") is storage]
    holders += gc.get_referrers(*attributes)
    return [
        tensor
        for tensor in holders
        if type(tensor) is LazyTensor
        and tensor._lazy_storage is storage
        and tensor._lazy_view is None
    ]
