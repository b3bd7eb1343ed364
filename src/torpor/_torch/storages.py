"""Storages: their identity, who shares them, tensors on borrowed memory, and pickles.

Uses the reference counts of storages, and the functions that files of `torch.save` refer to.
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
    """The typed storage of a plain tensor, as `torch.save` writes it."""
    return tensor._typed_storage()


def untyped(storage: Any) -> Any:
    """The untyped form of a storage object, without torch's deprecation warning."""
    return getattr(storage, "_untyped_storage", storage)


def memory_of(tensor: torch.Tensor) -> int:
    """The identity of a plain tensor's memory while it is alive; see `users_of`."""
    return int(tensor.untyped_storage()._cdata)


users_of: Callable[[int], int] = _C._storage_Use_Count
"""How many tensors and storage objects use a memory."""


def weak_memories(tensors: Iterable[torch.Tensor]) -> list[Any]:
    """The identities (`cdata`) of tensors' memories, weakly referenced so that none is reused."""
    from torch.multiprocessing.reductions import StorageWeakRef

    return [StorageWeakRef(tensor.untyped_storage()) for tensor in tensors]


def shares_memory(tensor: torch.Tensor) -> bool:
    """Whether another tensor or storage object uses the memory of a plain tensor."""
    users, holders = _users_and_holders(tensor)
    most_users, most_holders = _users_of_one()
    return users > most_users or holders > most_holders


def has_other_users(tensors: list[torch.Tensor]) -> bool:
    """Whether anything besides these plain tensors, all on one memory, uses it."""
    users, holders = _users_and_holders(tensors[0])
    most_users, most_holders = _users_of_one()
    return users > most_users + len(tensors) - 1 or holders > most_holders


def _users_and_holders(tensor: torch.Tensor) -> tuple[int, int]:
    """How many users a tensor's memory has, and the references to its one Python object."""
    storage = tensor.untyped_storage()
    return users_of(storage._cdata), sys.getrefcount(storage)


@functools.cache
def _users_of_one() -> tuple[int, int]:
    return _users_and_holders(torch.empty(1))


class _Bytes:
    """A range of GPU memory, with an object that keeps it mapped."""

    def __init__(self, address: int, size: int, keep: object) -> None:
        self.keep = keep
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 2,
        }  # fmt: skip


def window_on(tensor: torch.Tensor, keep: object) -> torch.Tensor:
    """A non-owning tensor on the memory of another; it keeps `keep` alive."""
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
