"""No program is slower than eager for long: each place in it runs recorded or eagerly by choice.

A place is the models and optimizers that one loop of a program steps: those that are called, or
step, between two steps of an optimizer are of one place. `choice` says when a place is to change;
here events are timed, tensors change (`switching`), and the user is told, once.
"""

from __future__ import annotations

import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final
from weakref import WeakSet, ref

import torch

from torpor import _torch, config, metrics
from torpor.adaptive.choice import Choice, Limits, ProcessFacts
from torpor.capture.modules import capture_soon, recording_cost
from torpor.capture.payoff import FOUND
from torpor.compiling.background import COMPILER
from torpor.compiling.remote import WORKER
from torpor.compiling.worth import COSTS, is_worth_waiting
from torpor.errors import PerformanceWarning
from torpor.execute import sync
from torpor.execute.queue import queues
from torpor.execute.storage import TRACE
from torpor.frontend.mode import LazyMode
from torpor.frontend.switching import (
    ASKED,
    all_lazy_tensors,
    convert,
    convert_parts,
    held_by_graph,
    parts_of,
    state_of,
    to_plain,
)
from torpor.observe.history import HISTORY
from torpor.observe.phases import COMPILING, TOTALS, WAITING, phase
from torpor.observe.site import Site, site

MOST_PLACES: Final = 64
"""Places that are remembered after their models are gone."""
CALLS_WITHOUT_STEP: Final = 64
"""Calls of a model after which each counts as a step, although there is an optimizer."""


class ModelGroup:
    """Models and optimizers that run recorded or eagerly together."""

    def __init__(self, name: str, choice: Choice) -> None:
        self.name = name
        self.choice = choice
        self.site: Site | None = site()
        self.modules: list[ref[torch.nn.Module]] = []
        self.optimizers: list[ref[Any]] = []
        self.thread = threading.get_ident()
        self.is_shared = False  # between threads: it stays what it is
        self.calls = 0  # since the last step of an optimizer
        self.stamp = -1  # of the step in which it was called last
        self.passes = -1  # backward passes before its last call that autograd saw
        self.rest = self.granted = 0  # steps that nobody looks at: still to come, and in all
        self.leaks = 0  # steps that recorded something although all is plain
        self.is_announced = False
        self.joined: ModelGroup | None = None  # it is a part of this one

    def tensors(self) -> Iterator[Any]:
        """All tensors of its models and optimizers."""
        yield from self.model_tensors()
        for optimizer in _alive(self.optimizers):
            yield from state_of(optimizer)

    def model_tensors(self) -> Iterator[Any]:
        """Those of its models, and what its optimizers step."""
        for module in _alive(self.modules):
            for part, _ in parts_of(module):
                yield from part._parameters.values()
                yield from part._buffers.values()
        for optimizer in _alive(self.optimizers):
            for group in optimizer.param_groups:
                yield from group["params"]

    def whole(self) -> ModelGroup:
        """The place that it is a part of by now, or itself."""
        place = self
        while place.joined is not None:
            place = place.joined
        return place

    def steps(self, recorded: bool) -> int:
        """Steps that it ran so, or eagerly."""
        unseen = 0 if recorded else self.granted - self.rest
        return self.choice.steps[recorded] + unseen

    def __str__(self) -> str:
        choice = self.choice
        how = "recorded" if choice.is_recorded else "eagerly"
        steps = f"{self.steps(True):,} steps recorded, {self.steps(False):,} eagerly"
        why = f": {choice.reason}" if choice.reason else ""
        return f"{self.name} ({self.site}) runs {how} now; {steps}{why}"


def _alive(references: Iterable[ref[Any]]) -> list[Any]:
    return [found for reference in references if (found := reference()) is not None]


def may_switch() -> bool:
    """This is the user's program, as it runs: nobody traces it, and it is no worker's."""
    return not (
        _torch.is_tracing()
        or threading.current_thread().name.startswith("torpor-")
        or TRACE.lock._is_owned()  # type: ignore[attr-defined]  # torpor itself calls the module
        or _torch.is_data_worker()
        or any(type(mode) is not LazyMode for mode in _torch.modes())
    )


