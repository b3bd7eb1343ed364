"""Detect steps without an optimizer: a read that recurs at the same place may end a step.

If a program updates its tensors by hand and reads its loss, the update is pending at each read, so
the trace would never end and no graph would ever be a cache hit. Therefore each read's place in the
program is remembered with what was pending after it. If the same trace is read there again with
other values pending, a step has passed: everything is computed, as after an optimizer's step. The
next read at that place ends the next step, so all of that step is one graph.

Consecutive reads of existing results (`[loss.item() for loss in losses]`) change nothing that is
pending; a read in the middle of a step does not recur in it. Both compute only their cone.
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
_ENDS: Final = 0  # in place of a hash of what is pending: the read ended a step

_reads: dict[int, tuple[int, int]] = {}
"""For each place of a read: the trace's epoch, and a hash of what was pending after the read."""


_due = -1
"""Epoch of a trace that holds a complete optimizer step: it is cut before anything is added."""


_stepped: Any = None  # a weak reference to the optimizer that made that step
_read_early: WeakSet[Any] = WeakSet()  # optimizers after whose steps the program reads


def cut_later(optimizer: Any) -> bool:
    """After an optimizer's step: whether the cut waits until its gradients are freed.

    It does not if the program reads before that, because the step would become two graphs.
    """
    global _due, _stepped
    if not get_backend().cuts_at_zero_grad or optimizer in _read_early:
        return False
    _due, _stepped = TRACE.epoch, weakref.ref(optimizer)
    return True


def is_cut_due() -> bool:
    """Whether the trace has to be cut before it is read or extended."""
    return _due == TRACE.epoch


def note_early_read() -> None:
    """The program reads before the delayed cut."""
    optimizer = _stepped()
    if optimizer is not None:
        _read_early.add(optimizer)


def ends_step() -> bool:
    """Whether the previous read at this place ended a step; then this one does too."""
    if not _reads or not config.cut_after_reads:
        return False
    return _reads.get(place_of_read()) == (TRACE.epoch, _ENDS)


def came_back(pending: Sequence[LazyStorage]) -> bool:
    """Whether this trace was read at this place before, with other values pending than now."""
    if not config.cut_after_reads:
        return False
    place = place_of_read()
    now = hash(tuple([id(storage.value) for storage in pending])) or 1
    epoch, before = _reads.get(place, (-1, now))
    _remember(place, now)
    return epoch == TRACE.epoch and before != now


def step_ended() -> None:
    """A read at this place has cut the trace."""
    _remember(place_of_read(), _ENDS)


def _remember(place: int, pending: int) -> None:
    if len(_reads) >= MAX_PLACES and place not in _reads:
        _reads.clear()
    _reads[place] = TRACE.epoch, pending
