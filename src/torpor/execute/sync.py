"""Sync: turn recorded values into data.

`cut` ends the trace and computes everything alive. `compute` computes what is asked for and what
comes for free on the way, and leaves the rest of the trace pending.
"""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Sequence
from typing import Any

import torch

from torpor import config, metrics
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.interrupts import Shield
from torpor.backend.native import NATIVE
from torpor.backend.registry import get_backend, on_change
from torpor.errors import CompileError
from torpor.execute.donation import donations
from torpor.execute.events import STEP, refuse_read, was_read
from torpor.execute.plan import (
    CARRIED,
    COMPUTED,
    SCALARS,
    SIZE_NOW,
    Making,
    Outline,
    Plan,
    PlanCache,
    needed_graph,
)
from torpor.execute.queue import queue_of, queues
from torpor.execute.sizes import SIZES
from torpor.execute.storage import LOCK, TRACE, LazyStorage
from torpor.execute.transaction import Saved, StepJob, give_handles
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, Value
from torpor.ir.types import TensorType

PLANS = PlanCache()


def cut(device: torch.device | None = None) -> None:
    """End the trace; everything alive (on `device`) becomes data on its device's queue.

    The part that changes anything is not interrupted; compiling, running and waiting may be.
    """
    with Shield() as shield:
        if TRACE.is_at_work():
            _start(TRACE.live(), device, shield)
            return
        with _undisturbed():
            jobs = _cut(device)
        _serve(jobs, shield)
    metrics.count("MarkStep")


def _cut(device: torch.device | None) -> list[StepJob]:
    live = TRACE.live()
    if device is not None and any(s.type.device != device for s in live):
        return _compute([s for s in live if s.type.device == device])
    STEP.end(TRACE.misses)
    groups = _by_device(live)
    several = len(groups) > 1
    jobs: list[StepJob] = []
    try:
        for group in groups:
            wanted: list[Any] = [s.value for s in group]
            jobs += _launch(live if several else group, wanted, partial=several, ends=True)
        TRACE.reset()  # first: a buffer the trace still holds cannot be written over
    finally:
        _enqueue(jobs)
    STEP.read_at = STEP.last_asked = ""
    return jobs


def compute(storages: Sequence[LazyStorage]) -> None:
    """Start computing `storages` and nothing that they do not need; the trace goes on."""
    with Shield() as shield:
        _start(storages, None, shield)


def _start(storages: Sequence[LazyStorage], device: torch.device | None, shield: Shield) -> None:
    with _undisturbed():
        jobs = _compute([s for s in storages if device is None or s.type.device == device])
    _serve(jobs, shield)


def _compute(storages: Sequence[LazyStorage]) -> list[StepJob]:
    jobs: list[StepJob] = []
    try:
        for group in _by_device([s for s in storages if s.data is None]):
            wanted: list[Any] = [s.value for s in group if s.data is None]
            jobs += _launch(TRACE.live(), wanted, partial=True)
    finally:
        _enqueue(jobs)
    return jobs


class _undisturbed:  # a class for speed
    """The trace's lock, and no finalizers of others meanwhile: the garbage collector waits."""

    __slots__ = ("collects",)

    def __enter__(self) -> None:
        TRACE.lock.__enter__()  # which type rules are refused
        self.collects = gc.isenabled()
        gc.disable()

    def __exit__(self, *error: object) -> None:
        if self.collects:
            gc.enable()
        LOCK.release()


def _enqueue(jobs: list[StepJob]) -> None:
    for job in jobs:
        queue_of(job.device).enqueue(job)


def _serve(jobs: list[StepJob], shield: Shield) -> None:
    """Compile, run or leave to their threads what has its place; who is interrupted leaves all."""
    while jobs:
        job = jobs.pop(0)
        try:
            queue_of(job.device).serve(job, shield)
        except BaseException:
            for other in jobs:
                queue_of(other.device).leave(other)
            raise


def rest() -> None:
    """After a read: start a new trace if nothing in this one is pending, or if it is too long.

    A program that only ever reads would otherwise record one trace for ever.
    """
    if not TRACE.is_open():
        return
    at_work = TRACE.is_at_work()
    with Shield(), _undisturbed():
        if at_work:
            return
        if not TRACE.live():
            STEP.end(TRACE.misses)
            STEP.read_at = STEP.last_read
            TRACE.reset()
            return
    if len(TRACE.leaves) + len(TRACE.pending) > config.max_trace_nodes:
        cut()


def _by_device(storages: Sequence[LazyStorage]) -> list[list[LazyStorage]]:
    types = {storage.type for storage in storages}  # few, and compared by identity
    if len({type_.device for type_ in types}) == 1:
        return [list(storages)]
    groups: dict[torch.device, list[LazyStorage]] = {}
    for storage in storages:
        groups.setdefault(storage.type.device, []).append(storage)
    return list(groups.values())