class _Events(threading.local):
    """What has happened on a thread: loops of several threads run through each other."""

    def __init__(self) -> None:
        self.met: list[ModelGroup] = []  # since the last step of an optimizer
        self.stamp = 0  # of that step
        self.last: ModelGroup | None = None  # of the last event
        self.last_number = 0
        self.last_time = 0.0
        self.last_compiling = 0.0


class Bound:
    """The places of this process, and what has happened on each thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.limits = Limits()
        self.places: deque[ModelGroup] = deque(maxlen=MOST_PLACES)
        self.optimizers: WeakSet[Any] = WeakSet()
        self.of_optimizer: dict[int, ModelGroup] = {}  # by identity
        self.stamp = 0  # steps of optimizers so far
        self.events = _Events()
        self.lock = threading.RLock()

    def is_on(self) -> bool:
        """Places choose."""
        return config.bound == "auto"

    # -- events --------------------------------------------------------------------------------

    def meet(self, module: torch.nn.Module) -> ModelGroup | None:
        """The place of a model that is called for the first time; None if it has no tensors.

        A part of a model is of the model's place; a model made of several joins their places.
        """
        held = set(map(id, (*module.parameters(), *module.buffers())))
        if not held:
            return None
        with self.lock:
            here = [p for p in self.places if p.thread == threading.get_ident()]
            known = [p for p in here if not held.isdisjoint(map(id, p.model_tensors()))]
            place = known[0] if known else self._new(type(module).__name__)
            self.events.met += known[1:]
            place.modules = [r for r in place.modules if r() is not None] + [ref(module)]
            for optimizer in list(self.optimizers):
                if id(optimizer) not in self.of_optimizer and _has_any(optimizer, held):
                    self._add(place, optimizer)
        return place

    def got_parameters(self, optimizer: Any) -> None:
        """An optimizer was made, or got more parameters: it will step."""
        self.optimizers.add(optimizer)

    def _add(self, place: ModelGroup, optimizer: Any) -> None:
        number = id(optimizer)
        place.optimizers.append(ref(optimizer, lambda _: self.of_optimizer.pop(number, None)))
        self.of_optimizer[number] = place

    def _new(self, name: str) -> ModelGroup:
        choice = Choice(self.clock(), self.limits)
        if _torch.is_distributed():
            choice.record_always()
        place = ModelGroup(name, choice)
        self.places.append(place)
        WORKER.idle = True
        return place

    def before_call(self, place: ModelGroup, number: int) -> bool:
        """A model of `place` is called, by no other model; whether it is to be recorded."""
        self._is_here(place)
        events = self.events
        if place.stamp != events.stamp:
            place.stamp = events.stamp
            events.met.append(place)
        place.calls += 1
        if not place.optimizers or place.calls > CALLS_WITHOUT_STEP:
            self._step(place, number)
        elif place.choice.is_timing:
            self._event(place, number, False)
        if torch.is_grad_enabled():
            place.passes = _torch.backward_passes()
        return place.choice.is_recorded

    def _is_here(self, place: ModelGroup) -> None:
        if place.thread != threading.get_ident() and not place.is_shared:
            with self.lock:  # not while it changes
                place.is_shared = True

    def is_recorded(self, optimizer: Any) -> bool:
        """The place of an optimizer is recorded."""
        place = self.of_optimizer.get(id(optimizer))
        return place is not None and place.choice.is_recorded

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has made a step."""
        place = self.of_optimizer.get(id(optimizer))
        events = self.events
        if place is None or any(other is not place for other in events.met):
            place = self._joined(optimizer, place)
        self._is_here(place)
        events.met.clear()
        self.stamp += 1
        events.stamp = self.stamp
        place.calls = 0
        self._step(place, id(optimizer))
        if TRACE.is_open() and not place.choice.is_recorded:
            self._stop_leak(place)

    def _step(self, place: ModelGroup, number: int) -> None:
        if place.rest:
            place.rest -= 1
            self.events.last = None  # the interval that ends now is unknown
            return
        choice = place.choice
        if place.granted:
            choice.skip(place.granted)
        self._event(place, number, True)
        place.rest = place.granted = place.choice.rests()

    def _event(self, place: ModelGroup, number: int, is_step: bool) -> None:
        choice, events = place.choice, self.events
        if choice.drain and is_step:
            drain()
        elif choice.is_timing and not choice.is_recorded:
            _torch.finish_gpu()
        now = self.clock()
        if choice.is_timing and events.last is place:
            seconds = now - events.last_time - (TOTALS[COMPILING] - events.last_compiling)
            choice.interval((events.last_number, number), seconds)
        events.last, events.last_number, events.last_time = place, number, now
        events.last_compiling = TOTALS[COMPILING]
        if is_step:
            if choice.waits and is_worth_waiting(now - choice.began):
                _wait_for_compiles()
                now = events.last_time = self.clock()
            wish = choice.step(_facts(), now)
            if choice.lost_by is not None:
                _consider_capturing(place, choice.lost_by, now)
        else:  # a step may take very long
            wish = choice.is_overdrawn(now)
            if wish:
                choice.fail()
        if wish and self._may_change(place):
            self._change(place, is_step and (not place.calls or not place.optimizers))
            events.last_time = self.clock()
            place.choice.pay(events.last_time - now)

    # -- changes -------------------------------------------------------------------------------

    def _may_change(self, place: ModelGroup) -> bool:
        is_bound = place.is_shared or _torch.is_in_backward() or _torch.is_distributed()
        return not is_bound and may_switch()

    def _change(self, place: ModelGroup, is_between: bool) -> None:
        """Let a place run the other way, between two steps or in one."""
        choice = place.choice
        is_finished = _torch.backward_passes() != place.passes  # what its last call has recorded
        with self.lock:
            change = self._to_eager if choice.is_recorded else _to_lazy
            refusal = change(place, is_finished)
        if refusal:
            choice.refused(refusal, is_between)
        else:
            choice.changed(self.clock())
            metrics.count("BoundSwitch")
            if not any(p.choice.is_recorded for p in list(self.places)):
                _end_threads()
        if choice.is_decided and not place.is_announced:
            place.is_announced = True
            tell(place)

    def _to_eager(self, place: ModelGroup, is_finished: bool = True) -> str:
        others = [p for p in self.places if p is not place and p.choice.is_recorded]
        extra = () if others or ASKED.explicitly else all_lazy_tensors()
        return to_plain(place.tensors(), extra, is_finished)

    def _joined(self, optimizer: Any, place: ModelGroup | None) -> ModelGroup:
        """All that was met since the last step of an optimizer, and this one, are of one place."""
        with self.lock:
            if place is None:
                place = self._place_of(optimizer)
                self._add(place, optimizer)
            place = place.whole()
            for other in self.events.met:
                if other.whole() is not place:
                    self._join(place, other.whole())
            if place not in self.places:  # it was forgotten
                self.places.append(place)
        return place

    def _place_of(self, optimizer: Any) -> ModelGroup:
        if self.events.met:
            return self.events.met[0].whole()
        for place in self.places:  # of several optimizers one may not have been seen yet
            if _has_any(optimizer, set(map(id, place.model_tensors()))):
                return place
        return self._new(type(optimizer).__name__)

    def _join(self, place: ModelGroup, other: ModelGroup) -> None:
        """`other` becomes a part of `place`, which starts anew, eagerly."""
        recorded = [p for p in (place, other) if p.choice.is_recorded]
        if any(map(self._to_eager, recorded)):
            return  # not now
        place.modules += other.modules
        place.optimizers += other.optimizers
        for optimizer in _alive(other.optimizers):
            self.of_optimizer[id(optimizer)] = place
        place.is_shared |= other.is_shared or other.thread != place.thread
        place.choice, other.joined = Choice(self.clock(), self.limits), place
        place.rest = place.granted = 0
        if other in self.places:  # the oldest are forgotten
            self.places.remove(other)

    def _stop_leak(self, place: ModelGroup) -> None:
        """Something lazy is left that an eager loop goes on with: it becomes plain if it can."""
        if ASKED.explicitly or any(p.choice.is_recorded for p in self.places):
            return
        place.leaks += 1
        if place.leaks & (place.leaks - 1) == 0 and may_switch():  # ever more seldom
            to_plain((), all_lazy_tensors())
        else:
            sync.cut()


