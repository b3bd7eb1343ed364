"""Converts the tensors of modules and optimizers between plain and lazy, in place.

Objects keep their identity (see `exchange`). To lazy, tensors are converted per storage, and those
that cannot be converted yet stay plain. To plain, all are converted or none: one remaining lazy
parameter would make every result lazy again.
"""

from __future__ import annotations

import functools
import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Any, Final

import torch

from torpor import _torch
from torpor.backend.data import BackendData
from torpor.backend.registry import get_backend
from torpor.execute import sync
from torpor.execute.queue import queues
from torpor.execute.storage import LazyStorage
from torpor.frontend.exchange import exchange, lazy_copy, move
from torpor.frontend.sharing import Adoption
from torpor.ir.types import TensorType
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import clone_plain, is_traceable, seen_by

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_VIRTUAL: Final = ("lazy", "meta")


class _Asked:
    """Whether the user has requested lazy tensors explicitly, other than by `enable`."""

    explicitly = False


ASKED = _Asked()


# -- which tensors -----------------------------------------------------------------------------

Part = tuple[torch.nn.Module, bool]
"""A module, and whether a compiler runs it."""


def parts_of(module: torch.nn.Module) -> Iterator[Part]:
    """The modules in it, itself included, except those of TorchScript."""
    seen: set[int] = set()
    parts = [(module, False)]
    while parts:
        part, inside = parts.pop()
        if id(part) in seen or isinstance(part, torch.jit.ScriptModule):
            continue
        seen.add(id(part))
        is_compiled = inside or _torch.is_compiled(part)
        yield part, is_compiled
        parts += [(child, is_compiled) for child in part._modules.values() if child is not None]


def convert_parts(parts: list[Part], running: bool = False) -> bool:
    """Make parameters and buffers of modules lazy; whether to retry later for some of them."""
    tensors: list[torch.Tensor] = []
    compiled: set[int] = set()
    for part, is_compiled in parts:
        for table in (part._parameters, part._buffers):
            found = [t for t in table.values() if t is not None and type(t) is not LazyTensor]
            if is_compiled:
                compiled.update(map(id, found))
            elif found:
                if table is part._parameters and not all(map(_is_own, found)):
                    return True  # `functional_call`
                tensors += found
    return convert((t for t in tensors if id(t) not in compiled), running)


def _is_own(tensor: torch.Tensor) -> bool:
    """Whether it really is a parameter."""
    return isinstance(tensor, torch.nn.Parameter)


def state_of(optimizer: Any) -> Iterator[torch.Tensor]:
    """All tensors in an optimizer's state, except its parameters."""
    kept = (optimizer.state, [{**g, "params": None} for g in optimizer.param_groups])
    for leaf in _torch.tree_leaves((list(kept[0].values()), kept[1])):
        if isinstance(leaf, torch.Tensor):
            yield leaf


# -- to lazy -----------------------------------------------------------------------------------


def convert(tensors: Iterable[Any], running: bool = False) -> bool:
    """Make plain tensors lazy in place; whether to retry later for some of them.

    `running`: called between two steps of a program, when the last loss may still be alive.
    """
    groups: dict[int, list[torch.Tensor]] = {}
    waits = False
    found = {id(t): t for t in _held_here(tensors) if isinstance(t, torch.Tensor)}
    for tensor in found.values():
        if _can_be_lazy(tensor):
            groups.setdefault(_torch.memory_of(tensor), []).append(tensor)
        else:
            waits |= torch.nn.parameter.is_lazy(tensor)
    if not groups:
        return waits
    del found
    shared = _shared_by_others(t.grad for group in groups.values() for t in group)
    with _torch.as_on_another_thread(), torch.no_grad():
        for group in groups.values():
            waits |= not _convert_together(group, running, shared)
    return waits


