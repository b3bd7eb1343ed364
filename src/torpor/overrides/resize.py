"""Resizing tensors in place, and growing storages."""

from __future__ import annotations

import gc
from weakref import WeakKeyDictionary

import torch

from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.types import TensorType
from torpor.overrides.storage_ops import window
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import apply, physical
from torpor.trace.wrap import aten, become, data_storage, plain, wrap_storage, wrap_window

_GROWN: WeakKeyDictionary[LazyStorage, LazyStorage] = WeakKeyDictionary()
"""Empty storages -> what they have grown to; empty tensors on them need not follow."""


def memory_of(tensor: LazyTensor) -> LazyStorage:
    """The storage that views of `tensor`'s memory refer to."""
    storage = tensor._lazy_storage
    return storage if storage.type.numel else _GROWN.get(storage, storage)


def resize(tensor: LazyTensor, type_: TensorType) -> LazyTensor:
    """Resize `tensor` on its storage, which grows if needed."""
    type_ = type_.at_offset(int(tensor.storage_offset()))
    storage = memory_of(tensor)
    if type_.numel and type_.nbytes > storage.type.nbytes:
        storage = grow(storage, type_)
    return become(tensor, wrap_window(storage, type_))


def grow(storage: LazyStorage, type_: TensorType) -> LazyStorage:
    """Grow `storage` to hold `type_`, with all tensors on it; new memory is uninitialized."""
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
    for tensor in tensors:  # they no longer cover it
        tensor._lazy_view = wrap_window(storage, before.concrete)._lazy_view
    return storage


def _blank_storage(type_: TensorType) -> LazyStorage:
    """A new storage for `type_`, recorded as uninitialized."""
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
    """Every tensor that covers all of `storage`, found through the garbage collector."""
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
