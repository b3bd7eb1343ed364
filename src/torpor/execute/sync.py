"""Sync: turn recorded values into data.

`cut` ends the trace and computes everything alive. `compute` computes what is asked for and what
comes for free on the way, and leaves the rest of the trace pending.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from torpor import config, metrics
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.native import NATIVE
from torpor.backend.registry import get_backend, on_change
from torpor.errors import CompileError, tell_run
from torpor.execute.donation import donations, protect
from torpor.execute.events import STEP, refuse_read, span, was_read
from torpor.execute.plan import (
    CARRIED,
    COMPUTED,
    SCALARS,
    SIZE_NOW,
    Plan,
    PlanCache,
    needed_graph,
)
from torpor.execute.queue import Job, queue_of, queues
from torpor.execute.results import checked
from torpor.execute.sizes import SIZES
from torpor.execute.storage import TRACE, LazyStorage
from torpor.execute.watch import WATCHERS, Run, watched
from torpor.ir.graph import Graph
from torpor.ir.lines import recorded_by
from torpor.ir.node import LEAF, Value
from torpor.ir.types import TensorType

PLANS = PlanCache()


def cut(device: torch.device | None = None) -> None:
    """End the trace; everything alive (on `device`) becomes data on its device's queue."""
    with TRACE.lock:
        live = TRACE.live()
        if device is not None and any(s.type.device != device for s in live):
            compute([s for s in live if s.type.device == device])
            return
        STEP.end(TRACE.misses)
        groups = _by_device(live)
        several = len(groups) > 1
        launches: list[Callable[[], None]] = []
        try:
            for group in groups:
                wanted: list[Any] = [s.value for s in group]
                launches.append(_launch(live if several else group, wanted, partial=several))
            TRACE.reset()  # first: a buffer the trace still holds cannot be written over
        finally:
            for launch in launches:
                launch()
        STEP.read_at = STEP.last_asked = ""
    metrics.count("MarkStep")


def compute(storages: Sequence[LazyStorage]) -> None:
    """Start computing `storages` and nothing that they do not need; the trace goes on."""
    with TRACE.lock:
        wanted = [s for s in storages if s.data is None]
        for group in _by_device(wanted):
            _launch(TRACE.live(), [s.value for s in group if s.data is None], partial=True)()  # type: ignore[misc]  # no data: values are set


def rest() -> None:
    """After a read: start a new trace if nothing in this one is pending, or if it is too long.

    A program that only ever reads would otherwise record one trace for ever.
    """
    with TRACE.lock:
        if not TRACE.is_open():
            return
        if not TRACE.live():
            STEP.end(TRACE.misses)
            STEP.read_at = STEP.last_read
            TRACE.reset()
        elif len(TRACE.leaves) + len(TRACE.pending) > config.max_trace_nodes:
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
    live: list[LazyStorage], wanted: list[Value], partial: bool = False
) -> Callable[[], None]:
    """Give the storages in `live` their handles; returns what puts the graph on the queue."""
    known, pending = TRACE.computed, _settle(live, wanted)
    if not pending:
        return _nothing
    backend = get_backend()
    device = backend.backend_device(pending[0].type.device)
    others = tuple({s.value: None for s in live if s.data is None}) if partial else ()
    key = (backend, device, pending, others, tuple(known))
    plan = PLANS.find(key)
    if plan is None:
        graph = needed_graph(pending, others, known) if partial else Graph.of(pending, known)  # type: ignore[arg-type]  # no data: values are set
        donated = donations(graph) if backend.takes_donations and not partial else {}
        plan = PLANS.add(key, graph, backend, device, donated)
    job, handles = _job(plan, backend)
    _hold(live, plan.positions, handles)
    if partial:
        known.update(zip(plan.outputs, handles, strict=True))
    return functools.partial(queue_of(device).submit, job)


def _hold(
    live: list[LazyStorage], positions: Mapping[Value, int], handles: list[BackendData]
) -> None:
    """Give pending storages the handles at the positions of their values."""
    if NATIVE.library is not None:
        NATIVE.library.hold(live, positions, handles)
        return
    for storage in live:
        if storage.data is None:
            position = positions.get(storage.value)  # type: ignore[arg-type]  # no data: a value is set
            if position is not None:
                storage.hold(handles[position])


