"""torch's storage objects for the memory of lazy tensors, and the reverse.

`y.untyped_storage()` is a storage object on the current buffer of `y`. It refers back to the lazy
storage: `x.set_(y.untyped_storage(), ...)` makes `x` an alias of it. It does not own the buffer:
every write replaces buffers, and the object must not prevent one from being donated for longer
than the user holds it.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary, ref

import torch

from torpor import _torch
from torpor.backend.data import BackendData
from torpor.backend.registry import get_backend
from torpor.errors import UnsupportedError
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.frontend.sharing import LOADED, Adoption, LoadedStorage
from torpor.ir.types import TensorType, contiguous_strides
from torpor.overrides.resize import grow, memory_of
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import wrap_storage, wrap_window

_OWNER = "_torpor_storage"
"""An attribute of a storage object: the lazy storage it belongs to."""

_objects: WeakKeyDictionary[LazyStorage, tuple[ref[BackendData], ref[Any]]] = WeakKeyDictionary()
_owners: WeakKeyDictionary[BackendData, ref[LazyStorage]] = WeakKeyDictionary()


def storage_object(tensor: LazyTensor) -> torch.UntypedStorage:
    """torch's storage object for `tensor`: the same one until the buffer is replaced."""
    storage = memory_of(tensor)
    data = own_buffer(storage)
    buffer, made = _objects.get(storage, (None, None))
    found: torch.UntypedStorage | None = None if made is None else made()
    if found is None or buffer is None or buffer() is not data:
        found = _object_on(storage, data)
        _objects[storage] = ref(data), ref(found)
    return found


def _object_on(storage: LazyStorage, data: BackendData) -> torch.UntypedStorage:
    real = get_backend().tensor_from_data(data)
    made = torch.UntypedStorage(0, device=real.device)
    if real.untyped_storage().nbytes():
        made = _torch.window_on(real, (storage, data)).untyped_storage()
    setattr(made, _OWNER, storage)
    return made


def own_buffer(storage: LazyStorage) -> BackendData:
    """The buffer of `storage`, computed, and shared with no other storage.

    A deep copy shares a buffer until either is written to. But code that compares addresses expects
    only tensors that share memory in eager to have the same one.
    """
    data: BackendData = sync.read(storage)
    owner = _owners.get(data)
    other = None if owner is None else owner()
    if other is not None and other is not storage and other.data is data:
        backend = get_backend()
        copy = backend.copy_data(data)
        with TRACE.lock:
            storage.data = data = copy
    _owners[data] = ref(storage)
    return data


def on_storage(
    tensor: torch.Tensor, memory: Any, offset: int, size: Any, stride: Any
) -> LazyTensor:
    """A tensor like `tensor` on the memory of a storage object, which grows if needed, as in eager.

    Memory of no lazy tensor is adopted with its current contents (see `refuse_shared`); lazy
    tensors on it share memory with each other.
    """
    real = _judged(tensor, memory, offset, size, stride)
    type_ = TensorType.of_tensor(real, tensor.device)
    owner: LazyStorage | None = getattr(memory, _OWNER, None)
    if owner is None:
        return _on_plain(tensor, memory, type_)
    if owner.type.device != tensor.device:
        raise _other_device(tensor, owner.type.device)
    storage = memory_of(wrap_storage(owner))
    if type_.numel and type_.nbytes > storage.type.nbytes:
        storage = grow(storage, type_)
    return wrap_window(storage, type_)


def refuse_shared(tensor: torch.Tensor, source: Any) -> None:
    """Raise if `tensor` would share memory with plain tensors.

    Neither would see writes to the other. Memory held only by storage objects is fine: `torch.load`
    and unpickling create it.
    """
    memory = source.untyped_storage() if isinstance(source, torch.Tensor) else source
    memory = _torch.untyped(memory)
    given = isinstance(memory, LoadedStorage) or hasattr(memory, _OWNER)
    if given or memory.device != tensor.device or not memory.nbytes():
        return
    if _torch.users_of(memory._cdata) > 1:
        raise UnsupportedError(
            "set_ of a lazy tensor to the memory of a plain one: neither could see what is written "
            "to the other; make the plain one lazy first (`torpor.lazy(plain)`), or copy with "
            "`lazy.copy_(plain)`"
        )


def _judged(tensor: torch.Tensor, memory: Any, offset: int, size: Any, stride: Any) -> torch.Tensor:
    """Run `set_` on a plain tensor of the same size, for eager's sizes, strides and errors."""
    dtype = tensor.dtype
    shape = (memory.nbytes() // dtype.itemsize,) if size is None else tuple(size)
    strides = tuple(stride) if stride or not shape else contiguous_strides(shape)
    alike = torch.UntypedStorage(memory.nbytes())
    with _torch.without_modes():
        before = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
        return before.set_(alike, offset, shape, strides)


def _on_plain(tensor: torch.Tensor, memory: Any, type_: TensorType) -> LazyTensor:
    loaded = isinstance(memory, LoadedStorage)
    if not loaded and memory.device != tensor.device:
        raise _other_device(tensor, memory.device)
    real = torch.empty((0,), dtype=tensor.dtype, device="cpu" if loaded else memory.device)
    with _torch.without_modes():
        real.set_(memory, type_.offset, type_.shape, type_.stride)
    return (LOADED if loaded else _TAKEN).adopt(real, tensor.device)


_TAKEN = Adoption(copy=True)


def _other_device(tensor: torch.Tensor, device: torch.device) -> UnsupportedError:
    return UnsupportedError(
        f'Attempted to set the storage of a tensor on device "{tensor.device}" to a storage on '
        f'different device "{device}"; the devices must match: copy it there first'
    )
