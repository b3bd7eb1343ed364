"""The namespace `torch.lazy`: what torch asks a device for, such as the state of its generator."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torpor.backend.registry import get_backend
from torpor.execute import sync
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
