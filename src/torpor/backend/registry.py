"""Backends by name: registered in this process, or found by the entry-point group."""

from __future__ import annotations

import difflib
import os
from collections.abc import Callable
from importlib.metadata import entry_points
from typing import Any

from torpor.backend.interface import Backend
from torpor.errors import BackendError

Factory = Callable[..., Backend]
ENTRY_POINT_GROUP = "torpor.backends"

_factories: dict[str, Factory] = {}
_active: Backend | None = None
_listeners: list[Callable[[Backend | None, Backend], None]] = []


def register(name: str, factory: Factory) -> None:
    """Make `factory(**options)` the maker of the backend `name`."""
    if not name or not isinstance(name, str):
        raise BackendError(f"a backend needs a name, not {name!r}")
    _factories[name] = factory


def _found() -> dict[str, Factory]:
    found = dict(_factories)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, _loader(point))
    return found


def _loader(point: Any) -> Factory:
    def load(**options: Any) -> Backend:
        return point.load()(**options)  # type: ignore[no-any-return]  # from an entry point

    return load


def make(name: str, **options: Any) -> Backend:
    """A new backend of that name, initialised."""
    found = _found()
    if name not in found:
        close = difflib.get_close_matches(name, found, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else ""
        raise BackendError(f"no backend {name!r}: there are {', '.join(sorted(found))}{hint}")
    try:
        backend = found[name](**options)
    except Exception as error:
        raise BackendError(f"backend {name!r} could not be made: {error}") from error
    backend.name = name
    backend.initialize()
    return backend


def backends() -> dict[str, str]:
    """Every known backend and whether it is available, or why not."""
    return dict.fromkeys(sorted(_found()), "available")


def on_change(listener: Callable[[Backend | None, Backend], None]) -> None:
    """Call `listener(old, new)` before the active backend changes."""
    _listeners.append(listener)


def activate(backend: Backend) -> Backend:
    """Make `backend` the one that runs graphs; pending work is finished on the old one first."""
    global _active
    for listener in _listeners:
        listener(_active, backend)
    _active = backend
    return backend


def use(name: str, **options: Any) -> Backend:
    """Choose the backend by name."""
    return activate(make(name, **options))


def get_backend() -> Backend:
    """The active backend; on first use the one `TORPOR_BACKEND` names, else the reference."""
    if _active is None:
        return use(os.environ.get("TORPOR_BACKEND", "reference"))
    return _active


def has_backend() -> bool:
    """A backend is active already."""
    return _active is not None
