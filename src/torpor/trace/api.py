"""The functions users call to cut a trace, wait for it, and ask about tensors."""

from __future__ import annotations

from typing import Any

import torch

from torpor.execute import sync as _sync
from torpor.trace.devices import lazy_device
from torpor.trace.tensor import LazyTensor


def sync(*tensors: Any, wait: bool = False, device: Any = None) -> None:
    """Cut the trace and start computing all that is alive, or compute only `tensors`.

    With `wait=True` it returns when the numbers are there. An error of an earlier step that
    nobody was told of yet is raised here.
    """
    where = None if device is None else lazy_device(device)
    if tensors:
        lazy = [t for t in tensors if isinstance(t, LazyTensor)]
        _sync.compute([t._lazy_storage for t in lazy])
        if wait:
            for tensor in lazy:
                _sync.read(tensor._lazy_storage)
        return
    _sync.raise_errors(where)
    _sync.cut(where)
    if wait:
        _sync.wait(where)


def wait(device: Any = None) -> None:
    """Block until the device queue (every queue) is empty; raise what went wrong on it."""
    _sync.wait(None if device is None else lazy_device(device))


def is_pending(tensor: torch.Tensor) -> bool:
    """`tensor` is recorded and nothing has been asked to compute it yet."""
    return isinstance(tensor, LazyTensor) and tensor._lazy_storage.data is None
