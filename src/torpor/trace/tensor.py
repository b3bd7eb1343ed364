"""`LazyTensor`, the tensor class that users hold."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torpor import _torch
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.node import Node, Value


class InThisTrace(NamedTuple):
    """The value of a storage, tagged with the trace in which it is valid."""

    root: Value
    epoch: int


class View:
    """How a tensor views its storage: the view op, and its latest result.

    `value` is valid while the storage holds `base`; values are interned, so this is one identity
    check. A stale view is replayed from `node`, whose operand is the value of `parent` (None: of
    the storage itself).

    A view whose size is specific to the step (`table[:length]`) is valid in that step only: its
    `base` is an `InThisTrace`, never identical to a storage's value, so the epoch is checked too.

    `type` is the type of `value`, and of the tensor, with the sizes of the trace that made them;
    in another trace, symbols may have other values.
    """

    __slots__ = ("base", "index", "node", "parent", "type", "value")

    def __init__(
        self, parent: View | None, node: Node, index: int, base: Value, value: Value
    ) -> None:
        self.parent = parent
        self.node = node
        self.index = index
        self.value = value
        self.type = value.type.concrete
        # a view of a transient view is transient
        transient = value.node.transient or (
            parent is not None and type(parent.base) is InThisTrace
        )
        self.base: Any = InThisTrace(base, TRACE.epoch) if transient else base

    def shows(self, root: Value) -> bool:
        """Whether `value` is valid while the storage holds `root`."""
        base = self.base
        if type(base) is not InThisTrace:
            return base is root
        return base.root is root and base.epoch == TRACE.epoch

    def move(self, root: Value, value: Value) -> None:
        """Update to a storage that holds `root`; `value` is the view's value then."""
        self.base = None  # invalid, in case the next line is interrupted
        self.__init__(self.parent, self.node, self.index, root, value)  # type: ignore[misc]  # reinitialized


class LazyTensor(torch.Tensor):
    """A tensor whose ops are recorded.

    Sizes, strides, dtype and device are real; the contents are a recorded value or data, held by
    `_lazy_storage`. `_lazy_view` is None if the tensor covers its whole storage.
    """

    # attributes, not slots: `torch.utils.swap_tensors`, which keeps a parameter's identity when
    # its module moves, refuses classes with different slots
    _lazy_storage: LazyStorage
    _lazy_view: View | None

    __torch_function__ = _torch.disabled_torch_function  # type: ignore[assignment]  # as torch documents

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError("torpor.trace.dispatch was not imported")


def is_lazy(tensor: object) -> bool:
    """Whether ops on `tensor` are recorded; for a DTensor, whether those on its local part are."""
    return isinstance(_torch.local_part(tensor), LazyTensor)
