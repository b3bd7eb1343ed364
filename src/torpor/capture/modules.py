"""Module calls that are captured without being asked for: `config.capture`.

A call that no other module call surrounds is captured from its `forward` on, once for each kind of
calling it (training or not, with gradients or not). Another size, another guard, a hook: such calls
are recorded op by op, as all were before, and captured again only when they have come back often.
Nothing is captured while several threads call modules: TorchDynamo changes what torch does in all.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from types import CodeType, FunctionType
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet

import torch

from torpor import _torch, config
from torpor.capture.payoff import RecordingCost
from torpor.trace.tensor import LazyTensor

MOST_CAPTURES: Final = 4
"""Captures of one kind of call of a module; more of them are recorded op by op."""

REFUSALS: Final = 50
"""Calls recorded op by op before their kind is captured once more."""


Call = Callable[..., Any]


class _CallKind:
    """One kind of call of a module: how often it was captured, and since when it was not."""

    __slots__ = ("captures", "code", "refusals")

    def __init__(self, code: CodeType) -> None:
        self.code = code  # keeps its id valid; code that TorchDynamo makes may have no hash
        self.captures = 0
        self.refusals = 0

    def may_capture(self) -> bool:
        if self.captures and (self.captures >= MOST_CAPTURES or self.refusals < REFUSALS):
            self.refusals += 1
            return False
        self.captures += 1
        self.refusals = 0
        return True


class _Module:
    """What is known of a module that is called."""

    __slots__ = ("cost", "forwards", "is_due", "kinds")

    def __init__(self) -> None:
        self.cost = RecordingCost()
        self.is_due = False  # it is captured from now on, if it can be
        self.kinds: dict[tuple[Any, ...], _CallKind] = {}
        self.forwards: dict[Any, Any] = {}

    def is_as_it_was(self, module: torch.nn.Module) -> bool:
        """No class of its parts has got another `forward`: TorchDynamo has no guard for that."""
        if not self.forwards:
            kinds = {*map(type, module.modules())}
            self.forwards = {kind: getattr(kind, "forward", None) for kind in kinds}
        known = self.forwards.items()
        return all(getattr(kind, "forward", None) is forward for kind, forward in known)


class _CapturedCalls(threading.local):
    """The module whose call this thread captures, or has captured before."""

    module: torch.nn.Module | None = None
    is_met = False  # the thread is one of `_callers`


CAPTURES: Final = threading.RLock()
"""Held by the thread that captures."""

_calls = _CapturedCalls()
_callers: WeakSet[threading.Thread] = WeakSet()
_known: WeakKeyDictionary[torch.nn.Module, _Module] = WeakKeyDictionary()
_forwards: WeakKeyDictionary[FunctionType, Callable[..., Any]] = WeakKeyDictionary()


def is_asked() -> bool:
    """Whether what this thread captures was passed to `torch.compile`."""
    return _calls.module is None


def may_capture(code: CodeType) -> bool:
    """Capture a frame of a module's call that TorchDynamo has not captured as it is called now."""
    module = _calls.module
    if module is None:
        return True
    if sum(thread.is_alive() for thread in _callers) > 1:
        return False
    kind = id(code), module.training, torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    kinds = _known[module].kinds
    return kinds.setdefault(kind, _CallKind(code)).may_capture()


def call_module(call: Call, module: torch.nn.Module, args: Any, kwargs: Any) -> Any:
    """Call a module that no other call surrounds and that may be lazy: captured, if that pays."""
    if not _calls.is_met and not _torch.is_in_backward():
        with CAPTURES:  # what is captured now, no other thread has seen
            _callers.add(threading.current_thread())
            _calls.is_met = True
    known = _known.get(module)
    if known is None:
        known = _known[module] = _Module()
    if known.is_due or config.capture == "on":
        if _calls.module is None and _can_capture_call(known, module, args, kwargs):
            return _captured(module, *args, **kwargs)
        return call(module, *args, **kwargs)
    start = time.perf_counter()
    known.cost.begin()
    result = call(module, *args, **kwargs)
    known.cost.end(time.perf_counter() - start, torch.is_grad_enabled())
    if known.cost.pays():
        known.is_due = _can_be_captured(module) and not _torch.had_unusual_backward()
        known.cost.forget()
    return result


def recording_cost(modules: Iterable[torch.nn.Module]) -> float:
    """Seconds that a call of each of these takes to record, backward included, as far as known."""
    known = [_known[module] for module in modules if module in _known]
    return sum(one.cost.usual for one in known if not one.is_due)


def capture_soon(modules: Iterable[torch.nn.Module], saved: float) -> bool:
    """Capture these when they are recorded next, if it takes no longer than `saved` seconds."""
    known = [_known[module] for module in modules if module in _known]
    known = [one for one in known if one.cost.calls and not one.is_due]
    if not known or _torch.had_unusual_backward():
        return False  # a region would have to be left again
    if sum(one.cost.price for one in known) > saved:
        return False
    for one in known:
        one.is_due = True
    return True


def _can_be_captured(module: torch.nn.Module) -> bool:
    forward = getattr(type(module), "forward", None)
    with _torch.without_torch_function():  # a user's mode sees none of this
        return (
            type(forward) is FunctionType
            and "forward" not in module.__dict__
            and not _torch.has_saved_tensors_hooks()
            and not _torch.has_hooks(module)
            and not _torch.is_compiled(module)
            and any(_is_concrete(parameter) for parameter in module.parameters())
        )


def _can_capture_call(known: _Module, module: torch.nn.Module, args: Any, kwargs: Any) -> bool:
    with _torch.without_torch_function():
        return (
            _can_be_captured(module)
            and known.is_as_it_was(module)
            and not _has_nested((args, kwargs))
        )


def _has_nested(arg: Any) -> bool:
    """Whether there is a nested tensor: TorchDynamo's guards on dense ones abort the process."""
    if isinstance(arg, torch.Tensor):
        return arg.is_nested
    if isinstance(arg, (tuple, list)):
        return any(map(_has_nested, arg))
    return isinstance(arg, dict) and any(map(_has_nested, arg.values()))


def _is_concrete(tensor: torch.Tensor) -> bool:
    """Lazy, on a device that exists: code that asks for the device may compare it."""
    return isinstance(tensor, LazyTensor) and tensor.device.type != "lazy"


def _captured(module: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
    forward: Any = type(module).forward
    compiled = _forwards.get(forward)
    if compiled is None:
        compiled = _forwards[forward] = torch.compile(forward, backend=_as_it_is, dynamic=False)
    _calls.module = module
    try:
        return compiled(module, *args, **kwargs)
    finally:
        _calls.module = None


def _as_it_is(graph: torch.fx.GraphModule, inputs: list[Any]) -> Call:
    """A backend of our own: what a user compiles, which may be other code, is kept apart."""
    return graph.forward
