"""A region: a captured graph whose calls are interned, as those of ops are.

The values of all it reads are the key; under it stand the values of its results and of what it
writes. A call that was met before is one look-up, however many ops the graph has. Another call runs
the graph through the recorder, once.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from torpor import _torch, config, metrics
from torpor.backend.native_library import NATIVE
from torpor.backend.registry import get_backend
from torpor.capture.captured_program import CapturedProgram
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.node import LEAF, SCALAR, SIZE, TABLE, Node, Value
from torpor.ir.types import SymbolicType, TensorType
from torpor.trace.tensor import InThisTrace, LazyTensor, View
from torpor.trace.values import root_value, value_of
from torpor.trace.wrap import clone_plain, is_traceable, wrap_data, wrap_storage, wrap_view

MOST_CALLS = 8
"""Calls of one region that are remembered, the least recently used first to go."""

Key = tuple[Any, ...]
_RECORDS = threading.RLock()


class ResultLook(NamedTuple):
    """How a result looks at its storage: one of this call's, or that of an argument."""

    storage: int  # of an argument if negative, counted from the end
    links: tuple[tuple[Node, int, Value], ...]  # views, from the storage outwards
    root: Value
    value: Value


Result = ResultLook | int | None
"""A look; all of a new storage, by number; if negative an argument itself, counted from the end."""


class RegionCall(NamedTuple):
    """What a call of a region gives and writes."""

    storages: tuple[Value, ...]  # what new storages hold
    results: tuple[Result, ...]
    written: tuple[tuple[int, Value], ...]  # arguments, and what their storages hold then


class KeptView:
    """A view that was kept for the backward graph; nobody else sees it, so no tensor is made."""

    __slots__ = ("look", "storage")

    def __init__(self, storage: LazyStorage, look: ResultLook) -> None:
        self.storage = storage
        self.look = look

    def value_at(self, root: Value) -> Value:
        """Its value, where its storage holds `root`."""
        return self.look.value if root is self.look.root else value_of(self.tensor())

    def tensor(self) -> LazyTensor:
        """The view as a tensor."""
        return _view(self.storage, self.look)


class SavedForBackward:
    """What the forward graph of a region has kept for its backward graph.

    Storages are enough where nobody else sees a tensor. An argument or a result whose memory was
    kept, by itself or through a view, must not be written to before it is used.
    """

    __slots__ = ("kept", "tensors", "versions")

    def __init__(self, kept: list[Any], args: list[Any], shown: list[Any]) -> None:
        self.kept = kept
        storages = {_storage(one) for one in kept}
        self.tensors = _on(storages, args)
        with _torch.without_modes():  # these have the versions of results, and no node
            self.tensors += [one.detach() for one in _on(storages, shown)]
        self.versions = versions_of(self.tensors)

    def unpack(self) -> list[Any]:
        """All that was kept, in order."""
        if versions_of(self.tensors) == self.versions:
            return self.kept
        for tensor, version in zip(self.tensors, self.versions, strict=True):
            if tensor._version != version:
                raise RuntimeError(
                    "one of the variables needed for gradient computation has been modified by an "
                    f"inplace operation: [{tensor.dtype} {list(tensor.shape)}] is at version "
                    f"{tensor._version}; expected version {version} instead"
                )
        return self.kept


def _on(storages: set[Any], items: list[Any]) -> list[torch.Tensor]:
    """The lazy tensors among these that are on one of these storages."""
    return [one for one in items if type(one) is LazyTensor and one._lazy_storage in storages]


class Backward(NamedTuple):
    """What makes a graph a backward graph."""

    types: tuple[TensorType, ...]  # of its last arguments: None for results that are not used
    without: Callable[[frozenset[int]], CapturedProgram | None]  # with some results not used


