"""`torpor.enable`: laziness starts at parameters.

A module's parameters and buffers become lazy in place when it is called by no other module, an
optimizer's parameters when it gets them. What is computed from them is lazy; data stay plain.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any, Final
from weakref import ref

import torch

from torpor import _torch
from torpor.execute.storage import TRACE
from torpor.trace.exchange import lazy_copy, move
from torpor.trace.mode import LazyMode, convert_state
from torpor.trace.sharing import Adoption
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import is_traceable

_PLAIN: Final = (torch.Tensor, torch.nn.Parameter)
_VIRTUAL: Final = ("lazy", "meta")
_MOST_CHANGES: Final = 10_000


class _Known:
    """A module that was called: when it was looked at, and when to look again."""

    __slots__ = ("calls", "module", "next", "parts", "position", "stamp")

    def __init__(self, module: ref[torch.nn.Module]) -> None:
        self.module = module
        self.stamp = -1
        self.position = 0  # in the list of modules that have changed
        self.parts: frozenset[int] = frozenset()  # its modules, itself included, by identity
        self.calls = 0  # since something of it stayed plain that may become lazy yet
        self.next = 0


class Laziness:
    """Where laziness starts while it is enabled."""

    def __init__(self) -> None:
        self.on = False
        self.stamp = 0  # with another one every module is looked at again
        self.changed: list[int] = []  # modules that got a plain tensor or a module, by identity
        self.modules: dict[int, _Known] = {}
        self.left: dict[int, ref[torch.nn.Module]] = {}  # modules that `torch.compile` runs
        self.lock = threading.RLock()

    def before_call(self, module: torch.nn.Module) -> None:
        """No other module call surrounds one of `module`, which begins now."""
        known = self.modules.get(id(module))
        if known is None:
            known = self._meet(module)
        if known.stamp == self.stamp and not self._has_changed(known):
            if not known.next:
                return
            known.calls += 1
            if known.calls < known.next:
                return
        if _may_convert():
            with self.lock:
                self._look_at(module, known)

    def _meet(self, module: torch.nn.Module) -> _Known:
        number = id(module)
        known = _Known(ref(module, lambda _: self.modules.pop(number, None)))
        return self.modules.setdefault(number, known)

    def _has_changed(self, known: _Known) -> bool:
        """A module of it got something since it was looked at."""
        if known.position == len(self.changed):
            return False
        if not known.parts.isdisjoint(self.changed[known.position :]):
            return True
        known.position = len(self.changed)
        return False

    def _look_at(self, module: torch.nn.Module, known: _Known) -> None:
        """Make its tensors lazy; what has to wait is looked at ever more seldom."""
        stamp, position = self.stamp, len(self.changed)
        parts = list(_parts(module))
        waits = _convert_parts(parts)
        if stamp != known.stamp or position != known.position:
            known.calls = known.next = 0
        known.next = max(1, 2 * known.next) if waits else 0
        known.parts = frozenset(id(part) for part, _ in parts)
        known.stamp, known.position = stamp, position

    def registered(self, module: torch.nn.Module, name: str, value: Any) -> None:
        """A module gets a parameter, a buffer or a module."""
        if not self.on or value is None or type(value) is LazyTensor:
            return
        if len(self.changed) > _MOST_CHANGES:
            self.look_again()
        self.changed.append(id(module))
        if isinstance(value, torch.nn.Module) and _torch.is_compiled(module):
            self.compiled(value)

    def look_again(self) -> None:
        """Look at every module when it is called next."""
        with self.lock:
            self.stamp += 1
            self.changed = []

    def compiled(self, module: torch.nn.Module) -> None:
        """`torch.compile` will run the module: its parameters stay plain."""
        number = id(module)
        self.left[number] = ref(module, lambda _: self.left.pop(number, None))

    def before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """State that came from a file, or was made without looking at the parameter, follows it."""
        if self.on and _has_plain_state(optimizer):
            with _torch.as_on_another_thread(), torch.no_grad():
                convert_state(optimizer, lazy_copy, of=LazyTensor)

    def got_parameters(self, tensors: Iterable[Any]) -> None:
        """An optimizer got parameters."""
        if self.on and _may_convert():
            with self.lock:
                left = {id(p) for module in self._left() for p in module.parameters()}
                convert(t for t in tensors if id(t) not in left)

    def _left(self) -> list[torch.nn.Module]:
        modules = [reference() for reference in list(self.left.values())]
        return [module for module in modules if module is not None]


LAZINESS = Laziness()


def _may_convert() -> bool:
    """This is the user's program, as it runs: nobody traces it, and it is no worker's."""
    return not (
        _torch.is_tracing()
        or threading.current_thread().name.startswith("torpor-")
        or TRACE.lock._is_owned()  # type: ignore[attr-defined]  # torpor itself calls the module
        or _torch.is_data_worker()
        or any(type(mode) is not LazyMode for mode in _torch.modes())
    )


# -- which tensors -----------------------------------------------------------------------------


_Part = tuple[torch.nn.Module, bool]  # and whether a compiler runs it


def _convert_parts(parts: list[_Part]) -> bool:
    """Make parameters and buffers of modules lazy; whether some of them may become so later."""
    tensors: list[torch.Tensor] = []
    compiled: set[int] = set()
    for part, is_compiled in parts:
        for table in (part._parameters, part._buffers):
            found = [t for t in table.values() if t is not None and type(t) is not LazyTensor]
            if is_compiled:
                compiled.update(map(id, found))
            elif found:
                if table is part._parameters and not all(map(_is_own, found)):
                    return True  # `functional_call`
                tensors += found
    return convert(t for t in tensors if id(t) not in compiled)


def _parts(module: torch.nn.Module) -> Iterator[_Part]:
    """Its modules, itself included, but for those of TorchScript."""
    seen: set[int] = set()
    parts = [(module, False)]
    while parts:
        part, inside = parts.pop()
        if id(part) in seen or isinstance(part, torch.jit.ScriptModule):
            continue
        seen.add(id(part))
        is_compiled = inside or _torch.is_compiled(part)
        yield part, is_compiled
        parts += [(child, is_compiled) for child in part._modules.values() if child is not None]


def _is_own(tensor: torch.Tensor) -> bool:
    """What stands in the place of a parameter is one."""
    return isinstance(tensor, torch.nn.Parameter)


def convert(tensors: Iterable[Any]) -> bool:
    """Make plain tensors lazy in place; whether some of them may become so later."""
    groups: dict[int, list[torch.Tensor]] = {}
    waits = False
    found = {id(t): t for t in tensors if isinstance(t, torch.Tensor)}
    for tensor in found.values():
        if _can_be_lazy(tensor):
            groups.setdefault(_torch.memory_of(tensor), []).append(tensor)
        else:
            waits |= torch.nn.parameter.is_lazy(tensor)
    if not groups:
        return waits
    del found
    with _torch.as_on_another_thread(), torch.no_grad():
        for group in groups.values():
            waits |= not _convert_together(group)
    return waits


def _can_be_lazy(tensor: torch.Tensor) -> bool:
    return (
        type(tensor) in _PLAIN
        and is_traceable(tensor)
        and tensor.device.type not in _VIRTUAL
        and tensor.is_leaf
        and not (tensor.is_conj() or tensor.is_neg() or tensor.is_inference())
    )


def _convert_together(tensors: list[torch.Tensor]) -> bool:
    """Make tensors on one memory lazy; False if not now, they stay plain then."""
    if any(map(_is_bound, tensors)) or _torch.users_besides(tensors):
        return False
    if len({tensor.dtype for tensor in tensors}) > 1:
        return False
    memory = tensors[0].untyped_storage()
    if memory.is_shared() and not tensors[0].is_cuda:
        return False
    adoption = Adoption(copy=not memory.resizable())  # borrowed memory is somebody else's
    del memory
    lazies = [adoption.adopt(tensor, tensor.device) for tensor in tensors]
    for tensor, lazy in zip(tensors, lazies, strict=True):
        move(tensor, lazy, lazy_copy)
    return True


def _is_bound(tensor: torch.Tensor) -> bool:
    """A graph of autograd or torch itself holds it, or its gradient cannot be lazy."""
    grad = tensor.grad
    return _torch.is_held(tensor) or not (
        grad is None or type(grad) is LazyTensor or _can_be_lazy(grad)
    )


# -- optimizers --------------------------------------------------------------------------------


def _has_plain_state(optimizer: Any) -> bool:
    """One look: the state of the first lazy parameter that has some."""
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
        LAZINESS.got_parameters(self.param_groups[-1]["params"])
        return result

    return add_param_group


# -- on and off --------------------------------------------------------------------------------


@functools.cache
def _install() -> None:
    """Let torch tell us of modules and optimizers."""
    _torch.on_registration(LAZINESS.registered)
    _torch.on_compile(LAZINESS.compiled)
    _torch.on_parameter_groups(_around_groups)
    _torch.register_step_pre_hook(LAZINESS.before_step)


def enable() -> None:
    """Make parameters, buffers, optimizer state and what is computed from them lazy from now on."""
    _install()
    LAZINESS.look_again()
    LAZINESS.on = True


def disable() -> None:
    """Undo `enable`; tensors that are lazy stay lazy."""
    LAZINESS.on = False
