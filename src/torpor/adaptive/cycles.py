"""A step without an optimizer: a read that comes back to its place may end one.

A program that updates its tensors by hand and reads its loss never comes to rest: the update is
pending at each read, the trace goes on, and no graph is ever met again. So whoever reads is
remembered by where it is in the program, together with what was pending after it. When the same
trace comes back there and more is pending than before, that was a step: everything is computed, as
after an optimizer's step. The next read there ends the next step, and all of it is one graph.

Reads that ask one after the other for what is there (`[loss.item() for loss in losses]`) leave
nothing new behind; a read in the middle of a step is not met twice in it. Both compute their cone.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any, Final
from weakref import WeakSet

from torpor import config
from torpor.backend.registry import get_backend
from torpor.execute.storage import TRACE, LazyStorage
from torpor.observe.events import place_of_read

MAX_PLACES: Final = 256
_ENDS: Final = 0  # stands for what is pending after a read that ended a step: nothing

_reads: dict[int, tuple[int, int]] = {}
"""For each place that reads: the trace it left, and what was pending in it then."""


_due = -1
"""The trace that holds the whole step of an optimizer: it is cut before anything is added to it."""


_stepped: Any = None  # the optimizer that has made that step
_read_early: WeakSet[Any] = WeakSet()  # optimizers after whose steps something is read


def cut_later(optimizer: Any) -> bool:
    """An optimizer has made its step: whether the trace is cut when its gradients are gone.

    Not where the program reads something before that: the same step would be two graphs.
    """
    global _due, _stepped
    if not get_backend().cuts_at_zero_grad or optimizer in _read_early:
        return False
    _due, _stepped = TRACE.epoch, weakref.ref(optimizer)
    return True


def is_cut_due() -> bool:
    """The trace is to be cut before it is read or goes on."""
    return _due == TRACE.epoch


def note_early_read() -> None:
    """Something is read before the trace was cut."""
    optimizer = _stepped()
    if optimizer is not None:
        _read_early.add(optimizer)


def ends_step() -> bool:
    """This read ends a step, as the one before it in the same place did."""
    if not _reads or not config.cut_after_reads:
        return False
    return _reads.get(place_of_read()) == (TRACE.epoch, _ENDS)


def came_back(pending: Sequence[LazyStorage]) -> bool:
    """The trace was read in this place before, and other values than then are `pending` now."""
    if not config.cut_after_reads:
        return False
    place = place_of_read()
    now = hash(tuple([id(storage.value) for storage in pending])) or 1
    epoch, before = _reads.get(place, (-1, now))
    _remember(place, now)
    return epoch == TRACE.epoch and before != now


def step_ended() -> None:
    """The trace was cut by a read in this place."""
    _remember(place_of_read(), _ENDS)


def _remember(place: int, pending: int) -> None:
    if len(_reads) >= MAX_PLACES and place not in _reads:
        _reads.clear()
    _reads[place] = TRACE.epoch, pending
