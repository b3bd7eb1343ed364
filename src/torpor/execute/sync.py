"""Sync: turn recorded values into data.

`cut` ends the trace and computes everything live. `compute` computes the requested values and those
computed on the way to them, and leaves the rest of the trace pending.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from torpor import config, metrics
from torpor.adaptive.at_once import Turn, may_run_at_once
from torpor.adaptive.cycles import came_back, ends_step, is_cut_due, note_early_read, step_ended
from torpor.backend.data import BackendData, Done
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend, draw_seed
from torpor.backend.interrupts import Shield
from torpor.backend.native_library import NATIVE
from torpor.backend.registry import get_backend, on_change
from torpor.errors import CompileError
from torpor.execute.plan import (
    CARRIED,
    COMPUTED,
    SCALARS,
    SIZE_NOW,
    Outline,
    Plan,
    in_launch_order,
    needed_graph,
)
from torpor.execute.plan_cache import Making, PlanCache
from torpor.execute.queue import queue_of, queues
from torpor.execute.storage import LOCK, TRACE, LazyStorage
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, Value
from torpor.ir.types import TensorType
from torpor.observe.events import STEP, refuse_read, was_read
from torpor.observe.phases import COMPILING, PLANNING, TOTALS, WAITING, phase
from torpor.observe.watch import WATCHERS
from torpor.symbols.leaves import SIZES
from torpor.transactions.donation import donations
from torpor.transactions.transaction import Saved, StepJob, give_handles

PLANS = PlanCache()


def cut(device: torch.device | None = None, awaited: bool = False) -> None:
    """End the trace; submit everything live (on `device`) to the queues of its devices.

    `awaited`: the caller will wait for the results immediately.

    Changes to the trace are not interrupted; compiling, running and waiting may be.
    """
    with Shield() as shield:
        if TRACE.is_at_work():
            _start(TRACE.live(), device, shield)
            return
        with phase(PLANNING) as now, _undisturbed():
            jobs = _cut(device, now, awaited)
        _serve(jobs, shield)
    metrics.count("MarkStep")
    if NATIVE.at_cut is not None:
        NATIVE.at_cut()


def _cut(device: torch.device | None, now: float, awaited: bool) -> list[StepJob]:
    live = TRACE.live()
    chosen = live if device is None else [s for s in live if s.type.device == device]
    if TRACE.unlocked or len(chosen) < len(live):
        return _compute(chosen, awaited)
    STEP.end(TRACE.misses, now)
    groups = _by_device(live)
    several = len(groups) > 1
    jobs: list[StepJob] = []
    try:
        for group in groups:
            wanted: list[Any] = [s.value for s in group]
            jobs += _launch(live if several else group, wanted, partial=several, ends=True)
        TRACE.reset()  # before enqueuing: a buffer that the trace references is not donated
    finally:
        _enqueue(jobs, awaited)
    STEP.read_at = STEP.last_asked = ""
    return jobs


def compute(storages: Sequence[LazyStorage], awaited: bool = False) -> None:
    """Start computing `storages` and what they depend on; the trace goes on.

    `awaited`: this thread will wait for the results immediately.
    """
    if is_cut_due() and not TRACE.is_at_work():
        cut(awaited=awaited)
    with Shield() as shield:
        _start(storages, None, shield, awaited)


def _start(
    storages: Sequence[LazyStorage],
    device: torch.device | None,
    shield: Shield,
    awaited: bool = False,
) -> None:
    with phase(PLANNING), _undisturbed():
        chosen = [s for s in storages if device is None or s.type.device == device]
        jobs = _compute(chosen, awaited)
    _serve(jobs, shield)


def _compute(storages: Sequence[LazyStorage], awaited: bool = False) -> list[StepJob]:
    jobs: list[StepJob] = []
    try:
        for group in _by_device([s for s in storages if s.data is None]):
            wanted: list[Any] = [s.value for s in group if s.data is None]
            jobs += _launch(TRACE.live(), wanted, partial=True)
    finally:
        _enqueue(jobs, awaited)
    return jobs


class _undisturbed:  # a class: faster than a generator
    """Holds the trace's lock and suspends garbage collection, so that no finalizers run."""

    __slots__ = ("collects",)

    def __enter__(self) -> None:
        TRACE.lock.__enter__()  # checked: type rules may not take it
        self.collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self.collects:
            gc.enable()
        LOCK.release()


def _enqueue(jobs: list[StepJob], awaited: bool = False) -> None:
    for job in jobs:
        job.awaited = awaited
        queue_of(job.device).enqueue(job)


def _serve(jobs: list[StepJob], shield: Shield) -> None:
    """Compile and run enqueued jobs, or leave them to their threads; on an interrupt, leave all."""
    while jobs:
        job = jobs.pop(0)
        try:
            queue_of(job.device).serve(job, shield)
        except BaseException:
            for other in jobs:
                queue_of(other.device).leave(other)
            raise


