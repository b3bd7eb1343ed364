"""Checks on memory that an op writes to: it must be lazy, and not overlap what the op reads."""

from __future__ import annotations

import re
from typing import Any

import torch

from torpor import _torch
from torpor.errors import annotate
from torpor.execute.storage import LazyStorage
from torpor.inference.infer import NotRecordable
from torpor.observe.site import site
from torpor.ops.signature import Signature
from torpor.ops.spec import OpSpec
from torpor.overrides.storage_ops import window
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import physical


class WritesPlain(Exception):
    """A tensor that is not lazy would be written to or viewed; the op has to run eagerly."""


def check_kept(signature: Signature, bound: list[Any]) -> None:
    """Check that arguments whose memory the results share are lazy."""
    for position in signature.kept:
        tensors = bound[position]
        all_lazy(tensors if signature.kinds[position] == "T" else [tensors])


def check_written(signature: Signature, bound: list[Any]) -> None:
    """Check that written arguments do not share memory with arguments that are read."""
    for written, read in signature.apart:
        apart(bound[written], bound[read])
    if _overlaps(signature, bound):
        check_overlap(signature.spec, tuple(bound))


def _overlaps(signature: Signature, bound: list[Any]) -> bool:
    """Whether a written tensor shares its storage with another argument."""
    repeats = {w.argument for w in signature.written if w.may_repeat}
    for position, other in signature.overlaps:
        written, read = bound[position], bound[other]
        if type(written) is not LazyTensor:
            continue
        itself = position in repeats and read is written
        read = read if signature.kinds[other] == "T" else [read]
        if not itself and shares(written._lazy_storage, read):
            return True
    return False


def all_lazy(tensors: Any) -> None:
    """Check that all tensors of a written list are lazy and have distinct storages."""
    storages = set()
    for tensor in tensors:
        if type(tensor) is not LazyTensor:
            if tensor is not None:
                raise WritesPlain
        else:
            storages.add(tensor._lazy_storage)
    if len(storages) < len(tensors) and None not in tensors:
        raise NotRecordable("tensors written to share their memory", fallback=True)


def apart(written: Any, read: Any) -> None:
    """Check that an op on lists reads no tensor that it has already written as an earlier item.

    Eager processes its lists item by item; a node reads all items first.
    """
    if len(written) == 1:
        return
    storages = {t._lazy_storage for t in written if type(t) is LazyTensor}
    for place, tensor in enumerate(read):
        if type(tensor) is LazyTensor and tensor._lazy_storage in storages:
            counterpart = written[place] if place < len(written) else None
            if (
                type(counterpart) is LazyTensor
                and counterpart._lazy_storage is not tensor._lazy_storage
            ):
                raise NotRecordable("tensors are read that are written before", fallback=True)


def shares(storage: LazyStorage, tensors: Any) -> bool:
    """Whether any of `tensors` uses `storage`."""
    return tensors is not None and any(
        type(t) is LazyTensor and t._lazy_storage is storage for t in tensors
    )


_ABOUT_MEMORY = re.compile("memory location|doesn't match the broadcast shape")
"""Eager's errors about memory that is both read and written, or would be resized while read."""


def check_overlap(spec: OpSpec, args: tuple[Any, ...]) -> None:
    """Raise eager's error for overlapping arguments: run the op on zeros with the same overlap."""
    memories: dict[LazyStorage, torch.Tensor] = {}
    made: dict[int, Any] = {}  # one stand-in per argument, also if it is passed twice
    real = [made.setdefault(id(arg), _stand_in(arg, memories, made)) for arg in args]
    positional, keywords = spec.call_arguments(real)
    with _torch.kernels():
        try:
            spec.target(*positional, **keywords)
        except RuntimeError as error:
            if _ABOUT_MEMORY.search(str(error)):
                raise annotate(error, spec.name, str(site())) from None


def _stand_in(arg: Any, memories: dict[LazyStorage, torch.Tensor], made: dict[int, Any]) -> Any:
    if isinstance(arg, (list, tuple)):
        return [made.setdefault(id(item), _stand_in(item, memories, made)) for item in arg]
    if type(arg) is not LazyTensor:
        return physical(arg) if type(arg) is torch.device else arg
    storage = arg._lazy_storage
    memory = memories.get(storage)
    if memory is None:
        type_ = storage.type
        memory = memories[storage] = torch.zeros(
            (max(type_.nbytes, 1),), dtype=torch.uint8, device=physical(type_.device)
        )
    return window(memory, arg.dtype, arg.shape, arg.stride(), int(arg.storage_offset()))
