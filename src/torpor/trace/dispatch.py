"""The entry point from torch: every op on a lazy tensor arrives here."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from torpor import _torch
from torpor.custom import registration
from torpor.errors import TorporError, annotate
from torpor.execute import sync
from torpor.execute.storage import TRACE
from torpor.inference.infer import DeviceMismatch, NotRecordable
from torpor.observe.events import fell_back
from torpor.observe.phases import RUNNING, phase
from torpor.observe.site import site
from torpor.ops.spec import Mode, OpSpec, ReturnKind, spec_of
from torpor.overrides.eager import (
    count_fallback,
    count_sync,
    run_eager,
    run_on_plain_device,
    try_on_zeros,
)
from torpor.overrides.random import random_recorder
from torpor.trace.overlap import WritesPlain
from torpor.trace.recorder import CutFirst, ForeignTensor, LeavesDevice, make_recorder
from torpor.trace.tensor import LazyTensor

Recorder = Callable[..., Any]
F = TypeVar("F", bound=Recorder)

SPECIAL: dict[str, Recorder] = {}
"""Hand-written recorders, by op name; filled by `special`."""


USUAL: dict[Recorder, Recorder] = {}
"""Hand-written recorders, mapped to the generic one that they end in if all tensors are lazy and
stay on their device. It takes the same arguments, except some that then make no difference."""


def special(*names: str, usual: Recorder | None = None) -> Callable[[F], F]:
    """Decorate the recorder of these ops; `usual` is the recorder that it normally ends in."""

    def register(function: F) -> F:
        for name in names:
            SPECIAL[name] = function
        if usual is not None:
            USUAL[function] = usual
        return function

    return register


_tell: list[Callable[[OpSpec, Recorder], None]] = []


def on_recorder(meet: Callable[[OpSpec, Recorder], None]) -> None:
    """Call `meet(spec, recorder)` whenever a recorder is attached to its op."""
    _tell.append(meet)


def recorder_of(target: Any) -> Recorder:
    """The recorder of an op, made on first use and cached on the op."""
    spec = spec_of(target)
    recorder = SPECIAL.get(spec.name) or _by_mode(spec)
    _torch.set_op_attribute(target, "_torpor_record", recorder)
    for meet in _tell:
        meet(spec, recorder)
    return recorder


def _by_mode(spec: OpSpec) -> Recorder:
    if spec.mode is Mode.RANDOM:
        return random_recorder(spec)
    if spec.mode is Mode.EAGER:
        return lambda *args, **kwargs: _at_once(spec, args, kwargs)
    if spec.mode is Mode.METADATA:
        return lambda *args, **kwargs: _unsupported(spec, "changes sizes")
    if sum(r.is_list and r.kind is not ReturnKind.ARGUMENT for r in spec.returns) > 1:
        return lambda *args, **kwargs: _unsupported(spec, "returns several lists")
    if (
        _torch.is_composite(spec.target)
        and spec.target not in _torch.composite_ops_with_cpu_kernels()
    ):
        return lambda *args, **kwargs: _decompose(spec, args, kwargs)
    return make_recorder(spec)


def _at_once(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    count_sync(spec)
    return run_eager(spec, args, kwargs)


def _decompose(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Decompose a composite op that torch did not decompose, as for inference tensors."""
    result = _torch.take_apart(spec.target, *args, **kwargs)
    if result is NotImplemented:
        return make_recorder(spec)(*args, **kwargs)
    return result


def _unsupported(spec: OpSpec, what: str) -> Any:
    raise NotRecordable(f"{spec.name} {what} in a way torpor does not know", fallback=True)


