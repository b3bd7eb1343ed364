"""Gives results the strides of their types, and memory shared with nothing.

For backends whose data are torch tensors. A kernel may not produce the recorded type's strides, and
its result may be a view of an argument or of another result, which a handle must not be.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from torpor import _torch
from torpor.backend.data import BackendData
from torpor.ir.types import TensorType


def with_layout(tensor: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """A copy of `tensor` in memory of its own with the strides of `type_`."""
    copy = torch.empty_strided(type_.shape, type_.stride, dtype=tensor.dtype, device=tensor.device)
    source, target = tensor, copy
    for dim in repeated_dims(type_):
        source, target = source.narrow(dim, 0, 1), target.narrow(dim, 0, 1)
    target.copy_(source)
    return copy


def repeated_dims(type_: TensorType) -> list[int]:
    """Dimensions of stride 0, in which one element is repeated."""
    if not type_.numel:
        return []
    pairs = zip(type_.shape, type_.stride, strict=True)
    return [dim for dim, (size, stride) in enumerate(pairs) if stride == 0 and size > 1]


def clone_strided(tensor: torch.Tensor) -> torch.Tensor:
    """A copy with exactly the strides of `tensor`, holes and overlaps included."""
    if tensor.is_conj() or tensor.is_neg():
        return tensor.clone()
    return with_layout(tensor, TensorType.of_tensor(tensor))


def own_memory(tensor: torch.Tensor, type_: TensorType, taken: set[int]) -> torch.Tensor:
    """`tensor` as a result of type `type_`: copied if its memory is shared or its strides differ.

    `taken` are the storages in use (see `storages_of`); the result's storage is added.
    """
    if _torch.memory_of(tensor) in taken or not _has_layout(tensor, type_):
        tensor = with_layout(tensor, type_)
    taken.add(_torch.memory_of(tensor))
    return tensor


def storages_of(arguments: Iterable[Any]) -> set[int]:
    """The storages of the arguments."""
    return {
        _torch.memory_of(argument.tensor)
        for argument in arguments
        if isinstance(argument, BackendData) and argument.tensor is not None
    }


def _has_layout(tensor: torch.Tensor, type_: TensorType) -> bool:
    return (
        tensor.stride() == type_.stride
        and tensor.storage_offset() == 0
        and not tensor.is_conj()
        and not tensor.is_neg()
    )
