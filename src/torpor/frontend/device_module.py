"""The namespace `torch.lazy`: what torch asks a device for, such as the state of its generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torpor.backend.registry import get_backend
from torpor.errors import UnsupportedError
from torpor.execute import sync
from torpor.execute.queue import queues
from torpor.frontend.devices import lazy_device


def is_available() -> bool:
    """The device is there wherever torpor is."""
    return True


def is_initialized() -> bool:
    """Nothing needs starting."""
    return True


def device_count() -> int:
    """How many lazy devices the backend has."""
    return get_backend().device_count()


def current_device() -> int:
    """The number of the device behind `lazy`."""
    return get_backend().default_device_ordinal


def set_device(device: Any) -> None:
    """Choose the device behind `lazy`."""
    get_backend().default_device_ordinal = lazy_device(device).index


@contextmanager
def device(index: Any) -> Iterator[None]:
    """Choose the device behind `lazy` inside the body."""
    before = current_device()
    set_device(torch.device("lazy", index) if isinstance(index, int) else index)
    try:
        yield
    finally:
        set_device(torch.device("lazy", before))


def synchronize(device: Any = None) -> None:
    """Compute what is recorded and wait for it."""
    sync.cut()
    sync.wait(None if device is None else lazy_device(device))


# -- streams: a lazy device runs what it is given in the program's order ---------------------------


class Stream:
    """A name for the device's one queue: what others have recorded before runs before."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = lazy_device("lazy" if device is None else device)
        self.priority = priority

    def wait_stream(self, stream: Any) -> None:
        """Nothing to wait for: the queue keeps the program's order."""

    def wait_event(self, event: Any) -> None:
        """Nothing to wait for: the queue keeps the program's order."""

    def record_event(self, event: Event | None = None) -> Event:
        """A point in the program."""
        return event or Event()

    def query(self) -> bool:
        """Start computing what is recorded; whether it is all done."""
        sync.cut()
        return all(queue.is_idle() for queue in queues())

    def synchronize(self) -> None:
        """Compute what is recorded and wait for it."""
        synchronize(self.device)


class Event:
    """A point in the program; whoever waits for it waits for all that was recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        if enable_timing:
            raise UnsupportedError(
                "an event of a lazy device has no time: what was recorded before it may run later. "
                "Time with `torpor.sync(wait=True)`, or ask `torpor.explain()`"
            )

    def record(self, stream: Any = None) -> None:
        """Nothing to note: the queue keeps the program's order."""

    def wait(self, stream: Any = None) -> None:
        """Nothing to wait for: the queue keeps the program's order."""

    def query(self) -> bool:
        """Start computing what is recorded; whether it is all done."""
        return current_stream().query()

    def synchronize(self) -> None:
        """Compute what is recorded and wait for it."""
        synchronize()


def current_stream(device: Any = None) -> Stream:
    """The queue of a device."""
    return Stream(device)


default_stream = current_stream


def set_stream(stream: Any) -> None:
    """Nothing to choose: a device has one queue."""


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """The body is recorded like everything else: a device has one queue."""
    yield


def _physical(device: Any) -> torch.device:
    where = lazy_device("lazy" if device in (None, -1) else device)
    return get_backend().backend_device(where).torch_device


def get_rng_state(device: Any = None) -> torch.Tensor:
    """The state of the generator that lazy tensors draw from."""
    physical = _physical(device)
    return torch.cuda.get_rng_state(physical) if physical.type == "cuda" else torch.get_rng_state()


def set_rng_state(state: torch.Tensor, device: Any = None) -> None:
    """Set the state of the generator that lazy tensors draw from."""
    physical = _physical(device)
    if physical.type == "cuda":
        torch.cuda.set_rng_state(state, physical)
    else:
        torch.set_rng_state(state)


def manual_seed(seed: int) -> None:
    """Seed the generator that lazy tensors draw from."""
    get_backend().set_rng_seed(seed)


def manual_seed_all(seed: int) -> None:
    """Seed the generators of every lazy device."""
    manual_seed(seed)


def _is_in_bad_fork() -> bool:
    return False
