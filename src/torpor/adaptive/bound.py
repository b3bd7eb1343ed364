"""Keep programs from being slower than eager: each group of models runs recorded or eagerly.

A `ModelGroup` (variable `place`) is the models and optimizers of one training loop: those called,
or stepped, between two optimizer steps belong together. `choice` decides when a group changes mode;
this module times events, converts tensors (`frontend.switching`), and warns the user, once.
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
"""How many groups are remembered, including those whose models are gone."""
CALLS_WITHOUT_STEP: Final = 64
"""After this many calls of a model without an optimizer step, each call counts as a step."""


class ModelGroup:
    """Models and optimizers that change together between recorded and eager mode."""

    def __init__(self, name: str, choice: Choice) -> None:
        self.name = name
        self.choice = choice
        self.site: Site | None = site()
        self.modules: list[ref[torch.nn.Module]] = []
        self.optimizers: list[ref[Any]] = []
        self.thread = threading.get_ident()
        self.is_shared = False  # used by several threads: its mode is fixed
        self.calls = 0  # since the last step of an optimizer
        self.stamp = -1  # number of the optimizer step before its latest call
        self.passes = -1  # autograd's count of backward passes at its latest call
        self.rest = self.granted = 0  # steps to skip without timing: remaining, and in all
        self.leaks = 0  # steps that recorded something although the group runs eagerly
        self.is_announced = False
        self.joined: ModelGroup | None = None  # the group that it was merged into

    def tensors(self) -> Iterator[Any]:
        """All tensors of its models and optimizers."""
        yield from self.model_tensors()
        for optimizer in _alive(self.optimizers):
            yield from state_of(optimizer)

    def model_tensors(self) -> Iterator[Any]:
        """The tensors of its models, and the parameters of its optimizers."""
        for module in _alive(self.modules):
            for part, _ in parts_of(module):
                yield from part._parameters.values()
                yield from part._buffers.values()
        for optimizer in _alive(self.optimizers):
            for group in optimizer.param_groups:
                yield from group["params"]

    def whole(self) -> ModelGroup:
        """The group that it was merged into, or itself."""
        place = self
        while place.joined is not None:
            place = place.joined
        return place

    def steps(self, recorded: bool) -> int:
        """The number of steps it ran in this mode."""
        unseen = 0 if recorded else self.granted - self.rest
        return self.choice.steps[recorded] + unseen

    def __str__(self) -> str:
        choice = self.choice
        how = "recorded" if choice.is_recorded else "eagerly"
        steps = f"{self.steps(True):,} steps recorded, {self.steps(False):,} eagerly"
        is_early = not (choice.is_recorded or choice.attempts)
        early = f"recording is tried after {choice.limits.start:.0f} s" if is_early else ""
        why = f": {choice.reason or early}" if choice.reason or early else ""
        return f"{self.name} ({self.site}) runs {how} now; {steps}{why}"


def _alive(references: Iterable[ref[Any]]) -> list[Any]:
    return [found for reference in references if (found := reference()) is not None]


def may_switch() -> bool:
    """Whether this is the user's own thread and program: not a worker, and not being traced."""
    return not (
        _torch.is_tracing()
        or threading.current_thread().name.startswith("torpor-")
        or TRACE.lock._is_owned()  # type: ignore[attr-defined]  # torpor itself calls the module
        or _torch.is_data_worker()
        or any(type(mode) is not LazyMode for mode in _torch.modes())
    )


class _Events(threading.local):
    """The events of one thread: loops on several threads interleave."""

    def __init__(self) -> None:
        self.met: list[ModelGroup] = []  # groups called since the last step of an optimizer
        self.stamp = 0  # number of that step
        self.last: ModelGroup | None = None  # the group of the last event
        self.last_number = 0
        self.last_time = 0.0
        self.last_compiling = 0.0