class Region:
    """One captured graph, and the calls of it that were met.

    `shown`: results after these are kept for the backward graph; the last result, which AOTAutograd
    keeps, holds them. `resumes`: the first argument is that result.
    """

    def __init__(
        self,
        program: CapturedProgram,
        shown: int | None = None,
        resumes: bool = False,
        backward: Backward | None = None,
        gives_gradients: bool = False,
    ) -> None:
        self.program = program
        self.gives_gradients = gives_gradients or backward is not None
        self.line = program.line()
        self.shown = shown
        self.resumes = resumes
        self.calls: OrderedDict[Key, RegionCall] = OrderedDict()
        self.generation = TABLE.generation
        self.backward = backward
        self.variants: dict[frozenset[int], Region | None] = {}

    def __call__(self, args: Sequence[Any]) -> list[Any]:
        """Record a call; its results are lazy tensors."""
        if self.resumes:
            args = [*args[0]._torpor_saved.unpack(), *args[1:]]
        if self.backward is not None:
            kept = len(args) - len(self.backward.types)
            unused = frozenset([i for i, one in enumerate(args[kept:]) if one is None])
            if unused:
                return self._without(unused, self.backward, args[:kept], args[kept:])
        return self._call(args)

    def _call(self, args: Sequence[Any]) -> list[Any]:
        known = list(args)
        if not self.program.writes and not _KNOWN.issuperset(map(type, known)):
            known = [_as_lazy(arg) for arg in known]
        drawn = [draw() for draw in self.program.draws]
        if get_backend().draws or not self._is_known(known):
            return self._shown(self._run(known, drawn), known)
        with TRACE.lock:
            key, epoch = self._key(known, drawn), TRACE.epoch
            call = self._find(key)
            if call is not None:
                metrics.count_line("RegionLookups", self.line)
                return self._repeat(call, known)
        return self._record(key, epoch, known, drawn)

    def _without(
        self,
        unused: frozenset[int],
        backward: Backward,
        kept: Sequence[Any],
        gradients: Sequence[Any],
    ) -> list[Any]:
        """The gradients where some results are not used."""
        if unused not in self.variants:
            program = backward.without(unused)
            variant = None if program is None else Region(program, gives_gradients=True)
            self.variants[unused] = variant
        variant = self.variants[unused]
        if variant is not None:
            return variant([*kept, *(one for one in gradients if one is not None)])
        with _torch.without_modes():  # others will come in the place of these gradients
            zeros = [torch.zeros(t.shape, dtype=t.dtype, device=t.device) for t in backward.types]
        pairs = zip(gradients, zeros, strict=True)
        return self._call([*kept, *(zero if one is None else one for one, zero in pairs)])

    def _is_known(self, args: list[Any]) -> bool:
        """All that it depends on is in the values of these arguments and of what it draws."""
        return self.program.is_pure and _KNOWN.issuperset(map(type, args))

    def _key(self, args: list[Any], drawn: list[Sequence[Any]]) -> Key:
        read = [*args, *(one for several in drawn for one in several)]
        values = NATIVE.library.region_values(read) if NATIVE.library is not None else None
        if values is None:
            values = tuple([_value(one) for one in read])
        if not self.program.writes:
            return (*values, get_backend())
        places: dict[Any, int] = {}  # which of them share memory
        shared = [places.setdefault(_storage(arg), i) for i, arg in enumerate(args)]
        return (*values, tuple(shared), get_backend())

    def _find(self, key: Key) -> RegionCall | None:
        if self.generation != TABLE.generation:
            self.calls.clear()
            self.generation = TABLE.generation
        return self.calls.get(key)

    def _record(
        self, key: Key, epoch: int, args: list[Any], drawn: list[Sequence[Any]]
    ) -> list[Any]:
        """Run the graph through the recorder, and remember what came of it.

        The key is of the trace `epoch`: another thread may have ended that.
        """
        metrics.count("RegionMisses")
        start = time.perf_counter()
        args = [_as_tensor(arg) for arg in args]
        with TRACE.lock:  # another thread may have written to an argument since
            is_same = TRACE.epoch == epoch and self._key(args, drawn) == key
            before = [arg if arg is None else root_value(arg._lazy_storage) for arg in args]
        with _RECORDS:
            promotes, config.promote_scalars = config.promote_scalars, False  # constants, by guards
            try:
                results = self._run(args, drawn)
            finally:
                config.promote_scalars = promotes
        with TRACE.lock:
            if is_same and TRACE.epoch == epoch:
                call = _call_of(args, before, results)
                if call is not None and self._is_own(call, key):
                    self._keep(key, call)
        metrics.time_line("RegionMisses", self.line, time.perf_counter() - start)
        return self._shown(results, args)

    def _is_own(self, call: RegionCall, key: Key) -> bool:
        """Nothing in it is of another thread, as far as can be told."""
        is_written = call.written and not self.program.writes
        return not is_written and _depends_on(call, {v for v in key if type(v) is Value})

    def _keep(self, key: Key, call: RegionCall) -> None:
        self.calls[key] = call
        while len(self.calls) > MOST_CALLS:
            self.calls.popitem(last=False)

    def _run(self, args: list[Any], drawn: list[Sequence[Any]]) -> list[Any]:
        with torch.no_grad(), _torch.without_modes():
            args = [_as_tensor(arg) for arg in args]
            results = self.program.run(args, drawn)
            return _apart(results, args) if self.gives_gradients else results

    def _shown(self, results: list[Any], args: list[Any]) -> list[Any]:
        """The results, and a tensor that holds those that are kept for the backward graph."""
        if self.shown is None:
            return results
        own = {id(arg) for arg in args}
        kept = [one if id(one) in own else _bare(one) for one in results[self.shown :]]
        shown = results[: self.shown]
        return [*shown, self._holder(kept, args, shown)]

    def _holder(self, kept: list[Any], args: list[Any], shown: list[Any]) -> Any:
        storage = next((one for one in kept if type(one) is LazyStorage), None)
        if storage is None:
            storage = _storage(next(one for one in kept if one is not None))
        holder: Any = wrap_storage(storage)
        holder._torpor_saved = SavedForBackward(kept, args, shown)
        return holder

    def _repeat(self, call: RegionCall, args: list[Any]) -> list[Any]:
        """The results of a call that was met before."""
        storages = storages_of(call.storages)
        shown = len(call.results) if self.shown is None else self.shown
        results = None
        if NATIVE.library is not None:
            results = NATIVE.library.region_results(storages, call.results, shown, args)
        if results is None:
            results = _results(call, storages, shown, args)
        for place, value in call.written:
            storage = args[place]._lazy_storage
            TRACE.enlist(storage)
            storage.data = None
            storage.value = value
        if self.shown is not None:
            results[shown:] = [self._holder(results[shown:], args, results[:shown])]
        return results