def _launch(
    live: list[LazyStorage], wanted: list[Value], partial: bool = False, ends: bool = False
) -> list[StepJob]:
    """Give the storages in `live` their handles; the job that fills them, if there is one.

    `partial`: not all that is alive is computed. `ends`: the trace is reset after it.
    """
    known, pending = TRACE.computed, _settle(live, wanted)
    if not pending:
        return []
    backend = get_backend()
    device = backend.backend_device(pending[0].type.device)
    others = tuple({s.value: None for s in live if s.data is None}) if partial else ()
    key = (backend, device, pending, others, tuple(known))
    found = PLANS.find(key)
    if found is None:
        graph = needed_graph(pending, others, known) if partial else Graph.of(pending, known)  # type: ignore[arg-type]  # no data: values are set
        donated = donations(graph) if backend.takes_donations and not partial else {}
        found = PLANS.begin(key, graph, backend, device, donated)
    job = _job(found, backend, device)
    if not job.is_ready():
        job.saved = Saved(partial=not ends)
    job.ends = ends
    if ends:
        job.undo = tuple(TRACE.undo)
    give_handles(job, live, [s.value for s in live] if partial else wanted)  # type: ignore[misc]  # alive: values are set
    if partial:
        known.update(zip(job.outline.outputs, job.results, strict=True))
    return [job]


def _job(found: Plan | Making, backend: Backend, device: BackendDevice) -> StepJob:
    """One run of a plan, with handles for its outputs."""
    plan: Outline = found.outline if isinstance(found, Making) else found
    arguments = list(plan.leaves(TRACE.leaves))
    for position, source, place in plan.others:
        arguments.insert(
            position,
            TRACE.computed[place] if source == COMPUTED
            else TRACE.scalars[place] if source == SCALARS
            else place if source == CARRIED
            else place.value if source == SIZE_NOW
            else backend.data_from_scalar(TRACE.scalars[place], device),
        )  # fmt: skip
    types = tuple(type_.concrete for type_ in plan.types) if plan.symbols else plan.types
    handles = placeholders(backend, device, types)
    return StepJob(found, backend, device, arguments, handles, types)


def _settle(live: list[LazyStorage], wanted: list[Value]) -> tuple[Value, ...]:
    """Give storages whose value is a leaf or already computed their data.

    Those of the wanted values that are neither, each once.
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
    backend: Backend, device: BackendDevice, types: tuple[TensorType, ...]
) -> list[BackendData]:
    """A handle for each result of a graph."""
    is_usual = getattr(backend.placeholder, "__func__", None) is Backend.placeholder
    if is_usual and NATIVE.library is not None:
        handles: list[BackendData] = NATIVE.library.handles(device, types)
        return handles
    return [backend.placeholder(device, type_) for type_ in types]


def wait(device: torch.device | None = None) -> None:
    """Block until the queues (the queue of `device`) are empty; raise what went wrong on them."""
    chosen = queues(None if device is None else get_backend().backend_device(device))
    for device_queue in chosen:
        device_queue.wait()
    raise_errors(device)


def raise_errors(device: torch.device | None = None) -> None:
    """Raise the first error of a graph that nobody was told of yet."""
    try:
        for each in queues(None if device is None else get_backend().backend_device(device)):
            each.raise_error()
    except Exception:
        _leave_nothing()
        raise


def _finish_before_change(old: Backend | None, new: Backend) -> None:
    """Before the backend changes: finish what is pending, and forget what it compiled.

    What the old backend cannot compile stays pending: the new one gets it.
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
    """The data of `storage`, with its numbers there: a hidden sync, if they are not there yet."""
    data = storage.data
    if data is not None and data.is_over():
        return data.wait()
    refuse_read()
    start, compiling = time.perf_counter(), STEP.compiling
    try:
        data = finish(storage)
    except Exception:
        _leave_nothing()
        raise
    was_read(start, STEP.compiling - compiling)
    return data


def _leave_nothing() -> None:
    """Somebody is being told of a failure: what is pending was recorded before that.

    Should part of it fail too, nobody is told again. What comes next is of another batch.
    """
    if TRACE.is_at_work() or not TRACE.is_open():
        return
    with Shield() as shield, contextlib.suppress(CompileError):
        with _undisturbed():
            jobs = _cut(None)
        _serve(list(jobs), shield)
        for job in jobs:
            job.done.wait()
            if job.done.failure is not None:
                job.done.failure.note_told()


def finish(storage: LazyStorage) -> BackendData:
    """The data of `storage`, with its numbers there, as somebody has asked for in words."""
    data = storage.data
    while data is None:
        compute([storage])
        data = storage.data
    return data.wait()
