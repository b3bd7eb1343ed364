"""What is recorded and not yet run: storages, and the one trace that all threads record into."""

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

    `value` is what the memory holds in the trace being recorded; None until the first use of data
    in a trace. `data` is None while the value is pending.
    """

    __slots__ = ("__weakref__", "data", "listed", "type", "value")

    def __init__(self, type_: TensorType, value: Value | None, data: BackendData | None) -> None:
        self.type = type_
        self.value = value
        self.data = data
        self.listed = False  # the trace knows this storage as one it may have to compute

    def hold(self, data: BackendData) -> None:
        """What is in it is computed, or will be: its sizes are numbers, whatever comes next."""
        self.data = data
        self.type = self.type.concrete


class Undo(Protocol):
    """What is rolled back, besides storages, if a trace fails: a step of an optimizer."""

    @property
    def gradients(self) -> Collection[Value | None]:
        """The values of those that it was made with."""

    def __call__(self) -> None:
        """Let it go back."""

    def concerns(self, storages: Collection[LazyStorage]) -> bool:
        """It has updated one of `storages`."""


class Trace:
    """All that was recorded since the last cut."""

    __slots__ = (
        "builder", "computed", "draws", "effects", "epoch", "leaf_storages", "leaf_values",
        "leaves", "lock", "misses", "pending", "scalars", "sized", "undo", "unlocked",
    )  # fmt: skip

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.builder = IrBuilder()  # the active backend's own, once there is one
        # storages that may need computing, in the order of recording; who dies goes by itself
        self.pending: dict[ref[LazyStorage], None] = {}
        self.leaves: list[BackendData] = []  # buffer of each leaf slot
        self.leaf_storages: list[tuple[LazyStorage, Value]] = []  # and the leaves they came in as
        self.leaf_values: dict[BackendData, Value] = {}
        self.scalars: list[Any] = []  # number of each run-time scalar slot
        self.computed: dict[Value, BackendData] = {}  # values read before the cut
        self.sized: dict[BackendData, TensorType] = {}  # types, with symbols, of buffers filled now
        self.undo: list[Undo] = []  # what else goes back if this trace fails
        self.draws = 0  # random ops recorded
        self.effects: list[LazyStorage] = []  # results of ops that run whoever asks for them
        self.epoch = 0
        self.misses = 0
        self.unlocked = 0  # threads that wait without the lock, in the middle of recording

    def leaf_value(self, storage: LazyStorage) -> Value:
        """Number a storage with data among the leaves of this trace."""
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
        """Number a Python number among the run-time scalars of this trace."""
        return self.builder.scalar(_append(self.scalars, number), number)

    def draw(self) -> int:
        """The number of a random op that is recorded."""
        self.draws += 1
        return self.draws

    def enlist(self, storage: LazyStorage) -> None:
        """Remember that `storage` may have to be computed."""
        if not storage.listed:
            self.pending[ref(storage, self.pending.pop)] = None
            storage.listed = True  # last: an interrupt in between must not lose the storage

    def is_at_work(self) -> bool:
        """This thread is recording an op or cutting, and was interrupted by a finalizer or signal.

        The trace may grow then, and values may be computed, but it must not be reset: what is being
        recorded has numbers of this trace in its hands.
        """
        return LOCK._is_owned()  # type: ignore[no-any-return,attr-defined]  # `Condition` uses it too

    def is_open(self) -> bool:
        """Something was recorded since the last cut, or has entered the trace."""
        return bool(self.pending or self.leaves)

    def live(self) -> list[LazyStorage]:
        """Storages somebody still holds whose value is pending."""
        if NATIVE.library is not None:
            found: list[LazyStorage] = NATIVE.library.live(self.pending)
            return found
        storages = [reference() for reference in list(self.pending)]
        return [s for s in storages if s is not None and s.data is None]

    def reset(self) -> None:
        """Forget values: what is alive is data now, and enters the next trace as leaves."""
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
    """Append `item`; where it is then. A finalizer that runs in between may append others."""
    place = len(items)
    items.append(item)
    while items[place] is not item:
        place += 1
    return place


TRACE = Trace()

LOCK = TRACE.lock
"""The lock itself: `TRACE.lock` is refused to type rules while one runs."""


@contextmanager
def unlocked() -> Iterator[None]:
    """Let go of the trace's lock in the body, however often this thread holds it.

    Nobody may wait for a queue under the lock: its thread may need the lock to go on. Meanwhile
    others may record and compute, but the trace is not reset: see `Trace.is_at_work`.
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
