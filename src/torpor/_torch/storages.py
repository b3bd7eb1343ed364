"""Storages: their identity, who shares them, tensors on memory they do not own, and pickles.

It reaches the reference counts of storages, and the functions that files of `torch.save` name.
"""

from __future__ import annotations

import ctypes
import functools
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import _C

rebuild_tensor = torch._utils._rebuild_tensor_v2
rebuild_parameter = torch._utils._rebuild_parameter


def typed_storage(tensor: torch.Tensor) -> Any:
    """The storage of a plain tensor in the form `torch.save` writes."""
    return tensor._typed_storage()


def untyped(storage: Any) -> Any:
    """The untyped form of a storage object, without torch's warning about typed ones."""
    return getattr(storage, "_untyped_storage", storage)


def memory_of(tensor: torch.Tensor) -> int:
    """What names the memory of a plain tensor while it lives; see `users_of`."""
    return int(tensor.untyped_storage()._cdata)


users_of: Callable[[int], int] = _C._storage_Use_Count
"""How many tensors and storage objects are on a memory."""


def weak_memories(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """What names the memories of tensors, `cdata` of each: no other gets that name meanwhile."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def shares_memory(tensor: torch.Tensor) -> bool:
    """Another tensor or a storage object is on the memory of a plain tensor."""
    users, holders = _users_and_holders(tensor)
    most_users, most_holders = _users_of_one()
    return users > most_users or holders > most_holders


def has_other_users(tensors: list[torch.Tensor]) -> bool:
    """Others than these plain tensors, all on one memory, are on it too."""
    users, holders = _users_and_holders(tensors[0])
    most_users, most_holders = _users_of_one()
    return users > most_users + len(tensors) - 1 or holders > most_holders


def _users_and_holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many are on the memory of a tensor, and how many hold the one Python object for it."""
    storage = tensor.untyped_storage()
    return users_of(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _users_of_one() -> tuple[int, int]:
    return _users_and_holders(torch.empty(1))


class _Bytes:
    """Memory of a GPU, and what keeps it from being unmapped."""

    def __init__(self, address: int, size: int, keep: object) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


def window_on(tensor: torch.Tensor, keep: object) -> torch.Tensor:
    """A tensor on the memory of another, which it does not own; `keep` lives as long as it does."""
    storage = tensor.untyped_storage()
    if not storage.nbytes():
        return tensor
    if tensor.is_cuda:
        memory = _Bytes(storage.data_ptr(), storage.nbytes(), keep)
        whole = torch.as_tensor(memory, device=tensor.device)
    else:
        array = type("Bytes", (ctypes.c_char * storage.nbytes(),), {})
        buffer = array.from_address(storage.data_ptr())  # type: ignore[attr-defined]  # of ctypes
        buffer.keep = keep
        whole = torch.frombuffer(buffer, dtype=torch.uint8)
    made = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    place = (tensor.storage_offset(), tensor.shape, tensor.stride())
    return made.set_(whole.untyped_storage(), *place)
