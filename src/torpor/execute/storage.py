"""Storages and their pending values, and the one trace that all threads record into."""

from __future__ import annotations

import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any, Protocol
from weakref import ref

from torpor.backend.builder import IrBuilder
from torpor.backend.data import BackendData
from torpor.backend.native_library import NATIVE
from torpor.ir.node import Value
from torpor.ir.types import TensorType
from torpor.observe.events import STEP
from torpor.symbols.leaves import SIZES


class LazyStorage:
    """Memory shared by a tensor and its views: a recorded value, data, or both.

    `value` is what the memory holds in the current trace; None until data are first used in a
    trace. `data` is None while the value is pending.
    """

    __slots__ = ("__weakref__", "data", "listed", "type", "value")

    def __init__(self, type_: TensorType, value: Value | None, data: BackendData | None) -> None:
        self.type = type_
        self.value = value
        self.data = data
        self.listed = False  # it is in `Trace.pending`

    def hold(self, data: BackendData) -> None:
        """Set its data, computed or in flight. Its sizes are fixed from now on: no symbols."""
        self.data = data
        self.type = self.type.concrete


class Undo(Protocol):
    """Something besides storages that is rolled back if a trace fails: a step of an optimizer."""

    @property
    def gradients(self) -> Collection[Value | None]:
        """The values of the gradients that the step used."""

    def __call__(self) -> None:
        """Roll back."""

    def concerns(self, storages: Collection[LazyStorage]) -> bool:
        """Whether it updated one of `storages`."""


class Trace:
    """Everything that was recorded since the last cut."""

    __slots__ = (
        "builder", "computed", "draws", "effects", "epoch", "leaf_storages", "leaf_values",
        "leaves", "lock", "misses", "pending", "scalars", "sized", "undo", "unlocked",
    )  # fmt: skip

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.builder = IrBuilder()  # replaced by the active backend's
        # storages that may need computing, in order of recording; dead ones remove themselves
        self.pending: dict[ref[LazyStorage], None] = {}
        self.leaves: list[BackendData] = []  # the buffer of each leaf slot
        self.leaf_storages: list[tuple[LazyStorage, Value]] = []  # storages that entered, as leaves
        self.leaf_values: dict[BackendData, Value] = {}
        self.scalars: list[Any] = []  # the number of each run-time scalar slot
        self.computed: dict[Value, BackendData] = {}  # values already computed by reads
        self.sized: dict[BackendData, TensorType] = {}  # symbolic types of buffers made this trace
        self.undo: list[Undo] = []  # what else to roll back if this trace fails
        self.draws = 0  # random ops recorded
        self.effects: list[LazyStorage] = []  # results of ops with side effects: always computed
        self.epoch = 0
        self.misses = 0
        self.unlocked = 0  # threads inside `unlocked` that were recording or cutting

    def leaf_value(self, storage: LazyStorage) -> Value:
        """Make the data of `storage` a leaf of this trace."""
        data = storage.data
        assert data is not None, "a storage has a value or data"
        value = self.leaf_values.get(data)
        if value is None or value.type.concrete is not storage.type:
            if not self.leaves:
                STEP.begin()
            type_ = storage.type
            slot = _append(self.leaves, data)
            if SIZES.active:
                known = self.sized.get(data)
                type_ = known or SIZES.leaf_type(slot, storage, self.epoch)
            value = self.leaf_values[data] = self.builder.device_data(slot, type_)
        self.leaf_storages.append((storage, value))
        storage.value = value
        return value

    def scalar_value(self, number: Any) -> Value:
        """Make a Python number a run-time scalar of this trace."""
        return self.builder.scalar(_append(self.scalars, number), number)

    def draw(self) -> int:
        """The index of a random op that is being recorded."""
        self.draws += 1
        return self.draws

    def enlist(self, storage: LazyStorage) -> None:
        """Register `storage` as one that may have to be computed."""
        if not storage.listed:
            self.pending[ref(storage, self.pending.pop)] = None
            storage.listed = True  # last: an interrupt in between must not lose the storage

    def is_at_work(self) -> bool:
        """Whether this thread holds the lock: a finalizer or signal interrupted it while recording.

        The trace may grow then, and values may be computed, but it must not be reset: the
        interrupted call uses slots of this trace.
        """
        return LOCK._is_owned()  # type: ignore[no-any-return,attr-defined]  # `Condition` uses it too

    def is_open(self) -> bool:
        """Whether anything was recorded, or has become a leaf, since the last cut."""
        return bool(self.pending or self.leaves)

    def live(self) -> list[LazyStorage]:
        """Storages that are still referenced and whose value is pending."""
        if NATIVE.library is not None:
            found: list[LazyStorage] = NATIVE.library.live(self.pending)
            return found
        storages = [reference() for reference in list(self.pending)]
        return [s for s in storages if s is not None and s.data is None]

    def reset(self) -> None:
        """Drop all values: live storages have data now, and enter the next trace as leaves."""
        self._forget_values()
        self.pending.clear()
        self.leaves.clear()
        self.leaf_storages.clear()
        self.leaf_values.clear()
        self.scalars.clear()
        self.computed.clear()
        self.sized.clear()
        self.undo.clear()
        self.effects.clear()
        self.draws = 0
        self.misses = 0
        self.epoch += 1

    def _forget_values(self) -> None:
        if NATIVE.library is not None:
            NATIVE.library.forget(self.pending, self.leaf_storages)
            return
        for storage in [reference() for reference in list(self.pending)]:
            if storage is not None:
                storage.value = None
                storage.listed = False
        for storage, _ in self.leaf_storages:
            storage.value = None


def _append(items: list[Any], item: Any) -> int:
    """Append `item` and return its index. A finalizer that runs in between may append too."""
    place = len(items)
    items.append(item)
    while items[place] is not item:
        place += 1
    return place


TRACE = Trace()

LOCK = TRACE.lock
"""The real lock: `TRACE.lock` may be replaced by one that is denied to type rules."""


@contextmanager
def unlocked() -> Iterator[None]:
    """Release the trace's lock in the body, however many times this thread holds it.

    No thread may wait for a queue under the lock: the queue's thread may need it. Meanwhile other
    threads may record and compute, but the trace is not reset (`Trace.is_at_work`).
    """
    if not LOCK._is_owned():  # type: ignore[attr-defined]  # as above
        yield
        return
    TRACE.unlocked += 1
    held = LOCK._release_save()  # type: ignore[attr-defined]  # as above
    try:
        yield
    finally:
        LOCK._acquire_restore(held)  # type: ignore[attr-defined]  # as above
        TRACE.unlocked -= 1