def _has_any(optimizer: Any, tensors: set[int]) -> bool:
    return any(id(p) in tensors for group in optimizer.param_groups for p in group["params"])


def _to_lazy(place: ModelGroup, is_finished: bool) -> str:
    """Make what is plain in a place lazy; why that cannot be, "" if it is done.

    Tensors whose memory is shared stay plain, as `enable` leaves them.
    """
    refusal = held_by_graph(place.tensors(), is_finished)
    if refusal:
        return refusal
    for module in _alive(place.modules):
        convert_parts(list(parts_of(module)), running=True)
    for optimizer in _alive(place.optimizers):
        for group in optimizer.param_groups:
            convert(group["params"], running=True)
        convert((tensor for tensor in state_of(optimizer) if tensor.dim()), running=True)
    return ""


def _consider_capturing(place: ModelGroup, ratio: float, now: float) -> None:
    """A place may have lost only by what recording it takes: then its models are captured."""
    choice, modules = place.choice, _alive(place.modules)
    choice.lost_by = None
    if config.capture != "auto" or not choice.eager_step:
        return
    captured = ratio - (1.0 - FOUND) * recording_cost(modules) / choice.eager_step
    gain = (now - choice.began) * (1.0 - captured)  # in as long a time again
    if captured < choice.limits.worth_capturing and capture_soon(modules, gain):
        choice.try_again()