class Bound:
    """The model groups of this process, and the events of each thread."""

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.clock = clock
        self.limits = Limits()
        self.places: deque[ModelGroup] = deque(maxlen=MOST_PLACES)
        self.optimizers: WeakSet[Any] = WeakSet()
        self.of_optimizer: dict[int, ModelGroup] = {}  # by id
        self.stamp = 0  # optimizer steps so far
        self.events = _Events()
        self.lock = threading.RLock()

    def is_on(self) -> bool:
        """Whether groups choose their mode."""
        return config.bound == "auto"

    # -- events --------------------------------------------------------------------------------

    def meet(self, module: torch.nn.Module) -> ModelGroup | None:
        """The group of a model on its first call; None if it has no tensors.

        A submodule belongs to its model's group; a model made of several merges their groups.
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
        """An optimizer was made, or got more parameters: it is expected to step."""
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
        """An outermost call of a model of `place` begins; whether to record it."""
        place.calls += 1
        if (
            place.rest and place.optimizers and place.calls <= CALLS_WITHOUT_STEP
            and place.thread == threading.get_ident()
        ):  # fmt: skip
            return False  # it runs eagerly, and nothing is decided until the rest is over
        self._is_here(place)
        events = self.events
        if place.stamp != events.stamp:
            place.stamp = events.stamp
            events.met.append(place)
        if not place.optimizers or place.calls > CALLS_WITHOUT_STEP:
            self._step(place, number)
        elif place.choice.is_timing:
            self._event(place, number, False)
        if torch.is_grad_enabled():
            place.passes = _torch.backward_passes()
        return place.choice.is_recorded

    def _is_here(self, place: ModelGroup) -> None:
        if place.thread != threading.get_ident() and not place.is_shared:
            with self.lock:  # not while another thread changes its mode
                place.is_shared = True

    def is_recorded(self, optimizer: Any) -> bool:
        """Whether the group of an optimizer runs recorded."""
        place = self.of_optimizer.get(id(optimizer))
        return place is not None and place.choice.is_recorded

    def after_step(self, optimizer: Any) -> None:
        """An optimizer has stepped."""
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
            self.events.last = None  # the next interval cannot be timed
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
        else:  # check now: a step may take very long
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
        """Switch the mode of a group, between two steps or within one."""
        choice = place.choice
        is_finished = _torch.backward_passes() != place.passes  # backward of its last call has run
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
        """Merge the groups met since the last step of an optimizer, including the optimizer's."""
        with self.lock:
            if place is None:
                place = self._place_of(optimizer)
                self._add(place, optimizer)
            place = place.whole()
            for other in self.events.met:
                if other.whole() is not place:
                    self._join(place, other.whole())
            if place not in self.places:  # it was dropped from the deque
                self.places.append(place)
        return place

    def _place_of(self, optimizer: Any) -> ModelGroup:
        if self.events.met:
            return self.events.met[0].whole()
        for place in self.places:  # one of its optimizers may be new
            if _has_any(optimizer, set(map(id, place.model_tensors()))):
                return place
        return self._new(type(optimizer).__name__)

    def _join(self, place: ModelGroup, other: ModelGroup) -> None:
        """Merge `other` into `place`, which starts over in eager mode."""
        recorded = [p for p in (place, other) if p.choice.is_recorded]
        if any(map(self._to_eager, recorded)):
            return  # not possible now
        place.modules += other.modules
        place.optimizers += other.optimizers
        for optimizer in _alive(other.optimizers):
            self.of_optimizer[id(optimizer)] = place
        place.is_shared |= other.is_shared or other.thread != place.thread
        place.choice, other.joined = Choice(self.clock(), self.limits), place
        place.rest = place.granted = 0
        if other in self.places:  # it may have been dropped already
            self.places.remove(other)

    def _stop_leak(self, place: ModelGroup) -> None:
        """A loop that runs eagerly still has a lazy tensor: make it plain, if possible."""
        if ASKED.explicitly or any(p.choice.is_recorded for p in self.places):
            return
        place.leaks += 1
        if place.leaks & (place.leaks - 1) == 0 and may_switch():  # with exponential backoff
            to_plain((), all_lazy_tensors())
        else:
            sync.cut()


def _has_any(optimizer: Any, tensors: set[int]) -> bool:
    return any(id(p) in tensors for group in optimizer.param_groups for p in group["params"])


def _to_lazy(place: ModelGroup, is_finished: bool) -> str:
    """Make the plain tensors of a group lazy; the reason if that is impossible, else "".

    Tensors with shared memory stay plain, as in `enable`.
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
    """If a group lost only because of its recording overhead, have its models captured."""
    choice, modules = place.choice, _alive(place.modules)
    choice.lost_by = None
    if config.capture != "auto" or not choice.eager_step:
        return
    captured = ratio - (1.0 - FOUND) * recording_cost(modules) / choice.eager_step
    gain = (now - choice.began) * (1.0 - captured)  # if it runs as long again
    if captured < choice.limits.worth_capturing and capture_soon(modules, gain):
        choice.try_again()


def _wait_for_compiles() -> None:
    """Block: a program that uses all cores leaves none for the compile processes."""
    with phase(WAITING):
        COSTS.waited += COMPILER.wait_while_compiling()


def _end_threads() -> None:
    """End the queues' threads; they restart with the next job.

    OpenMP workers sleep early while other threads' workers exist: a loop of small kernels ran at a
    third of its speed.
    """
    for queue in queues():
        queue.end_thread()


def drain() -> None:
    """Wait for all submitted jobs."""
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
    """Warn that a group runs eagerly, or should but cannot: where, why, and what to change."""
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
    """How the latest graph differs from the most similar one, if graphs are new in every step."""
    record = HISTORY.records[-1] if HISTORY.records and choice.is_new_each_time else None
    found = None if record is None else record.difference
    if record is None or found is None:
        return ""
    return f"  graphs are made at: {record.site}\n  what changes: {found}\n"


BOUND = Bound()


def report() -> list[str]:
    """One line of text per group."""
    return [str(place) for place in BOUND.places]


metrics.add_gauge("Places", lambda: len(BOUND.places))
metrics.add_gauge("StepsEager", lambda: sum(p.steps(False) for p in BOUND.places))
metrics.add_gauge("StepsRecorded", lambda: sum(p.steps(True) for p in BOUND.places))
