"""Adopts plain tensors as lazy ones, preserving memory sharing among them.

Plain tensors on one storage become lazy tensors on one lazy storage, as long as that still holds
the memory it was made from.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakValueDictionary

import torch

from torpor.execute.storage import LazyStorage
from torpor.ir.types import TensorType
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import data_storage, wrap_window


class Adoption:
    """Turns plain tensors into lazy ones; remembers the storages it has adopted."""

    def __init__(self, copy: bool) -> None:
        self.copy = copy
        self.known: WeakValueDictionary[tuple[int, torch.device], LazyStorage] = (
            WeakValueDictionary()
        )

    def adopt(self, tensor: torch.Tensor, device: torch.device) -> LazyTensor:
        """`tensor` as a lazy tensor on `device`."""
        tensor = tensor.detach().resolve_conj().resolve_neg()
        memory = tensor.untyped_storage()
        key = (memory._cdata, device)
        storage = self.known.get(key)
        if storage is None or storage.type.dtype != tensor.dtype or not _holds(storage, memory):
            storage = data_storage(self._root(tensor, memory), device)
            assert storage.data is not None, "a storage made from a tensor has data"
            storage.data.info = memory
            self.known[key] = storage
        return wrap_window(storage, TensorType.of_tensor(tensor, device))

    def _root(self, tensor: torch.Tensor, memory: torch.UntypedStorage) -> torch.Tensor:
        """A tensor of the whole memory of `tensor`, in the shape of `tensor` if that covers it."""
        type_ = TensorType.of_tensor(tensor)
        if type_.offset == 0 and type_.is_dense and type_.nbytes == memory.nbytes():
            return tensor.clone() if self.copy else tensor
        flat = torch.empty((0,), dtype=tensor.dtype, device=tensor.device)
        count = memory.nbytes() // tensor.dtype.itemsize
        flat.set_(memory, 0, (count,), (1,))
        return flat.clone() if self.copy else flat


def _holds(storage: LazyStorage, memory: torch.UntypedStorage) -> bool:
    """Whether `storage` still holds the contents taken from `memory`, which is then alive."""
    data = storage.data
    return data is not None and data.info is not None and data.info._cdata == memory._cdata


# -- saving and loading ------------------------------------------------------------------------

LOCATION = "_torpor_location"
"""An attribute of a plain storage: the lazy device it will be loaded to."""


class LoadedStorage(torch.UntypedStorage):
    """A plain storage read from a file, to be moved to a lazy device.

    torch rebuilds a tensor as `torch.empty(0, device=storage.device).set_(storage, ...)`; the
    `device` reported here makes that a lazy tensor.
    """

    @property
    def device(self) -> torch.device:  # type: ignore[override]  # an attribute in the base
        return torch.device(getattr(self, LOCATION))


def _tag(storage: Any) -> str | None:
    return getattr(storage, LOCATION, None)


def _place(storage: Any, location: str) -> Any:
    if not str(location).startswith("lazy"):
        return None
    storage.__class__ = LoadedStorage
    setattr(storage, LOCATION, str(location))
    return storage


def register_location() -> None:
    """Register the location `lazy` with `torch.save` and `torch.load`."""
    torch.serialization.register_package(5, _tag, _place)


LOADED = Adoption(copy=False)