_KNOWN = frozenset({LazyTensor, LazyStorage, KeptView, type(None)})


def _storage(arg: Any) -> Any:
    if type(arg) is KeptView:
        return arg.storage
    return arg._lazy_storage if type(arg) is LazyTensor else arg


def _value(arg: Any) -> Any:
    if type(arg) is LazyTensor:
        return value_of(arg)
    if type(arg) is KeptView:
        return arg.value_at(root_value(arg.storage))
    return None if arg is None else root_value(arg)


def _as_tensor(arg: Any) -> Any:
    if type(arg) is KeptView:
        return arg.tensor()
    return wrap_storage(arg) if type(arg) is LazyStorage else arg


def _apart(results: list[Any], args: list[Any]) -> list[Any]:
    """Gradients, each on memory of its own: autograd keeps them, and adds to them in place.

    It sees by itself where one is an argument, or takes copies of that.
    """
    own, met = {*map(id, args)}, {_storage(arg) for arg in args}
    made: list[Any] = []
    for one in results:
        if type(one) is LazyTensor and id(one) not in own:
            if one._lazy_storage in met:
                one = _copy_of(one)
            met.add(one._lazy_storage)
        made.append(one)
    return made


def _copy_of(tensor: LazyTensor) -> Any:
    if tensor._lazy_view is not None:
        return tensor.clone()
    with TRACE.lock:
        [storage] = storages_of((root_value(tensor._lazy_storage),))
        return wrap_storage(storage)


def _bare(result: Any) -> Any:
    """All of a tensor that nobody else sees: its storage, if it is that."""
    is_whole = type(result) is LazyTensor and result._lazy_view is None
    return result._lazy_storage if is_whole else result


