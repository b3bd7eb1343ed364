"""Data on a device, or a placeholder for data that a running graph will produce."""

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

_TELLING = threading.Lock()  # a failure is reported, or grows, one at a time


class Failure:
    """What went wrong in a job, and whether it was reported."""

    __slots__ = ("error", "known", "reported", "reported_at", "rolled_back", "undo")

    def __init__(self, error: BaseException, undo: Sequence[Callable[[], None]] = ()) -> None:
        self.error = error
        self.reported = False
        self.reported_at = 0.0
        self.known = False  # the job it came from has reported it to the recording thread
        self.rolled_back: frozenset[int] = frozenset()  # ids of handles that hold old contents
        self.undo = tuple(undo)  # rolled back when it is reported, on that thread

    def tell(self) -> None:
        """Raise the error, unless it is known: from now on somebody knows."""
        self.mark_reported()
        if not self.known:
            raise self.error.with_traceback(None)

    def mark_reported(self) -> None:
        """It is reported by other means."""
        with Shield():  # an interrupt waits until all has gone back
            with _TELLING:
                undo, self.undo, self.reported = self.undo, (), True
                self.reported_at = time.perf_counter()
            for step in undo:
                self._run(step)

    def _run(self, undo: Callable[[], None]) -> None:
        try:
            undo()
        except Exception as error:  # others go back all the same, and the user learns of it
            self.error.add_note(f"  and not all went back to what it was: {error!r}")

    def spread(self, other: Failure, since: float) -> Failure:
        """The failure of a job that was submitted at `since` and failed for the same reason.

        Both are reported at once. If this one was reported meanwhile, the other goes back silently.
        """
        with _TELLING:
            if self.reported:
                other.known = self.reported_at > since
                return other
            self.undo = tuple(dict.fromkeys((*self.undo, *other.undo)))
            self.rolled_back |= other.rolled_back
            return self


class Done:
    """The end of a job. `failure` is what went wrong in it, `finish` waits for it or runs it.

    Like `threading.Event`, which takes longer to make than most jobs are waited for.
    """

    __slots__ = ("_event", "_is_set", "failure", "finish")

    def __init__(self) -> None:
        self.failure: Failure | None = None
        self.finish: Callable[[], None] | None = None  # while it is on a queue
        self._is_set = False
        self._event: threading.Event | None = None  # of those who wait by themselves

    def is_set(self) -> bool:
        """The job has ended."""
        return self._is_set

    def set(self) -> None:
        """The job has ended."""
        self._is_set = True  # first: who makes an event looks at it again
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
"""Held while somebody makes an event of his own to wait for."""


class BackendData:
    """A handle on one buffer. Buffers are never written to while a handle is shared.

    A placeholder has a `done` event and no tensor until the graph that makes it has run. If that
    fails, a placeholder for new contents of a storage takes over the old ones, and any other one
    carries the error. A backend whose data are not torch tensors derives from this class and
    overrides `filled` and `assign`; `tensor` stays None.
    """

    __slots__ = ("__weakref__", "device", "done", "error", "info", "tensor", "type")

    def __init__(
        self, device: BackendDevice, type_: TensorType, tensor: torch.Tensor | None = None
    ) -> None:
        self.device = device
        self.type = type_
        self.tensor = tensor
        self.error: BaseException | None = None
        self.done: Done | None = None  # set while a graph is to fill this handle
        self.info: Any = None  # for whoever wants to hang something on a buffer

    @property
    def has_value(self) -> bool:
        """The numbers are there."""
        return self.done is None and self.error is None and self.filled()

    def is_over(self) -> bool:
        """It is done, and what went wrong in it, if anything, was reported."""
        done = self.done
        return done is None or (done.failure is not None and done.failure.reported)

    def filled(self) -> bool:
        """It holds a buffer."""
        return self.tensor is not None

    def assign(self, other: BackendData) -> None:
        """Take over what `other` holds."""
        self.tensor = other.tensor
        self.error = other.error

    def wait(self) -> BackendData:
        """Block until the numbers are there; raise the error of the graph that was to make them.

        Where that failed and the old contents are there again, it is raised if nobody knows yet.
        """
        done = self.done
        if done is not None:
            done.wait()
            if self.error is None:  # else it knows where that came from
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
    """The dtype that holds all of a Python number."""
    return _WIDEST.get(type(number)) or torch.result_type(number, number)


def tensors_of(arguments: Sequence[Any]) -> list[Any] | None:
    """What handles hold, and all other arguments as they are; None if a handle has failed."""
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
