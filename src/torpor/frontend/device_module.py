"""The module `torch.lazy`: what torch requires of a device, such as its generator's state."""

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
    """True: the device is available wherever torpor is."""
    return True


def is_initialized() -> bool:
    """True: the device needs no initialization."""
    return True


def device_count() -> int:
    """The number of lazy devices of the backend."""
    return get_backend().device_count()


def current_device() -> int:
    """The index of the default lazy device."""
    return get_backend().default_device_ordinal


def set_device(device: Any) -> None:
    """Set the default lazy device."""
    get_backend().default_device_ordinal = lazy_device(device).index


@contextmanager
def device(index: Any) -> Iterator[None]:
    """Set the default lazy device within a `with` block."""
    before = current_device()
    set_device(torch.device("lazy", index) if isinstance(index, int) else index)
    try:
        yield
    finally:
        set_device(torch.device("lazy", before))


def synchronize(device: Any = None) -> None:
    """Compute everything recorded and wait for it."""
    sync.cut()
    sync.wait(None if device is None else lazy_device(device))


# -- streams: a lazy device executes in program order, so these are mostly no-ops ------------------


class Stream:
    """A handle on the device's only queue, which runs work in the order it was recorded."""

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = lazy_device("lazy" if device is None else device)
        self.priority = priority

    def wait_stream(self, stream: Any) -> None:
        """No-op: the queue keeps program order."""

    def wait_event(self, event: Any) -> None:
        """No-op: the queue keeps program order."""

    def record_event(self, event: Event | None = None) -> Event:
        """A point in the program."""
        return event or Event()

    def query(self) -> bool:
        """Start computing everything recorded; whether all of it is done."""
        sync.cut()
        return all(queue.is_idle() for queue in queues())

    def synchronize(self) -> None:
        """Compute everything recorded and wait for it."""
        synchronize(self.device)


class Event:
    """A point in the program; waiting for it waits for everything recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False) -> None:
        if enable_timing:
            raise UnsupportedError(
                "an event of a lazy device has no time: what was recorded before it may run later. "
                "Time with `torpor.sync(wait=True)`, or ask `torpor.explain()`"
            )

    def record(self, stream: Any = None) -> None:
        """No-op: the queue keeps program order."""

    def wait(self, stream: Any = None) -> None:
        """No-op: the queue keeps program order."""

    def query(self) -> bool:
        """Start computing everything recorded; whether all of it is done."""
        return current_stream().query()

    def synchronize(self) -> None:
        """Compute everything recorded and wait for it."""
        synchronize()


def current_stream(device: Any = None) -> Stream:
    """The queue of a device."""
    return Stream(device)


default_stream = current_stream


def set_stream(stream: Any) -> None:
    """No-op: a device has one queue."""


@contextmanager
def stream(stream: Stream | None) -> Iterator[None]:
    """No-op: a device has one queue."""
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
    """Seed the generators of all lazy devices."""
    manual_seed(seed)


def _is_in_bad_fork() -> bool:
    return False