def _wait_for_compiles() -> None:
    """Stand still: a program that keeps all cores busy leaves none to who compiles for it."""
    with phase(WAITING):
        COSTS.waited += COMPILER.wait_while_compiling()


def _end_threads() -> None:
    """End the queues' threads, which start again with the next job.

    OpenMP lets threads sleep early while those of others exist: a loop of small kernels ran at a
    third of its speed.
    """
    for queue in queues():
        queue.end_thread()


def drain() -> None:
    """Wait until all that was submitted has run."""
    for queue in queues():
        queue.wait()
    _torch.finish_gpu()


def _facts() -> ProcessFacts:
    return ProcessFacts(
        sync.PLANS.serial,
        metrics.counted("InterpretedGraph"),
        metrics.counted("UncachedCompile"),
        bool(COMPILER.unfinished) and COMPILER.is_compiling(),
    )


def tell(place: ModelGroup) -> None:
    """Warn that a place runs eagerly, or should and cannot: where, why, and what to change."""
    choice = place.choice
    if choice.is_recorded:
        what = f"is slower recorded than eagerly, and cannot run eagerly: {choice.reason}"
    else:
        what = f"runs eagerly from here on: {choice.reason}"
    text = f"{place.name} {what}\n{_what_changes(choice)}" + (
        "  torpor.explain() says more; it is tried again now and then, and always recorded with "
        'torpor.config.bound = "off"'
    )
    where = place.site
    if where is None:
        warnings.warn(text, PerformanceWarning, stacklevel=2)
    else:
        warnings.warn_explicit(text, PerformanceWarning, where.file, where.line)


def _what_changes(choice: Choice) -> str:
    """How the latest graph differs from the one most like it, if graphs do not come back."""
    record = HISTORY.records[-1] if HISTORY.records and choice.is_new_each_time else None
    found = None if record is None else record.difference
    if record is None or found is None:
        return ""
    return f"  graphs are made at: {record.site}\n  what changes: {found}\n"


BOUND = Bound()


def report() -> list[str]:
    """How each place runs, in words."""
    return [str(place) for place in BOUND.places]


metrics.add_gauge("Places", lambda: len(BOUND.places))
metrics.add_gauge("StepsEager", lambda: sum(p.steps(False) for p in BOUND.places))
metrics.add_gauge("StepsRecorded", lambda: sum(p.steps(True) for p in BOUND.places))
