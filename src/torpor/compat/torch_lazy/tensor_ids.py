"""Numbers for lazy tensors, assigned on demand: torpor itself identifies tensors by `is`."""

from __future__ import annotations

import itertools
import threading
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from torpor.execute.storage import LazyStorage
from torpor.trace.tensor import LazyTensor

UNKNOWN = -1
"""Instead of the id of a tensor that was never requested."""

_lock = threading.Lock()
_next = itertools.count(1)
_by_tensor: Any = WeakTensorKeyDictionary()
_by_storage: WeakKeyDictionary[LazyStorage, int] = WeakKeyDictionary()


def id_of(tensor: torch.Tensor) -> int:
    """The number of a lazy tensor."""
    if not isinstance(tensor, LazyTensor):
        raise TypeError(f"expected a lazy tensor, got {type(tensor).__name__} on {tensor.device}")
    with _lock:
        number: int | None = _by_tensor.get(tensor)
        if number is None:
            number = _by_tensor[tensor] = next(_next)
        if tensor._lazy_view is None:
            _by_storage.setdefault(tensor._lazy_storage, number)
        return number


def id_of_storage(storage: LazyStorage) -> int:
    """The number of the tensor that covers all of `storage`, or `UNKNOWN`."""
    with _lock:
        return _by_storage.get(storage, UNKNOWN)
