"""What an optimizer keeps outside the trace, and how it goes back when its step has failed.

Parameters, gradients and optimizer state that are lazy go back with the step. Beside them Adam and
its kin count their steps in plain tensors on the CPU, and what a failed step has made for the first
time would fail for ever: eager would not have made it.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Collection, Iterator
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch

from torpor._torch import is_dtensor, local_part
from torpor.backend.native_library import NATIVE
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.node import Value
from torpor.symbols.leaves import SIZES
from torpor.trace.tensor import LazyTensor
from torpor.transactions.transaction import on_failure

_KNOWN: WeakSet[Any] = WeakSet()
"""Optimizers that were looked at."""

_KEPT: WeakKeyDictionary[Any, dict[torch.Tensor, torch.Tensor]] = WeakKeyDictionary()
"""What plain tensors beside `step` held before the step that is being recorded (NAdam, ASGD)."""


def are_apart(parameters: Collection[torch.Tensor]) -> bool:
    """Whether no two of these lazy parameters share memory."""
    storages = {t._lazy_storage for t in parameters if type(t) is LazyTensor}
    return len(storages) == len(parameters)


def before_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Remember plain state that cannot be computed back; state that is there has contents."""
    if TRACE.is_open() and optimizer not in _KNOWN and optimizer.state:
        sync.compute([t._lazy_storage for t in _tensors(optimizer) if type(t) is LazyTensor])
    if optimizer in _KEPT:
        _KEPT[optimizer] = {t: t.clone() for t in _plain_tensors(optimizer) if t.dim() == 0}


def note_step(optimizer: Any) -> None:
    """A step was recorded: should it fail, all goes back that the trace does not know."""
    if optimizer not in _KNOWN:
        _KNOWN.add(optimizer)
        SIZES.fixed.update(t._lazy_storage for t in _parameters(optimizer))
        if _has_plain_state_except_step(optimizer):
            _KEPT[optimizer] = {}
    TRACE.undo.append(_OptimizerStep(optimizer))


class _OptimizerStep:
    """A step of an optimizer; called, it is undone."""

    __slots__ = ("gradients", "kept", "optimizer", "stepped")

    def __init__(self, optimizer: Any) -> None:
        self.optimizer = optimizer
        self.kept = _KEPT.get(optimizer, {})
        self.stepped: list[torch.Tensor]
        self.gradients: list[Value | None]
        found = None
        if NATIVE.library is not None:
            found = NATIVE.library.stepped(optimizer.param_groups)
        self.stepped, self.gradients = found or _stepped(optimizer)

    def concerns(self, storages: Collection[LazyStorage]) -> bool:
        """It has updated one of `storages`."""
        lazy = [p for p in map(local_part, self.stepped) if type(p) is LazyTensor]
        return any(part._lazy_storage in storages for part in lazy)

    def __call__(self) -> None:
        state = self.optimizer.state
        for parameter in self.stepped:
            own = state.get(parameter)
            if own and any(map(_has_failed, own.values())):
                del state[parameter]  # it was made by this step
            elif own and "step" in own and type(own["step"]) is not LazyTensor:
                own["step"] -= 1
        with torch.no_grad():
            for tensor, before in self.kept.items():
                tensor.copy_(before)


def _stepped(optimizer: Any) -> tuple[list[torch.Tensor], list[Value | None]]:
    """The parameters that have a gradient, and what the storages of those hold."""
    stepped: list[torch.Tensor] = []
    values: list[Value | None] = []
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is not None:
                stepped.append(parameter)
                gradient = local_part(gradient)
                if type(gradient) is LazyTensor:
                    values.append(gradient._lazy_storage.value)
    return stepped, values


def _drop_failed_gradients() -> None:
    """A gradient that was to be made by what failed does not exist, as in eager."""
    for tensor in gc.get_objects():  # nobody knows all parameters; a failure may take its time
        if not (type(tensor) is LazyTensor or is_dtensor(tensor)):
            continue
        if tensor.requires_grad and _has_failed(_gradient(tensor)):
            tensor.grad = None


def _gradient(tensor: torch.Tensor) -> Any:
    """The gradient of `tensor`, without a question that makes torch record something or raise.

    A view whose base was written to is taken again by `is_leaf`, and if it was taken without
    gradients torch refuses. `grad` does not ask that, and warns of tensors that are no leaves.
    """
    if not tensor._is_view():
        return tensor.grad if tensor.is_leaf else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return tensor.grad


on_failure(_drop_failed_gradients)


def _has_failed(tensor: Any) -> bool:
    tensor = local_part(tensor)
    if type(tensor) is not LazyTensor:
        return False
    data = tensor._lazy_storage.data
    return data is not None and data.error is not None


def _parameters(optimizer: Any) -> Iterator[LazyTensor]:
    for group in optimizer.param_groups:
        yield from (p for p in map(local_part, group["params"]) if type(p) is LazyTensor)


def _tensors(optimizer: Any) -> Iterator[Any]:
    """All that is kept for parameters, but for the number of steps."""
    for own in optimizer.state.values():
        if isinstance(own, dict):
            yield from (local_part(kept) for name, kept in own.items() if name != "step")


def _plain_tensors(optimizer: Any) -> list[torch.Tensor]:
    return [tensor for tensor in _tensors(optimizer) if type(tensor) is torch.Tensor]


def _has_plain_state_except_step(optimizer: Any) -> bool:
    return any(tensor.dim() == 0 for tensor in _plain_tensors(optimizer))
