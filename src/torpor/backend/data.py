"""Handles: data on a device, or placeholders for data that a graph will produce."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from torpor.backend.device import BackendDevice
from torpor.backend.interrupts import Shield
from torpor.backend.native_library import NATIVE
from torpor.errors import StepError
from torpor.ir.types import TensorType

_TELLING = threading.Lock()  # held while a failure is reported or merged with another


class Failure:
    """The error of a job, and whether it was reported."""

    __slots__ = ("error", "known", "reported", "reported_at", "rolled_back", "undo")

    def __init__(self, error: BaseException, undo: Sequence[Callable[[], None]] = ()) -> None:
        self.error = error
        self.reported = False
        self.reported_at = 0.0
        self.known = False  # its cause was reported while the job was in flight: do not raise again
        self.rolled_back: frozenset[int] = frozenset()  # ids of handles that hold old contents
        self.undo = tuple(undo)  # called when it is reported, on the thread that reports it

    def tell(self) -> None:
        """Report it: raise the error, unless its cause was raised already."""
        self.mark_reported()
        if not self.known:
            raise self.error.with_traceback(None)

    def mark_reported(self) -> None:
        """Mark it as reported and roll back; for errors that are reported by other means."""
        with Shield():  # an interrupt has to wait until everything is rolled back
            with _TELLING:
                undo, self.undo, self.reported = self.undo, (), True
                self.reported_at = time.perf_counter()
            for step in undo:
                self._run(step)

    def _run(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except Exception as error:  # the others must still be rolled back; the user gets a note
            self.error.add_note(f"  and not all went back to what it was: {error!r}")

    def spread(self, other: Failure, since: float) -> Failure:
        """Merge with `other`, the failure of a job that was submitted at `since` and depends on it.

        They are reported together; if this one was already, after `since`, `other` never raises.
        """
        with _TELLING:
            if self.reported:
                other.known = self.reported_at > since
                return other
            self.undo = tuple(dict.fromkeys((*self.undo, *other.undo)))
            self.rolled_back |= other.rolled_back
            return self


class Done:
    """The completion event of a job. `failure` is its error; `finish` waits for the job or runs it.

    Like `threading.Event`, whose construction takes longer than most waits for a job.
    """

    __slots__ = ("_event", "_is_set", "failure", "finish")

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.finish: Callable[[], None] | None = None  # set while the job is on a queue
        self._is_set = False
        self._event: threading.Event | None = None  # for threads that wait without `finish`

    def is_set(self) -> bool:
        """Whether the job has ended."""
        return self._is_set

    def set(self) -> None:
        """Mark the job as ended."""
        self._is_set = True  # before the event: a thread that makes an event checks it again
        if self._event is not None:
            self._event.set()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the job has ended."""
        finish = self.finish
        if timeout is None and finish is not None:
            finish()
        if not self._is_set:
            with _MAKING:
                event = self._event = self._event or threading.Event()
            if not self._is_set:
                event.wait(timeout)
        return self._is_set


_MAKING = threading.Lock()
"""Held while an event is made to wait for."""


class BackendData:
    """A handle for one buffer. A buffer is never written to while its handle is shared.

    A placeholder has `done` set, and no tensor until the graph that computes it has run. If that
    graph fails, a placeholder for the new contents of a storage takes over the old contents; any
    other gets the error. A backend whose data are not torch tensors subclasses this and overrides
    `filled` and `assign`; `tensor` stays None.
    """

    __slots__ = ("__weakref__", "device", "done", "error", "info", "tensor", "type")

    def __init__(
        self, device: BackendDevice, type_: TensorType, tensor: torch.Tensor | None = None
    ) -> None:
        self.device = device
        self.type = type_
        self.tensor = tensor
        self.error: BaseException | None = None
        self.done: Done | None = None  # set while a graph in flight is to fill this handle
        self.info: Any = None  # free for use by others, to attach something to a buffer

    @property
    def has_value(self) -> bool:
        """Whether the data are computed."""
        return self.done is None and self.error is None and self.filled()

    def is_over(self) -> bool:
        """Whether its job has ended, and its error, if any, was reported."""
        done = self.done
        return done is None or (done.failure is not None and done.failure.reported)

    def filled(self) -> bool:
        """Whether it holds a buffer."""
        return self.tensor is not None

    def assign(self, other: BackendData) -> None:
        """Take over the contents of `other`."""
        self.tensor = other.tensor
        self.error = other.error

    def wait(self) -> BackendData:
        """Block until the data are computed; raises the error of the graph that computes them.

        If the graph failed and this handle holds old contents again, only an unreported error.
        """
        done = self.done
        if done is not None:
            done.wait()
            if self.error is None:  # otherwise `done` is kept: it leads to the cause
                self.done = None
            if done.failure is not None:
                self._tell(done.failure)
        if self.error is not None:
            raise self.error.with_traceback(None)
        if not self.filled():
            raise StepError("this buffer was never computed: its graph was dropped before it ran")
        return self

    def _tell(self, failure: Failure) -> None:
        if failure.reported:
            return
        if id(self) in failure.rolled_back:
            failure.tell()
        if self.error is not None:
            failure.mark_reported()

    def __repr__(self) -> str:
        state = "failed" if self.error else "ready" if self.has_value else "pending"
        return f"<{type(self).__name__} {self.type!r} {state}>"


_WIDEST = {float: torch.float64, complex: torch.complex128}


def number_dtype(number: Any) -> torch.dtype:
    """The dtype that represents a Python number exactly."""
    return _WIDEST.get(type(number)) or torch.result_type(number, number)


def tensors_of(arguments: Sequence[Any]) -> list[Any] | None:
    """Arguments with handles replaced by their tensors; None if the data of one failed."""
    if NATIVE.library is not None and type(arguments) is list:
        found: list[Any] | None = NATIVE.library.tensors(arguments)
        return found
    handles = [argument for argument in arguments if isinstance(argument, BackendData)]
    if any(handle.error is not None for handle in handles):
        return None
    return [a.tensor if isinstance(a, BackendData) else a for a in arguments]


def filled(
    device: BackendDevice, types: tuple[TensorType, ...], tensors: list[torch.Tensor]
) -> list[BackendData]:
    """A handle for each tensor."""
    if NATIVE.library is not None:
        made: list[BackendData] = NATIVE.library.filled(device, types, tensors)
        return made
    pairs = zip(types, tensors, strict=True)
    return [BackendData(device, type_, tensor) for type_, tensor in pairs]