def rest() -> None:
    """After a read: start a new trace if nothing is pending, or if the read ends a step.

    Otherwise, the trace of a program that only ever reads would grow forever.
    """
    if not TRACE.is_open():
        return
    at_work = TRACE.is_at_work()
    with Shield(), _undisturbed():
        if at_work:
            return
        pending = [] if _reset_at_rest(time.perf_counter()) else TRACE.live()
    if not pending:
        _rested()
    elif len(TRACE.leaves) + len(TRACE.pending) > config.max_trace_nodes:
        cut()
    elif came_back(pending):
        _end_step(awaited=False)


def _reset_at_rest(now: float) -> bool:
    """Start a new trace if nothing recorded until `now` is pending; whether it did."""
    if TRACE.unlocked or TRACE.live():
        return False
    STEP.end(TRACE.misses, now)
    TRACE.reset()
    return True


def _rested() -> None:
    """A read left nothing pending."""
    STEP.read_at = STEP.last_read
    if NATIVE.at_cut is not None:
        NATIVE.at_cut()


def _end_step(awaited: bool) -> None:
    cut(awaited=awaited)
    step_ended()


def _by_device(storages: Sequence[LazyStorage]) -> list[list[LazyStorage]]:
    types = {storage.type for storage in storages}  # cheap: few types, compared by identity
    if len({type_.device for type_ in types}) == 1:
        return [list(storages)]
    groups: dict[torch.device, list[LazyStorage]] = {}
    for storage in storages:
        groups.setdefault(storage.type.device, []).append(storage)
    return list(groups.values())


def _compute_at_once(storage: LazyStorage) -> bool:
    """Compute what a read needs on this thread, if possible (`adaptive/at_once.py`).

    No state changes before the results exist; if this is not possible, the usual path is taken.
    Returns whether nothing is pending now and a new trace has begun.
    """
    if TRACE.is_at_work() or WATCHERS:
        return False
    with phase(PLANNING) as now, Shield() as shield:
        with _undisturbed():
            live, epoch = TRACE.live(), TRACE.epoch
            turn = None if storage.data is not None else _turn(storage, live)
        results = None if turn is None else turn.take(shield)
        if turn is None or results is None:
            return False
        with _undisturbed():
            if TRACE.epoch != epoch:
                return False
            metrics.count("SyncedTensors", len(results))
            TRACE.computed.update(zip(turn.plan.outputs, results, strict=True))
            _settle(live, [])
            return _reset_at_rest(now)


def _turn(storage: LazyStorage, live: list[LazyStorage]) -> Turn | None:
    """A run of the graph that a read needs; None if it should not run on this thread."""
    pending = _settle(live, [storage.value])  # type: ignore[list-item]  # no data: a value is set
    if not pending:
        return None
    backend = get_backend()
    device = backend.backend_device(storage.type.device)
    others = tuple({s.value: None for s in live if s.data is None})
    key = (backend, device, pending, others, tuple(TRACE.computed))
    plan = PLANS.plans.get(key)
    if plan is None or not may_run_at_once(plan) or not queue_of(device).is_idle():
        return None
    PLANS.find(key)
    return Turn(plan, device, _arguments(plan, backend, device))


def _launch(
    live: list[LazyStorage], wanted: list[Value], partial: bool = False, ends: bool = False
) -> list[StepJob]:
    """Give the storages in `live` their handles; returns the job that fills them, if one is needed.

    `partial`: not everything live is computed. `ends`: the trace is reset afterwards.
    """
    known, pending = TRACE.computed, _settle(live, wanted)
    if not pending:
        return []
    backend = get_backend()
    device = backend.backend_device(pending[0].type.device)
    others = tuple({s.value: None for s in live if s.data is None}) if partial else ()
    key = (backend, device, pending, others, tuple(known))
    metrics.count("SyncedTensors", len(pending))
    found = PLANS.find(key)
    if found is None:
        graph = needed_graph(pending, others, known) if partial else Graph.of(pending, known)  # type: ignore[arg-type]  # no data: values are set
        graph = in_launch_order(graph, known)
        donated = donations(graph) if backend.takes_donations and not partial else {}
        found = PLANS.begin(key, graph, backend, device, donated)
    job = _job(found, backend, device)
    if not job.is_ready():
        job.saved = Saved(partial=not ends)
    job.ends = ends
    if ends:
        job.undo = tuple(TRACE.undo)
    values: list[Any] = [s.value for s in live] if partial else wanted
    give_handles(job, live, values if partial or len(wanted) > len(pending) else ())
    if partial:
        known.update(zip(job.outline.outputs, job.results, strict=True))
    return [job]


def _job(found: Plan | Making, backend: Backend, device: BackendDevice) -> StepJob:
    """One run of a plan, with a handle for each output."""
    plan: Outline = found.outline if isinstance(found, Making) else found
    types = tuple(type_.concrete for type_ in plan.types) if plan.sized else plan.types
    done, arguments = Done(), _arguments(plan, backend, device)
    handles = placeholders(backend, device, types, done)
    return StepJob(found, backend, device, arguments, handles, types, done)


