"""Backends by name: registered in this process, or found through the entry-point group."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from typing import Any
from weakref import WeakSet

from torpor import metrics
from torpor.backend.interface import Backend
from torpor.errors import BackendError, TorporWarning, did_you_mean

Factory = Callable[..., Backend]
Available = Callable[[], str | None]  # None, or why the backend cannot be used here
ENTRY_POINT_GROUP = "torpor.backends"
PREFERRED, PLAIN = "inductor", "reference"  # the default if it is available, and otherwise

_factories: dict[str, Factory] = {}
_available: dict[str, Available] = {}
_initialized: WeakSet[Backend] = WeakSet()  # to be notified of the end of the process
_active: Backend | None = None
_listeners: list[Callable[[Backend | None, Backend], None]] = []


def register(name: str, factory: Factory, available: Available | None = None) -> None:
    """Register `factory(**options)` as the factory of the backend `name`.

    A name like "dynamo:NAME" is a family: `factory("x", **options)` makes "dynamo:x".
    `available()` returns None if the backend can be used, else the reason. If it is not given, the
    factory's attribute `available` is used, if it has one.
    """
    if not name or not isinstance(name, str):
        raise BackendError(f"a backend needs a name, not {name!r}")
    if not callable(factory):
        raise BackendError(f"backend {name!r} needs a factory to call, not {factory!r}")
    _factories[name] = factory
    _available.pop(name, None)
    if available is not None:
        _available[name] = available


def factory_of(name: str) -> Factory | None:
    """The factory registered in this process for `name` or its family."""
    return _factories.get(_listed(name, _factories)[0])


def _found() -> dict[str, Factory]:
    found = dict(_factories)
    for point in entry_points(group=ENTRY_POINT_GROUP):
        found.setdefault(point.name, _loader(point))
    return found


def _loader(point: Any) -> Factory:
    def load(**options: Any) -> Backend:
        return point.load()(**options)  # type: ignore[no-any-return]  # from an entry point

    def available() -> str | None:
        return _reason(getattr(point.load(), "available", None))

    load.available = available  # type: ignore[attr-defined]  # asked by `_why_not`
    return load


def _reason(available: Available | None) -> str | None:
    return None if available is None else available()


def _why_not(name: str, factory: Factory) -> str | None:
    """Why the backend `name` cannot be used here; None if it can."""
    try:
        return _reason(_available.get(name) or getattr(factory, "available", None))
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _listed(name: str, found: dict[str, Factory]) -> tuple[str, tuple[str, ...]]:
    """The registered name of a backend, and, for a member of a family, its name in the family."""
    family, colon, member = name.partition(":")
    if colon and member and name not in found and f"{family}:NAME" in found:
        return f"{family}:NAME", (member,)
    return name, ()


def make(name: str, **options: Any) -> Backend:
    """A new, initialized backend."""
    found = _factories
    listed, member = _listed(name, found)
    if listed not in found:  # last resort: entry points need the metadata of every package
        found = _found()
        listed, member = _listed(name, found)
    if listed not in found:
        hint = did_you_mean(name, found)
        raise BackendError(f"no backend {name!r}: there are {', '.join(sorted(found))}{hint}")
    reason = _why_not(listed, found[listed])
    if reason is not None:
        raise BackendError(f"backend {name!r} could not be made: {reason}")
    try:
        backend = found[listed](*member, **options)
        if not isinstance(backend, Backend):
            raise TypeError(f"its factory gave a {type(backend).__name__}, not a Backend")
        backend.name = name
        backend.options = options
        backend.initialize()
    except Exception as error:
        raise BackendError(f"backend {name!r} could not be made: {error}") from error
    _initialized.add(backend)
    return backend


def backends() -> dict[str, str]:
    """Every known backend: "available", or the reason why it is not."""
    return {
        name: _why_not(name, factory) or "available" for name, factory in sorted(_found().items())
    }


def on_change(listener: Callable[[Backend | None, Backend], None]) -> None:
    """Call `listener(old, new)` before the active backend changes."""
    _listeners.append(listener)


def activate(backend: Backend) -> Backend:
    """Make `backend` the active one, after finishing pending work on the old one.

    An error of that work is raised when the change is complete.
    """
    global _active
    try:
        for listener in _listeners:
            listener(_active, backend)
    finally:
        _active = backend
    return backend


def use(name: str, **options: Any) -> Backend:
    """Activate a new backend by name."""
    return activate(make(name, **options))


def get_backend() -> Backend:
    """The active backend; on first use, the one named by `TORPOR_BACKEND`, else the default."""
    if _active is None:
        return use(os.environ.get("TORPOR_BACKEND") or default_name())
    return _active


def default_name() -> str:
    """The compiling backend if it is available; else the interpreting one, with a warning."""
    reason = _why_not(PREFERRED, _factories[PREFERRED]) if PREFERRED in _factories else "not there"
    if reason is None:
        return PREFERRED
    warnings.warn(
        f"graphs run uncompiled, on backend {PLAIN!r}; {PREFERRED!r} is not available: {reason} "
        f"(TORPOR_BACKEND={PLAIN} says that this is meant)",
        TorporWarning,
        stacklevel=2,
    )
    return PLAIN


def has_backend() -> bool:
    """Whether a backend is active."""
    return _active is not None


def retire() -> Iterator[Backend]:
    """Every backend that still exists, to shut it down; each is returned once."""
    while _initialized:
        yield _initialized.pop()


def _report_of_active() -> str:
    return "" if _active is None else _active.metric_report()


metrics.add_report(_report_of_active)