def _nothing() -> None:
    """What a launch without a graph puts on the queue."""


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


def _job(plan: Plan, backend: Backend) -> tuple[Job, list[BackendData]]:
    """One run of `plan`, and handles for its outputs."""
    device = plan.computation.device
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
    lines = [(node, node.site) for node in plan.fragile]
    watchers, numbers = tuple(WATCHERS), tuple(TRACE.scalars) if WATCHERS else ()

    def run() -> None:
        _wait_for(arguments)
        seen = watched(watchers, Run(plan, backend, arguments, numbers)) if watchers else ()
        protect(arguments, plan.donated, backend)
        start, before = time.perf_counter(), time.thread_time()
        try:
            with span("run", plan.record.name), recorded_by(lines):
                results = plan.runner.execute(plan.computation, arguments, device)
            busy = time.thread_time() - before  # and not waiting for Python's lock
            plan.record.ran(time.perf_counter() - start, busy, plan.draft is not None)
            if not plan.checked or plan.symbols:
                results = checked(results, plan, backend, types)
        except Exception as error:
            raise told(error, plan, backend) from error.__cause__
        for watch in seen:
            watch(results)
        if _assign(handles, results):
            for result in results:
                if result.error is not None:
                    told(result.error, plan, backend)
        arguments.clear()

    kept = (*plan.kept_inputs(arguments), *plan.kept_outputs(handles))
    here = plan.runner.runs_here(plan.computation, plan.in_turn)
    beside = plan.runner.runs_beside(plan.computation)
    usual = plan.record.usual_seconds
    return Job(run, handles, kept, usual, here, beside, plan.kept_bytes), handles


def _assign(handles: list[BackendData], results: Sequence[BackendData]) -> bool:
    """Let handles take over what others hold; whether one of those has failed."""
    if NATIVE.library is not None:
        failed: bool = NATIVE.library.assign(handles, results)
        return failed
    for handle, result in zip(handles, results, strict=True):
        handle.assign(result)
    return any(result.error is not None for result in results)


def placeholders(
    backend: Backend, device: BackendDevice, types: tuple[TensorType, ...]
) -> list[BackendData]:
    """A handle for each result of a graph."""
    is_usual = getattr(backend.placeholder, "__func__", None) is Backend.placeholder
    if is_usual and NATIVE.library is not None:
        handles: list[BackendData] = NATIVE.library.handles(device, types)
        return handles
    return [backend.placeholder(device, type_) for type_ in types]


def _wait_for(arguments: Sequence[Any]) -> None:
    """Another device's queue may still be at some of them; this one's is not."""
    if len(queues()) < 2:
        return
    for argument in arguments:
        if isinstance(argument, BackendData):
            done = argument.done
            if done is not None and not done.is_set():
                done.wait()


def told(error: BaseException, plan: Plan, backend: Backend) -> BaseException:
    """`error`, which says now which graph failed on which backend, and whose line that was."""
    site = next((v.node.site for v in plan.outputs if v.node.site is not None), None)
    return tell_run(error, plan.computation.name, backend.name, None if site is None else str(site))


def wait(device: torch.device | None = None) -> None:
    """Block until the queues (the queue of `device`) are empty; raise what went wrong on them."""
    chosen = queues(None if device is None else get_backend().backend_device(device))
    for device_queue in chosen:
        device_queue.wait()
    raise_errors(device)


def raise_errors(device: torch.device | None = None) -> None:
    """Raise the first error of a graph that nobody was told of yet."""
    for device_queue in queues(None if device is None else get_backend().backend_device(device)):
        device_queue.raise_error()


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
    if data is not None and data.done is None:
        return data.wait()
    refuse_read()
    start, compiling = time.perf_counter(), STEP.compiling
    data = finish(storage)
    was_read(start, STEP.compiling - compiling)
    return data


def finish(storage: LazyStorage) -> BackendData:
    """The data of `storage`, with its numbers there, as somebody has asked for in words."""
    data = storage.data
    while data is None:
        compute([storage])
        data = storage.data
    return data.wait()