def dispatch(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    """Record one op, or run it eagerly if it cannot be recorded."""
    try:
        record = func._torpor_record
    except AttributeError:
        record = recorder_of(func)
    try:
        if kwargs:
            return record(*args, **kwargs)
        return record(*args)
    except Exception as error:
        return _failed(func, args, kwargs or {}, error)


def _failed(func: Any, args: tuple[Any, ...], kwargs: Any, error: Exception) -> Any:
    if isinstance(error, CutFirst):
        if TRACE.is_at_work():  # inside a larger op or a finalizer: the trace cannot be cut now
            TRACE.misses = 0
        else:
            sync.cut()
        return dispatch(None, func, (), args, kwargs)
    if isinstance(error, ForeignTensor):
        return _torch.among_fakes(LazyTensor, func, args, kwargs)
    if isinstance(error, LeavesDevice):
        return run_on_plain_device(spec_of(func), args, kwargs)
    if isinstance(error, DeviceMismatch):
        raise annotate(RuntimeError(*error.args), str(func), str(site())) from None
    return recover(spec_of(func), args, kwargs, error)


def recover(spec: OpSpec, args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception) -> Any:
    """Handle an op that could not be recorded: run it eagerly, or raise eager's error.

    User errors are detected by a run on zeros of the same types, so nothing pending is computed.
    """
    own = isinstance(error, TorporError) or getattr(error, "_torpor_refusal", False)
    if own or getattr(error, "_torpor_annotated", False):
        raise annotate(error, spec.name, str(site()))
    try:
        if not isinstance(error, (NotRecordable, WritesPlain)) and not _has_mask(args):
            try_on_zeros(spec, args, kwargs)
        with phase(RUNNING) as start:
            result = run_eager(spec, args, kwargs)
    except Exception as refusal:
        raise annotate(refusal, spec.name, str(site())) from None
    if isinstance(error, NotRecordable) and not error.fallback:
        count_sync(spec)
    elif not isinstance(error, WritesPlain):
        count_fallback(spec)
        fell_back(start, spec.name)
    return result


def _has_mask(args: tuple[Any, ...]) -> bool:
    """Whether an index is a boolean mask: how many elements it selects depends on its contents."""
    lists = [arg for arg in args if isinstance(arg, (list, tuple))]
    items = [item for arg in lists for item in arg if isinstance(item, torch.Tensor)]
    return any(item.dtype in (torch.bool, torch.uint8) for item in items)


# -- while a type rule or a lowering runs, its thread may neither record nor read ------------------

_LOCK = TRACE.lock
_STRAY = "uses a lazy tensor that it was not given"


class _WatchedLock:
    """The trace's lock, denied to type rules and lowerings."""

    acquire, release = _LOCK.acquire, _LOCK.release  # unchecked: for recorders, after `_watched`

    def __enter__(self) -> bool:
        registration.refuse_inside(_STRAY)
        return _LOCK.acquire()

    def __exit__(self, *error: object) -> None:
        _LOCK.release()


def _watched(
    cls: Any, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
) -> Any:
    registration.refuse_inside(_STRAY)
    return dispatch(cls, func, types, args, kwargs)


class _Watch:
    """Installs the checks only while they are needed, so recording has no overhead otherwise."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.running = 0
        self.entry: Recorder = dispatch
        self.switch: Callable[[bool], None] = lambda on: None

    def __call__(self, starts: bool) -> None:
        with self.lock:
            self.running += 1 if starts else -1
            self.place()

    def place(self) -> None:
        """Install the lock and the entry point that apply now."""
        TRACE.lock = _WatchedLock() if self.running else _LOCK  # type: ignore[assignment]  # same interface
        self.switch(not self.running)
        LazyTensor.__torch_dispatch__ = classmethod(_watched if self.running else self.entry)  # type: ignore[assignment,method-assign]  # replaces the stub


_watch = _Watch()
_watch.place()
registration.on_running(_watch)


def set_dispatch_entry(entry: Recorder, switch: Callable[[bool], None]) -> None:
    """Make torch call `entry` instead of `dispatch`; `switch` turns it off and on."""
    with _watch.lock:
        _watch.entry, _watch.switch = entry, switch
        _watch.place()
