"""Finds the user's module that recorded an op, from the stack, for new nodes.

The stack is walked only when a node is made, so a warm step does not pay for it. An op of the
backward pass belongs to the module of the forward op that it differentiates: autograd gives both
the same sequence number.
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

Scope = tuple[str, str]  # one of the above, and the name of the module or optimizer

_MOST_NUMBERS: Final = 100_000

_Names = dict[int, tuple[Any, str]]  # id -> weak reference to the module, and its name
_names: WeakKeyDictionary[torch.nn.Module, _Names] = WeakKeyDictionary()
_by_number: dict[int, str] = {}  # autograd's sequence number of an op -> module
_module_calls: dict[int, CodeType] = {}  # by id: TorchDynamo makes code that has no hash


def frames_of_modules(code: CodeType) -> None:
    """Register `code` as a function that calls a module, its local `self`."""
    _module_calls[id(code)] = code


class _Whole(threading.local):
    """The scope of the backward op that this thread is decomposing."""

    scope: Scope | None = None


_whole = _Whole()


@contextmanager
def parts_of(whole: Scope | None) -> Iterator[None]:
    """Within the body, which decomposes a backward op, parts belong to that op's scope."""
    before = _whole.scope
    _whole.scope = whole if whole is not None and whole[0] == BACKWARD else before
    try:
        yield
    finally:
        _whole.scope = before


def scope() -> Scope | None:
    """The module for which an op is being recorded; None outside of modules."""
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
    """The module of an op with that sequence number; the parts of an op have the next ones."""
    following = (_by_number.get(number + i) for i in range(4))
    return next(filter(None, following), "")


def _on_stack() -> tuple[list[torch.nn.Module], str]:
    """The modules being called, innermost first, and the optimizer being stepped."""
    modules: list[torch.nn.Module] = []
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if id(code) in _module_calls:
            modules.append(frame.f_locals["self"])
        elif code.co_name == "wrapper" and code.co_filename == _optimizers.__file__:
            return modules, type(frame.f_locals.get("self")).__name__
        frame = frame.f_back
    called = [] if NATIVE.library is None else NATIVE.library.modules()
    return _merged(modules, called) if called else modules, ""


def _merged(framed: list[torch.nn.Module], called: list[torch.nn.Module]) -> list[torch.nn.Module]:
    """Merge modules that have Python frames with those called from C++, innermost first.

    Some are in both lists. Calls that began before the library was loaded have only a frame.
    """
    merged = list(called)
    outer = len(merged)  # the position of the next outer module
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
    if known is None:  # a module that is not registered as a submodule
        names[id(inner)] = known = ref(inner), f"{_path(modules[1:])}.{type(inner).__name__}"
    return known[1]


def _named(root: torch.nn.Module) -> _Names:
    top = type(root).__name__
    return {id(m): (ref(m), f"{top}.{n}" if n else top) for n, m in root.named_modules()}