def _as_lazy(arg: Any) -> Any:
    """A plain tensor as it is now."""
    if type(arg) in _KNOWN or not isinstance(arg, torch.Tensor) or not is_traceable(arg):
        return arg
    with _torch.without_modes():
        return wrap_data(clone_plain(arg), arg.device)


def versions_of(items: list[Any]) -> list[int]:
    """The versions of the tensors among these."""
    if NATIVE.library is not None:
        return NATIVE.library.versions(items)  # type: ignore[no-any-return]  # C++
    return [one._version for one in items if isinstance(one, torch.Tensor)]


def storages_of(values: tuple[Value, ...]) -> list[LazyStorage]:
    """New storages that hold these values."""
    if NATIVE.library is not None:
        return NATIVE.library.region_storages(values)  # type: ignore[no-any-return]  # C++
    storages = [LazyStorage(value.type, value, None) for value in values]
    for storage in storages:
        TRACE.enlist(storage)
    return storages


def _results(
    call: RegionCall, storages: list[LazyStorage], shown: int, args: list[Any]
) -> list[Any]:
    """What a call gives; from `shown` on, for the backward graph alone."""
    results: list[Any] = []
    for place, one in enumerate(call.results):
        if type(one) is int and one >= 0:
            results.append(wrap_storage(storages[one]) if place < shown else storages[one])
        elif isinstance(one, ResultLook):
            storage = _storage(args[one.storage] if one.storage < 0 else storages[one.storage])
            results.append(KeptView(storage, one) if place >= shown else _view(storage, one))
        else:
            results.append(None if one is None else args[one])
    return results


# -- what came of a call ---------------------------------------------------------------------------


def _call_of(args: list[Any], before: list[Any], results: list[Any]) -> RegionCall | None:
    """A call as it can be repeated; None if it cannot."""
    places: dict[LazyStorage, int] = {}
    for place, arg in enumerate(args):
        if arg is not None:
            places.setdefault(arg._lazy_storage, place - len(args))
    own = {id(arg): place - len(args) for place, arg in enumerate(args) if arg is not None}
    storages: list[Value] = []
    found: list[Result] = []
    for result in results:
        if result is None or id(result) in own:
            found.append(None if result is None else own[id(result)])
            continue
        if type(result) is not LazyTensor:
            return None
        storage = result._lazy_storage
        if storage not in places:
            places[storage] = len(storages)
            storages.append(root_value(storage))
        is_whole = result._lazy_view is None and places[storage] >= 0
        look = places[storage] if is_whole else _look(result, places[storage])
        if look is None:
            return None
        found.append(look)
    written = [
        (place, root_value(arg._lazy_storage))
        for place, arg in enumerate(args)
        if arg is not None and root_value(arg._lazy_storage) is not before[place]
    ]
    return RegionCall(tuple(storages), tuple(found), tuple(written))


def _look(tensor: LazyTensor, place: int) -> ResultLook | None:
    """How a tensor looks at its storage; None if that holds for this trace only."""
    links = []
    view, root, value = tensor._lazy_view, root_value(tensor._lazy_storage), value_of(tensor)
    while view is not None:
        if type(view.base) is InThisTrace or type(view.value.type) is SymbolicType:
            return None
        links.append((view.node, view.index, view.value))
        view = view.parent
    return ResultLook(place, tuple(reversed(links)), root, value)


def _depends_on(call: RegionCall, known: set[Value]) -> bool:
    """All that came of a call is made of the values that were its key, and of constants."""
    todo = [*call.storages, *(value for _, value in call.written)]
    for look in call.results:
        todo += [value for _, _, value in look.links] if type(look) is ResultLook else []
    seen: set[Node] = set()
    while todo:
        value = todo.pop()
        if type(value.type) is SymbolicType:
            return False
        node = value.node
        if value in known or node in seen:
            continue
        if node.op in (LEAF, SCALAR, SIZE) or node.conditions:
            return False
        seen.add(node)
        todo += node.operands
    return True


def _view(storage: LazyStorage, look: ResultLook) -> LazyTensor:
    view: View | None = None
    for node, index, value in look.links:
        view = View(view, node, index, look.root, value)
    return wrap_view(storage, view, look.value.type)
