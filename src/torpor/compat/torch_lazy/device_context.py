"""Per-device state of the program: the closures of the step."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from torpor.backend.registry import get_backend


class DeviceContext:
    """One device, and the closures that wait for the end of its step."""

    _CONTEXTS: dict[str, DeviceContext] = {}  # noqa: RUF012  # shared by all, as in torch
    _CONTEXTS_LOCK = threading.Lock()

    def __init__(self, device: str) -> None:
        self.device = device
        self.step_closures: list[Callable[[], Any]] = []
        self.async_step_closures: list[Callable[[], Any]] = []
        # programs may set their own handlers
        self.closure_handler: Callable[[list[Callable[[], Any]]], None] | None = None
        self.async_closure_handler: Callable[[list[Callable[[], Any]]], None] | None = None


def get_device_context(device: str | None = None) -> DeviceContext:
    """The context of `device` (default: the kind of device behind `lazy`), made on first use."""
    name = get_backend().default_device_type.name.upper() if device is None else str(device)
    with DeviceContext._CONTEXTS_LOCK:
        found = DeviceContext._CONTEXTS.get(name)
        if found is None:
            found = DeviceContext._CONTEXTS[name] = DeviceContext(name)
        return found