def _arguments(plan: Outline, backend: Backend, device: BackendDevice) -> list[Any]:
    """The arguments of a run of `plan`, from the trace."""
    arguments: list[Any] = list(plan.leaves(TRACE.leaves))
    for position, source, place in plan.others:
        arguments.insert(
            position,
            TRACE.computed[place] if source == COMPUTED
            else TRACE.scalars[place] if source == SCALARS
            else place if source == CARRIED
            else place.value if source == SIZE_NOW
            else backend.data_from_scalar(TRACE.scalars[place], device),
        )  # fmt: skip
    if plan.draws and backend.draws_from_seed:
        arguments.append(draw_seed())
    return arguments


def _settle(live: list[LazyStorage], wanted: list[Value]) -> tuple[Value, ...]:
    """Give storages whose value is a leaf, or computed already, their data.

    Returns the wanted values that are neither, without duplicates.
    """
    known = TRACE.computed
    if NATIVE.library is not None:
        pending: tuple[Value, ...] = NATIVE.library.settle(live, wanted, TRACE.leaves, known)
        return pending
    for storage in live:
        value = storage.value
        assert value is not None, "a live storage has a value"
        if value.node.op is LEAF:
            storage.hold(TRACE.leaves[value.node.args[0]])
        elif known and value in known:
            storage.hold(known[value])
    return tuple([v for v in dict.fromkeys(wanted) if v not in known and v.node.op is not LEAF])


def placeholders(
    backend: Backend,
    device: BackendDevice,
    types: tuple[TensorType, ...],
    done: Done | None = None,
) -> list[BackendData]:
    """A handle for each result of a graph; it is filled when `done` is set."""
    is_usual = getattr(backend.placeholder, "__func__", None) is Backend.placeholder
    if is_usual and NATIVE.library is not None:
        handles: list[BackendData] = NATIVE.library.handles(device, types, done)
        return handles
    handles = [backend.placeholder(device, type_) for type_ in types]
    for handle in handles:
        handle.done = done
    return handles


def wait(device: torch.device | None = None) -> None:
    """Block until the queues (the queue of `device`) are empty; raise unreported errors."""
    if is_cut_due():
        cut(device)
    chosen = queues(None if device is None else get_backend().backend_device(device))
    with phase(WAITING):
        for device_queue in chosen:
            device_queue.wait()
    raise_errors(device)


def raise_errors(device: torch.device | None = None) -> None:
    """Raise the first error of a graph that was not reported yet."""
    try:
        for each in queues(None if device is None else get_backend().backend_device(device)):
            each.raise_error()
    except Exception:
        _leave_nothing()
        raise


def _finish_before_change(old: Backend | None, new: Backend) -> None:
    """Before the backend changes: finish pending work and drop compiled plans.

    What the old backend cannot compile stays pending, for the new one.
    """
    try:
        if old is not None and old is not new:
            _finish()
    finally:
        TRACE.builder = new.ir_builder()


def _finish() -> None:
    try:
        with contextlib.suppress(CompileError):
            cut()
        wait()
    finally:
        PLANS.clear()
        SIZES.clear()


on_change(_finish_before_change)


def read(storage: LazyStorage) -> Any:
    """The data of `storage`, computed; if that has to be waited for, this is a hidden sync."""
    data = storage.data
    if data is not None and data.is_over():
        return data.wait()
    refuse_read()
    start, made = time.perf_counter(), TOTALS[PLANNING] + TOTALS[COMPILING]
    at_rest = False
    try:
        if data is None:
            if is_cut_due():
                note_early_read()
                cut(awaited=True)
            elif ends_step():
                _end_step(awaited=True)
            else:
                at_rest = _compute_at_once(storage)
        data = finish(storage)
    except Exception:
        _leave_nothing()
        raise
    was_read(start, TOTALS[PLANNING] + TOTALS[COMPILING] - made)
    if at_rest:
        _rested()
    return data


def _leave_nothing() -> None:
    """While an error is raised: run everything pending, which was recorded before the user knew.

    If part of it fails too, that is not reported again. What is recorded later is independent.
    """
    if TRACE.is_at_work() or not TRACE.is_open():
        return
    with Shield() as shield, contextlib.suppress(CompileError):
        with _undisturbed():
            jobs = _cut(None, time.perf_counter(), awaited=True)
        _serve(list(jobs), shield)
        for job in jobs:
            job.done.wait()
            if job.done.failure is not None:
                job.done.failure.mark_reported()


def finish(storage: LazyStorage) -> BackendData:
    """The data of `storage`, computed, when explicitly requested: not a hidden sync."""
    with phase(WAITING):
        data = storage.data
        while data is None:
            value = storage.value
            compute([storage], awaited=True)
            data = storage.data
            if storage.value is not value:  # it was rolled back because an op failed
                queue_of(get_backend().backend_device(storage.type.device)).raise_error()
        return data.wait()
