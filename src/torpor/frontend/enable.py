"""`torpor.enable`: laziness starts at parameters.

A module's parameters and buffers become lazy in place at an outermost call of it, an optimizer's
parameters when they are added to it. What is computed from them is lazy; input data stay plain.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable
from typing import Any, Final
from weakref import ref

import torch

from torpor import _torch
from torpor.adaptive.bound import BOUND, ModelGroup, may_switch
from torpor.backend.heap import retain_free_memory
from torpor.backend.native_library import NATIVE
from torpor.frontend.adam import ADAM
from torpor.frontend.exchange import lazy_copy
from torpor.frontend.mode import convert_state
from torpor.frontend.switching import convert, convert_parts, parts_of
from torpor.trace.tensor import LazyTensor

_MOST_CHANGES: Final = 10_000


class _Known:
    """A module that was called: when it was last inspected, and when to inspect it again."""

    __slots__ = (
        "calls", "module", "next", "parts", "place", "position", "stamp",
    )  # fmt: skip

    def __init__(self, module: ref[torch.nn.Module]) -> None:
        self.module = module
        self.stamp = -1
        self.position = 0  # in the list of changed modules
        self.parts: frozenset[int] = frozenset()  # its modules, itself included, by identity
        self.calls = 0  # since an inspection that left tensors plain for now
        self.next = 0
        self.place: ModelGroup | None = None  # None: no tensors found so far


class Laziness:
    """Converts tensors of modules and optimizers to lazy ones while `enable` is on."""

    def __init__(self) -> None:
        self.on = False
        self.stamp = 0  # incremented to invalidate all inspections
        self.changed: list[int] = []  # ids of modules that got a plain tensor or a submodule
        self.modules: dict[int, _Known] = {}
        self.left: dict[int, ref[torch.nn.Module]] = {}  # modules that `torch.compile` runs
        self.lock = threading.RLock()

    def before_call(self, module: torch.nn.Module) -> bool:
        """Called before an outermost module call; False: it shall run eagerly."""
        known = self.modules.get(id(module))
        if known is None:
            known = self._meet(module)
        if not BOUND.is_on():
            self._leave_group(known)
        elif not self._is_recorded(module, known):
            return False
        if known.stamp == self.stamp and not self._has_changed(known):
            if not known.next:
                return True
            known.calls += 1
            if known.calls < known.next:
                return True
        if may_switch():
            with self.lock:
                self._look_at(module, known)
        return True

    def _leave_group(self, known: _Known) -> None:
        """Inspect a module of a group that may run eagerly: `config.bound` was set meanwhile."""
        if known.place is not None:
            known.place, known.stamp = None, -1

    def _is_recorded(self, module: torch.nn.Module, known: _Known) -> bool:
        """Whether the model group of a module being called is recorded, not run eagerly."""
        place = known.place
        if place is None:
            if known.stamp == self.stamp and not self._has_changed(known):
                return False  # it has no tensors
            place = known.place = BOUND.meet(module)
            if place is None:
                known.parts = frozenset(id(part) for part, _ in parts_of(module))
                known.stamp, known.position = self.stamp, len(self.changed)
                return False
        if place.joined is not None:
            place = known.place = place.whole()
        return BOUND.before_call(place, id(module))

    def _meet(self, module: torch.nn.Module) -> _Known:
        number = id(module)
        known = _Known(ref(module, lambda _: self.modules.pop(number, None)))
        return self.modules.setdefault(number, known)

    def _has_changed(self, known: _Known) -> bool:
        """Whether one of its modules has changed since the last inspection."""
        if known.position == len(self.changed):
            return False
        if not known.parts.isdisjoint(self.changed[known.position :]):
            return True
        known.position = len(self.changed)
        return False

    def _look_at(self, module: torch.nn.Module, known: _Known) -> None:
        """Make its tensors lazy; those that cannot be yet are retried with exponential backoff."""
        stamp, position = self.stamp, len(self.changed)
        parts = list(parts_of(module))
        waits = convert_parts(parts)
        if stamp != known.stamp or position != known.position:
            known.calls = known.next = 0
        known.next = max(1, 2 * known.next) if waits else 0
        known.parts = frozenset(id(part) for part, _ in parts)
        known.stamp, known.position = stamp, position

    def registered(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """Called when a module gets a parameter, a buffer or a submodule."""
        if not self.on or value is None or type(value) is LazyTensor:
            return
        if len(self.changed) > _MOST_CHANGES:
            self.look_again()
        self.changed.append(id(module))
        if isinstance(value, torch.nn.Module) and _torch.is_compiled(module):
            self.compiled(value)

    def look_again(self) -> None:
        """Inspect every module again at its next call."""
        with self.lock:
            self.stamp += 1
            self.changed = []

    def compiled(self, module: torch.nn.Module) -> None:
        """Called when `torch.compile` takes over the module: its parameters stay plain."""
        number = id(module)
        self.left[number] = ref(module, lambda _: self.left.pop(number, None))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """Convert state loaded from a file, or created without following its parameter's type."""
        if not self.on or (BOUND.is_on() and not BOUND.is_recorded(optimizer)):
            return
        if _has_plain_state(optimizer):
            with _torch.as_on_another_thread(), torch.no_grad():
                convert_state(optimizer, lazy_copy, of=LazyTensor)

    def got_parameters(self, optimizer: Any, tensors: Iterable[Any]) -> None:
        """Called when an optimizer gets parameters."""
        BOUND.got_parameters(optimizer)
        if BOUND.is_on() and not BOUND.is_recorded(optimizer):
            return
        if self.on and may_switch():
            with self.lock:
                left = {id(p) for module in self._left() for p in module.parameters()}
                convert(t for t in tensors if id(t) not in left)

    def _left(self) -> list[torch.nn.Module]:
        modules = [reference() for reference in list(self.left.values())]
        return [module for module in modules if module is not None]


LAZINESS = Laziness()


# -- optimizers --------------------------------------------------------------------------------


def _has_plain_state(optimizer: Any) -> bool:
    """Whether there is plain state, judging by the first lazy parameter that has any."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            state = optimizer.state.get(parameter) if type(parameter) is LazyTensor else None
            if state:
                return any(
                    type(v) is torch.Tensor and v.dim() and v.shape == parameter.shape
                    for v in state.values()
                )
    return False


def _around_groups(original: Any) -> Any:
    def add_param_group(self: Any, param_group: Any) -> Any:
        result = original(self, param_group)
        LAZINESS.got_parameters(self, self.param_groups[-1]["params"])
        return result

    return add_param_group


# -- on and off --------------------------------------------------------------------------------


@functools.cache
def _install() -> None:
    """Register hooks on modules and optimizers."""
    _torch.on_registration(LAZINESS.registered)
    _torch.on_compile(LAZINESS.compiled)
    _torch.on_parameter_groups(_around_groups)
    _torch.register_step_pre_hook(LAZINESS.before_step)
    _torch.around_adam(ADAM.around)


def enable() -> None:
    """From now on, make parameters, buffers, optimizer state and what depends on them lazy."""
    _install()
    retain_free_memory()  # eager steps gain as much by it as recorded ones,
    NATIVE.look()  # and by the library: it calls modules, and makes Adam's steps
    LAZINESS.look_again()
    LAZINESS.on = ADAM.on = True


def disable() -> None:
    """Undo `enable`; lazy tensors stay lazy."""
    LAZINESS.on = ADAM.on = False
