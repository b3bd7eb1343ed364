"""Memory that an op writes to: lazy, and shared with nothing that it reads."""

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
    """A tensor that is not lazy would be written to or viewed: eager has to do it."""


def check_kept(signature: Signature, bound: list[Any]) -> None:
    """Make sure that arguments which live on in the results are lazy."""
    for position in signature.kept:
        tensors = bound[position]
        all_lazy(tensors if signature.kinds[position] == "T" else [tensors])


def check_written(signature: Signature, bound: list[Any]) -> None:
    """Make sure that what is written to shares no memory with what is read."""
    for written, read in signature.apart:
        apart(bound[written], bound[read])
    if _overlaps(signature, bound):
        check_overlap(signature.spec, tuple(bound))


def _overlaps(signature: Signature, bound: list[Any]) -> bool:
    """A tensor that is written to shares its storage with another argument."""
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
    """Make sure that a list of tensors the op writes to is lazy, and each on memory of its own."""
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
    """Make sure that an op on lists reads nothing that it has written for another item before.

    Eager goes through its lists item by item; a node reads all of them first.
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
    """One of `tensors` is on `storage`."""
    return tensors is not None and any(
        type(t) is LazyTensor and t._lazy_storage is storage for t in tensors
    )


_ABOUT_MEMORY = re.compile("memory location|doesn't match the broadcast shape")
"""What eager says of memory that is read and written, or would have to grow while it is read."""


def check_overlap(spec: OpSpec, args: tuple[Any, ...]) -> None:
    """Let eager judge an op that writes to memory it also reads, on zeros that overlap alike."""
    memories: dict[LazyStorage, torch.Tensor] = {}
    made: dict[int, Any] = {}  # the same argument is the same stand-in
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