def _shared_by_others(gradients: Iterable[torch.Tensor | None]) -> set[int]:
    """Storages of plain gradients that other tensors share: a flat buffer, a view."""
    found = {id(g): g for g in gradients if g is not None and _can_be_lazy(g)}
    groups: dict[int, list[torch.Tensor]] = {}
    for gradient in found.values():
        groups.setdefault(_torch.memory_of(gradient), []).append(gradient)
    return {memory for memory, group in groups.items() if _torch.has_other_users(group)}


def _held_here(tensors: Iterable[Any]) -> Iterator[Any]:
    """The tensors; for DTensors this rank's shards, and the shards of their gradients."""
    for tensor in tensors:
        yield _torch.local_part(tensor)
        if _torch.is_dtensor(tensor) and tensor.is_leaf:
            yield _torch.local_part(tensor.grad)


def _can_be_lazy(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and is_traceable(tensor)
        and tensor.device.type not in _VIRTUAL
        and tensor.is_leaf
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def _convert_together(tensors: list[torch.Tensor], running: bool, shared: set[int]) -> bool:
    """Make tensors on one storage lazy; False if they must stay plain for now.

    `shared`: storages of gradients that must stay plain.
    """
    if any(_is_bound(t, running, shared) for t in tensors) or _torch.has_other_users(tensors):
        return False
    if len({tensor.dtype for tensor in tensors}) > 1:
        return False
    memory = tensors[0].untyped_storage()
    if memory.is_shared() and not tensors[0].is_cuda:
        return False
    adoption = Adoption(copy=not memory.resizable())  # borrowed memory has another owner
    del memory
    lazies = [adoption.adopt(tensor, tensor.device) for tensor in tensors]
    for tensor, lazy in zip(tensors, lazies, strict=True):
        move(tensor, lazy, lazy_copy)
    return True


def _is_bound(tensor: torch.Tensor, running: bool, shared: set[int]) -> bool:
    """Whether an autograd graph or torch holds it, or its gradient cannot become lazy."""
    grad = tensor.grad
    is_free = _torch.may_change(tensor) if running else not _torch.is_held(tensor)
    if not is_free or grad is None or type(grad) is LazyTensor:
        return not is_free
    # held by the parameter and by Python; if by more, another parameter has it for its gradient
    return not _can_be_lazy(grad) or _torch.memory_of(grad) in shared or _torch.is_held(grad, 2)


# -- to plain ----------------------------------------------------------------------------------


class _Gradients:
    """Detaches gradients from tensors, so that only Python refers to them, and restores them."""

    def __init__(self, tensors: Iterable[torch.Tensor]) -> None:
        self.taken = [(t, t.grad) for t in tensors if t.is_leaf and t.grad is not None]
        for tensor, _ in self.taken:
            tensor.grad = None

    def tensors(self) -> list[Any]:
        return [grad for _, grad in self.taken]

    def give_back(self) -> None:
        for tensor, grad in self.taken:
            tensor.grad = grad


def to_plain(tensors: Iterable[Any], others: Iterable[Any] = (), is_finished: bool = True) -> str:
    """Make lazy tensors plain in place, computed; returns why that is impossible, or "".

    `tensors` and their gradients are converted all or none; `others` where it is unobservable.
    """
    needed = {id(t): t for t in tensors if _is_ours(t)}
    refusal = held_by_graph(needed.values(), is_finished)
    if refusal:
        return refusal
    sync.cut()
    for queue in queues():
        queue.wait()
    with _torch.as_on_another_thread(), torch.no_grad():
        gradients = _Gradients(needed.values())
        try:
            needed.update({id(g): g for g in gradients.tensors() if _is_ours(g)})
            unlisted = {id(t): t for t in others if _is_ours(t) and id(t) not in needed}
            groups = _by_storage(needed.values())
            for tensor in unlisted.values():  # aliases made by `.data` are converted along
                groups.get(tensor._lazy_storage, []).append(tensor)
            refusal = next(filter(None, _refusals(groups)), "")
            if not refusal:
                groups |= _free_groups(unlisted.values(), groups)
                del needed, unlisted
                _make_plain(groups)
        finally:
            gradients.give_back()
    return refusal


def _is_ours(tensor: Any) -> bool:
    return type(tensor) is LazyTensor and tensor.device.type not in _VIRTUAL


_Groups = dict[LazyStorage, list[LazyTensor]]


def _by_storage(tensors: Iterable[Any]) -> _Groups:
    groups: _Groups = {}
    for tensor in tensors:
        groups.setdefault(tensor._lazy_storage, []).append(tensor)
    return groups


def _free_groups(tensors: Iterable[LazyTensor], known: _Groups) -> _Groups:
    """Those of `tensors` that may become plain too, with all tensors on their storage."""
    groups = _by_storage(t for t in tensors if t._lazy_storage not in known)
    refusals = _refusals(groups)
    return {s: g for (s, g), why in zip(groups.items(), refusals, strict=True) if not why}


def _refusals(groups: _Groups) -> list[str]:
    """Per storage: why its tensors cannot become plain now, or ""."""
    references = _references(groups)
    return [
        held_by_graph(tensors) or _not_there(storage) or _shared(tensors, count)
        for (storage, tensors), count in zip(groups.items(), references, strict=True)
    ]


def held_by_graph(tensors: Iterable[Any], is_finished: bool = True) -> str:
    """Why tensors cannot be exchanged: an autograd graph holds one; "" if none does.

    A view holds its base; that is fine if both are given. If a backward pass is still to come
    (not `is_finished`), even gradient accumulators must not be replaced, to keep its order.
    """
    found = {id(tensor): tensor for tensor in tensors if isinstance(tensor, torch.Tensor)}
    views = Counter(id(tensor._base) for tensor in found.values() if tensor._is_view())
    for number, tensor in found.items():
        holders = 1 + views[number]
        is_free = tensor.is_leaf and not tensor.is_inference()
        is_free &= _torch.may_change(tensor, holders)
        if not is_free or (_torch.is_held(tensor, holders) and not is_finished):
            return f"a graph of autograd holds a tensor of shape {tuple(tensor.shape)}"
    return ""


def _references(groups: _Groups) -> list[int]:
    return [sys.getrefcount(storage) for storage in groups]


@functools.cache
def _references_of_one() -> int:
    """The reference count of a storage that no tensor uses."""
    return _references({LazyStorage(TensorType.of_tensor(torch.empty(0)), None, None): []})[0]


def _shared(tensors: list[LazyTensor], references: int) -> str:
    if references <= _references_of_one() + len(tensors):
        return ""
    shape = tuple(tensors[0].shape)
    return f"another tensor is on the memory of one of shape {shape} (`.data`, a view)"


def _not_there(storage: LazyStorage) -> str:
    return "" if _has_contents(storage.data) else "a step has failed"


def _has_contents(data: BackendData | None) -> bool:
    """Whether the data is computed, without an error that has yet to be raised."""
    if data is None or data.error is not None:
        return False
    return data.done is None or (data.done.is_set() and data.done.failure is None)


def _make_plain(groups: _Groups) -> None:
    """Exchange tensors for copies: a buffer may alias memory that a backend writes to."""
    backend = get_backend()
    while groups:
        storage, tensors = groups.popitem()
        real = clone_plain(backend.tensor_from_data(sync.finish(storage)))
        for tensor in sorted(tensors, key=_is_base):  # views first: they hold their bases
            exchange(tensor, seen_by(tensor, real))


def _is_base(tensor: torch.Tensor) -> bool:
    return not tensor._is_view()


def all_lazy_tensors() -> Iterator[LazyTensor]:
    """Every lazy tensor in the process: there is no registry, so the garbage collector is asked."""
    yield from [tensor for tensor in gc.get_objects() if type(tensor) is LazyTensor]
