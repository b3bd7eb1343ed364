"""A step is a transaction: storages get its results only if all of it succeeds.

For each result that replaces contents of a storage, the job knows the handle of the old contents.
If the job fails, for any reason, these results take over the old contents, for all users, including
later jobs. Results that replace nothing get the error. The old contents are kept alive until then;
most are arguments of the job anyway.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

from torpor.backend.data import BackendData, Done, Failure
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.native_library import NATIVE
from torpor.distributed.agreement import agreed, leave
from torpor.errors import annotate_run
from torpor.execute.plan import SCALAR_DATA, Plan
from torpor.execute.plan_cache import Making
from torpor.execute.queue import DeviceQueue, queues
from torpor.execute.storage import LOCK, TRACE, LazyStorage, Undo
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.observe.events import span
from torpor.observe.lines import recorded_by
from torpor.observe.watch import WATCHERS, Run, watched
from torpor.transactions.donation import protect
from torpor.transactions.jobs import Job
from torpor.transactions.results import checked
from torpor.transactions.rollback import (
    Old,
    failed_for,
    first_failed,
    keep_what_was_before,
    mend,
    written_over,
)

_TAKING_PLANS = threading.RLock()

_ON_FAILURE: list[Callable[[], None]] = []


def on_failure(undo: Callable[[], None]) -> None:
    """Call `undo` whenever a failure is reported."""
    _ON_FAILURE.append(undo)


class StepJob(Job):
    """One run of a plan, which may not be compiled yet."""

    __slots__ = (
        "aliases", "backend", "computed", "device", "ends", "epoch", "failed", "lines", "making",
        "numbers", "outline", "plan", "refused", "replaced", "saved", "types", "undo",
        "watchers", "written",
    )  # fmt: skip

    def __init__(
        self,
        found: Plan | Making,
        backend: Backend,
        device: BackendDevice,
        arguments: list[Any],
        handles: list[BackendData],
        types: tuple[TensorType, ...],
        done: Done,
    ) -> None:
        self.plan: Plan | None = None
        self.making = found if isinstance(found, Making) else None
        self.outline = found.outline if isinstance(found, Making) else found
        self.backend, self.device = backend, device
        self.types = types
        self.lines = [(node, node.site) for node in self.outline.fragile]
        self.watchers = tuple(WATCHERS)
        self.numbers = tuple(TRACE.scalars) if WATCHERS else ()
        self.replaced: list[Old] = []
        self.aliases: list[tuple[BackendData, int]] = []  # additional handles, with their positions
        self.undo: tuple[Undo, ...] = ()
        self.computed = dict(TRACE.computed)  # values read before: contents of storages, too
        self.epoch = TRACE.epoch  # of the trace it was cut from
        self.ends = False  # it ends that trace
        self.saved: Saved | None = None  # that trace, to restore if the graph cannot be compiled
        self.refused: BaseException | None = None  # why it could not be compiled
        self.written = False  # donated arguments were overwritten
        self.failed: Node | None = None  # the first op that failed, if known
        super().__init__(self._run, handles, done=done)
        self.arguments = arguments
        if isinstance(found, Plan):
            self._know(found, arguments, handles)

    # -- compiling -----------------------------------------------------------------------------

    def is_ready(self) -> bool:
        """Whether it is compiled."""
        return self.plan is not None

    def is_held_up(self) -> bool:
        """Whether another thread compiles it."""
        return self.making is not None and self.making.maker not in (0, threading.get_ident())

    def prepare(self) -> None:
        """Compile it, or wait for the thread that does."""
        if self.refused is not None:
            raise self.refused
        if self.plan is not None:
            return
        arguments, results, making = list(self.arguments), self.results, self.making
        if self.plan is not None:  # another thread has prepared it, and may have run it
            return
        assert making is not None, "there is a plan, or one is being made"
        plan = making.result()
        for position, source, _ in plan.others:
            if source == SCALAR_DATA:
                number = arguments[position]
                arguments[position] = self.backend.data_from_scalar(number, self.device)
        self._know(plan, arguments, results)

    def _know(self, plan: Plan, arguments: list[Any], results: Sequence[BackendData]) -> None:
        """Take its plan, unless another thread, or a finalizer that waits for it, has done so."""
        kept = (*plan.kept_inputs(arguments), *plan.kept_outputs(results))
        here = plan.runner.runs_here(plan.computation, plan.in_turn)
        one_core = plan.runner.runs_on_one_core(plan.computation)
        with _TAKING_PLANS:
            if self.plan is not None:
                return
            self.arguments, self.donates = arguments, bool(plan.donated)
            self.expect(kept, plan.record.usual_seconds, here, one_core, plan.kept_bytes)
            self.plan = plan  # from now on it may be run, which empties the job
            self.making, self.saved = None, None

    def give_up(self, queue: DeviceQueue, error: BaseException) -> None:
        """It cannot be compiled: make everything pending again, unless other threads have gone on.

        With collectives it fails instead: the other ranks are in that step and cannot go back.
        """
        if self.outline.collectives:
            leave(self.outline.collectives, error)
            self.saved = None
        with LOCK:
            saved, self.saved = self.saved, None
            handles = (*self.results, *(alias for alias, _ in self.aliases))
            if saved is not None and saved.is_current() and queue.withdraw(self, error):
                saved.restore({id(handle) for handle in handles})
            elif isinstance(error, Exception):  # after an interrupt, the queue may retry
                self.refused = error

    def needs(self, jobs: Collection[Done]) -> bool:
        """Whether it needs results of `jobs`, as arguments or as the contents that it replaces."""
        olds = [old for _, old, _ in self.replaced if isinstance(old, BackendData)]
        return super().needs(jobs) or any(old.done in jobs for old in olds)

    # -- running -------------------------------------------------------------------------------

    def _run(self) -> None:
        self.prepare()
        plan, arguments = self.plan, self.arguments
        assert plan is not None, "it is prepared"
        _wait_for(arguments)
        run = Run(plan, self.backend, arguments, self.numbers) if self.watchers else None
        seen = watched(self.watchers, run) if run is not None else []
        results = self._execute(plan, protect(arguments, plan.donated, self.backend))
        for watch in seen:
            watch(results)
        if _assign(self.results, results):
            self._tell_all(plan, results)
        for alias, position in self.aliases:
            alias.assign(self.results[position])
        self.succeeded = True
        self.replaced, self.aliases, self.computed = [], [], {}

    def _execute(self, plan: Plan, given: list[Any]) -> list[BackendData]:
        start, before = time.perf_counter(), time.thread_time()
        try:
            collectives, launches = plan.collectives, plan.launches
            together = agreed(collectives, launches) if collectives else nullcontext()
            with span("run", plan.record.name), recorded_by(self.lines), together:
                results: Any = plan.runner.execute(plan.computation, given, self.device)
            self.written = bool(plan.donated)  # unless a result has failed: see `Backend.execute`
            busy = time.thread_time() - before  # excludes waiting for the GIL
            plan.record.ran(time.perf_counter() - start, busy, plan.draft is not None)
            if not plan.checked or plan.sized:
                results = checked(results, plan, self.backend, self.types)
        except Exception as error:
            raise with_graph_named(error, plan, self.backend) from error.__cause__
        return results  # type: ignore[no-any-return]  # of a backend

    # -- failing -------------------------------------------------------------------------------

    def fail(self, error: BaseException) -> None:
        """Restore the old contents of storages; other results get the error."""
        for result in self.results:
            result.error = error
        for alias, _ in self.aliases:
            alias.error = error
        self._go_back_to_computed()
        self._roll_back(error)
        if error is self.refused:  # raised already where the graph was compiled
            self.done.failure.mark_reported()  # type: ignore[union-attr]  # it has failed

    def _tell_all(self, plan: Plan, results: Sequence[BackendData]) -> None:
        """Handle failed results: those that succeeded and replace nothing keep their data."""
        errors = [result.error for result in results if result.error is not None]
        for error in errors:
            with_graph_named(error, plan, self.backend)
        self.written = any(map(_has_written, errors))
        for alias, position in self.aliases:
            alias.assign(self.results[position])
        self.aliases = []
        self._go_back_to_computed()
        own = [error for error in errors if not failed_for(error, self.arguments)]
        first, self.failed = first_failed(own or errors)
        if not own:
            self.failed = None  # it belongs to an earlier trace
        if not self.ends or not (own or self._undoes_a_step()):
            # as in eager, ops that do not depend on the failure have happened
            self.replaced = [old for old in self.replaced if old[0].error is not None]
            self.undo = ()
        elif not self.written:
            keep_what_was_before(self)
        self._roll_back(first)

    def _undoes_a_step(self) -> bool:
        """Whether a parameter that was updated by an optimizer depends on the failure."""
        lost = {old[2][0] for old in self.replaced if old[0].error is not None and old[2]}
        return any(undo.concerns(lost) for undo in self.undo)

    def _roll_back(self, error: BaseException) -> None:
        failure = Failure(error, (*self.undo, *_ON_FAILURE))
        if not (self.written or _has_written(error)):
            for handle, old, _ in self.replaced:
                before = old if isinstance(old, BackendData) else self.arguments[old]
                handle.assign(before)
                handle.error = before.error
            failure.rolled_back = frozenset(id(old[0]) for old in self.replaced)
        else:
            for handle, _, _ in self.replaced:
                handle.error = handle.error or error
        self._mend_trace(failure)
        cause = _cause(self.arguments, error)
        self.done.failure = failure if cause is None else cause.spread(failure, self.submitted)
        self.replaced = []

    def _go_back_to_computed(self) -> None:
        """A storage that was read earlier in the trace is rolled back to what was read."""
        known = {id(old[0]): old[2] for old in self.replaced}
        for value, position in self.outline.positions.items() if self.computed else ():
            before: Value | None = value
            while before is not None and before not in self.computed:
                before = written_over(before)
            if before is not None:
                handle = self.results[position]
                entered = known.get(id(handle))
                self.replaced = [old for old in self.replaced if old[0] is not handle]
                self.replaced.append((handle, self.computed[before], entered))

    def _mend_trace(self, failure: Failure) -> None:
        """If its trace is still open, remove everything that depends on this job from it."""
        with LOCK:
            if TRACE.epoch == self.epoch:
                mend(self, failure)


def _cause(arguments: Sequence[Any], error: BaseException) -> Failure | None:
    """The failure of an earlier job that an argument with `error` comes from."""
    for argument in failed_for(error, arguments):
        if argument.done is not None:
            return argument.done.failure
    return None


def _has_written(error: BaseException) -> bool:
    """Whether donated arguments were overwritten before the error (see `Backend.execute`)."""
    return getattr(error, "inputs_written", False) is True


def _assign(handles: Sequence[BackendData], results: Sequence[BackendData]) -> bool:
    """Assign results to handles; whether any result has failed."""
    if NATIVE.library is not None:
        failed: bool = NATIVE.library.assign(handles, results)
        return failed
    for handle, result in zip(handles, results, strict=True):
        handle.assign(result)
    return any(result.error is not None for result in results)


def _wait_for(arguments: Sequence[Any]) -> None:
    """Wait for results from queues of other devices; those of this queue are complete."""
    if len(queues()) < 2:
        return
    for argument in arguments:
        if isinstance(argument, BackendData):
            done = argument.done
            if done is not None and not done.is_set():
                done.wait()


def with_graph_named(error: BaseException, plan: Plan, backend: Backend) -> BaseException:
    """`error`, with the graph, the backend and the line added to its message."""
    site = next((v.node.site for v in plan.outputs if v.node.site is not None), None)
    return annotate_run(
        error, plan.computation.name, backend.name, None if site is None else str(site)
    )


# -- what a job replaces ---------------------------------------------------------------------------


def give_handles(job: StepJob, live: list[LazyStorage], values: Sequence[Value]) -> None:
    """Give pending storages the results of `job`, and note in the job what each one replaces.

    A result is rolled back to one old content only, so if storages hold the same value, those that
    replace contents get separate handles. `values` are those that may contain duplicates.
    """
    positions, handles = job.outline.positions, job.results
    if len(set(values)) < len(values):
        _give_own(job, _repeated(values))
    job.replaced += _replaced(TRACE.leaf_storages, positions, job.outline.places, handles)
    _hold(live, positions, handles)


def _replaced(
    leaf_storages: list[tuple[LazyStorage, Value]],
    positions: Mapping[Value, int],
    places: Mapping[Value, int],
    handles: Sequence[BackendData],
) -> list[Old]:
    """The handles that are about to replace contents of storages, and what they replace."""
    found: list[Old]
    if NATIVE.library is not None:
        found = NATIVE.library.replaced(leaf_storages, positions, places, handles, TRACE.leaves)
        return found
    changed = [pair for pair in leaf_storages if pair[0].data is None]  # the others are only read
    found = []
    for entered in changed:
        storage, leaf = entered
        position = positions.get(storage.value)  # type: ignore[arg-type]  # no data: a value is set
        if position is not None and storage.value is not leaf:
            found.append((handles[position], _old(leaf, places), entered))
    return found


def _old(leaf: Value, places: Mapping[Value, int]) -> BackendData | int:
    place = places.get(leaf)
    return TRACE.leaves[leaf.node.args[0]] if place is None else place


def _repeated(values: Sequence[Value]) -> set[Value]:
    return {value for value, times in Counter(values).items() if times > 1}


def _give_own(job: StepJob, shared: set[Value]) -> None:
    """Give storages that hold one of these values, and had other contents, separate handles."""
    for entered in TRACE.leaf_storages:
        storage, leaf = entered
        value = storage.value
        if storage.data is None and value is not leaf and value in shared:
            position = job.outline.positions.get(value)
            if position is not None:
                handle = _alias(job, position)
                storage.hold(handle)
                job.replaced.append((handle, _old(leaf, job.outline.places), entered))


def _hold(
    live: list[LazyStorage], positions: Mapping[Value, int], handles: Sequence[BackendData]
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


def _alias(job: StepJob, position: int) -> BackendData:
    handle = job.backend.placeholder(job.device, job.types[position])
    handle.done = job.done
    job.aliases.append((handle, position))
    return handle


# -- a trace that is cut before its graph can be compiled ------------------------------------------


class Saved:
    """A trace as it was before a cut, to be restored if the graph cannot be compiled."""

    __slots__ = ("_fields", "_values", "epoch", "partial")

    def __init__(self, partial: bool) -> None:
        self.partial = partial
        self.epoch = TRACE.epoch
        storages = [reference() for reference in list(TRACE.pending)]
        known = {s: s.value for s in storages if s is not None}
        known |= {storage: storage.value for storage, _ in TRACE.leaf_storages}
        self._values: Mapping[LazyStorage, Value | None] = known
        self._fields = {} if partial else {name: _copied(name) for name in _FIELDS}

    def is_current(self) -> bool:
        """Whether nothing was recorded since that restoring would lose."""
        if self.partial:
            return TRACE.epoch == self.epoch
        return TRACE.epoch == self.epoch + 1 and not TRACE.is_open()

    def restore(self, handles: set[int]) -> None:
        """Make everything pending again whose handle is in `handles` (a set of ids)."""
        for storage, value in self._values.items():
            if storage.data is not None and id(storage.data) in handles:
                storage.data = None
            if not self.partial:
                storage.value = value
        if self.partial:
            for value in [v for v, data in TRACE.computed.items() if id(data) in handles]:
                del TRACE.computed[value]
            return
        for name, content in self._fields.items():
            _put_back(name, content)
        for storage in self._values:
            if storage.data is None:
                TRACE.enlist(storage)


_FIELDS = (
    "leaves", "leaf_storages", "leaf_values", "scalars", "computed", "sized", "undo", "draws",
    "effects", "misses", "epoch",
)  # fmt: skip


def _copied(name: str) -> Any:
    content = getattr(TRACE, name)
    return content if type(content) is int else content.copy()


def _put_back(name: str, content: Any) -> None:
    if type(content) is int:
        setattr(TRACE, name, content)
    elif type(content) is dict:
        getattr(TRACE, name).update(content)
    else:
        getattr(TRACE, name)[:] = content
