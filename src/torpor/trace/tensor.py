"""`LazyTensor`: what the user holds."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from torpor import _torch
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.node import Node, Value


class InThisTrace(NamedTuple):
    """What a storage held in one trace."""

    root: Value
    epoch: int


class View:
    """How a tensor looks at its storage: the view op, and what it gave for which contents.

    `value` is right as long as the storage still holds `base`; values are interned, so that is
    one identity check. A stale view is replayed from `node`, whose operand is the value of
    `parent` (None: of the storage itself).

    A view whose size is not the storage's but one of the step's (`table[:length]`) is right in that
    step only: its `base` is `InThisTrace`, which no storage holds, so that it is looked at closer.

    `type` is the type of `value` in numbers: those of the trace that made it, and of its tensor.
    Symbols are other numbers in another trace.
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
        # of a view that is right in this trace only, so is every view
        transient = value.node.transient or (
            parent is not None and type(parent.base) is InThisTrace
        )
        self.base: Any = InThisTrace(base, TRACE.epoch) if transient else base

    def shows(self, root: Value) -> bool:
        """`value` is what it looks like while its storage holds `root`."""
        base = self.base
        if type(base) is not InThisTrace:
            return base is root
        return base.root is root and base.epoch == TRACE.epoch

    def move(self, root: Value, value: Value) -> None:
        """Its storage holds `root`, of which it shows `value`."""
        self.base = None  # it shows nothing, should the next lines be interrupted
        self.__init__(self.parent, self.node, self.index, root, value)  # type: ignore[misc]  # anew


class LazyTensor(torch.Tensor):
    """A tensor whose operations are recorded.

    Sizes, strides, dtype and device are real; the numbers are a recorded value or data, held by
    `_lazy_storage`. `_lazy_view` is None where the tensor is all of its storage.
    """

    # attributes, not slots: `torch.utils.swap_tensors`, which keeps a parameter's identity when
    # its module moves, refuses classes with different slots
    _lazy_storage: LazyStorage
    _lazy_view: View | None

    __torch_function__ = _torch.disabled_torch_function  # type: ignore[assignment]  # made for this

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # a class method, as torch calls it
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError("torpor.trace.dispatch was not imported")


def is_lazy(tensor: object) -> bool:
    """`tensor` is recorded rather than computed at once; of a DTensor: this rank's part of it."""
    return isinstance(_torch.local_part(tensor), LazyTensor)
