"""Which module of the user's recorded an op: read off the stack, for nodes that are new.

The stack is walked only when a node is made, so a warm step pays nothing for it. An op of the
backward pass belongs to the module of the op that it is the derivative of: torch numbers both
alike.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any, Final
from weakref import WeakKeyDictionary, ref

import torch
from torch.optim import optimizer as _optimizers

from torpor import _torch
from torpor.backend.native_library import NATIVE

FORWARD: Final = "forward"
BACKWARD: Final = "backward"
OPTIMIZER: Final = "optimizer"

Scope = tuple[str, str]  # one of the above, and the module (or the optimizer) by name

_MOST_NUMBERS: Final = 100_000

_Names = dict[int, tuple[Any, str]]  # by identity: a weak reference to the module, and its name
_names: WeakKeyDictionary[torch.nn.Module, _Names] = WeakKeyDictionary()
_by_number: dict[int, str] = {}  # modules by the number that autograd gave to an op of theirs
_module_calls: set[CodeType] = set()


def frames_of_modules(code: CodeType) -> None:
    """Frames of `code` are calls of a module, which they have as `self`."""
    _module_calls.add(code)


class _Whole(threading.local):
    """The op of the backward pass that is being taken apart by this thread, and whose it is."""

    scope: Scope | None = None


_whole = _Whole()


@contextmanager
def parts_of(whole: Scope | None) -> Iterator[None]:
    """Take an op of the backward pass apart in the body: its parts belong where it does."""
    before = _whole.scope
    _whole.scope = whole if whole is not None and whole[0] == BACKWARD else before
    try:
        yield
    finally:
        _whole.scope = before


def scope() -> Scope | None:
    """Where among the user's modules an op is being recorded; None outside of them all."""
    if _whole.scope is not None:
        return _whole.scope
    modules, optimizer = _on_stack()
    if optimizer:
        return OPTIMIZER, optimizer
    path = _path(modules) if modules else ""
    derivative = _torch.current_autograd_node()
    if derivative is not None:
        return BACKWARD, path or _of_number(derivative._sequence_nr())
    if not path:
        return None
    if torch.is_grad_enabled():
        if len(_by_number) > _MOST_NUMBERS:
            _by_number.clear()
        _by_number.setdefault(_torch.next_sequence_number() - 1, path)
    return FORWARD, path


def _of_number(number: int) -> str:
    """The module of the op that autograd gave that number; an op's parts have the next ones."""
    following = (_by_number.get(number + i) for i in range(4))
    return next(filter(None, following), "")


def _on_stack() -> tuple[list[torch.nn.Module], str]:
    """The modules that are being called, innermost first; the optimizer that makes a step."""
    modules: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code in _module_calls:
            modules.append(frame.f_locals["self"])
        elif code.co_name == "wrapper" and code.co_filename == _optimizers.__file__:
            return modules, type(frame.f_locals.get("self")).__name__
        frame = frame.f_back
    called = [] if NATIVE.library is None else NATIVE.library.modules()
    return _merged(modules, called) if called else modules, ""


def _merged(framed: list[torch.nn.Module], called: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Modules with a frame of their own and those that C++ has called, innermost first.

    Some are both. Calls that began before the library was there have a frame alone.
    """
    merged = list(called)
    outer = len(merged)  # the place of what surrounds the next one
    for module in reversed(framed):
        places = [place for place, other in enumerate(merged) if other is module]
        if places:
            outer = places[-1]
        else:
            merged.insert(outer, module)
    return merged


def _path(modules: list[torch.nn.Module]) -> str:
    """The name of the innermost module within the outermost one."""
    root = modules[-1]
    names = _names.get(root)
    if names is None:
        names = _names[root] = _named(root)
    inner = modules[0]
    known = names.get(id(inner))
    if known is None or known[0]() is not inner:
        names = _names[root] = _named(root)
        known = names.get(id(inner))
    if known is None:  # a module that no other one holds
        names[id(inner)] = known = ref(inner), f"{_path(modules[1:])}.{type(inner).__name__}"
    return known[1]


def _named(root: torch.nn.Module) -> _Names:
    top = type(root).__name__
    return {id(m): (ref(m), f"{top}.{n}" if n else top) for n, m in root.named_modules()}
