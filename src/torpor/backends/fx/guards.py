"""Run-time checks in the graph for values that eager rejects.

Compiled CPU code aborts the process on an index out of range or an integer division by zero, and
silently computes with other values that eager rejects, such as probabilities above 1. So the graph
clamps such operands and returns a flag that says whether all were valid: if not, it is run again
with eager's kernels, which raise at the user's line.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from torpor.backends.fx.functional import NotTraceable
from torpor.ir.node import Node
from torpor.ops.spec import OpSpec


class Guards:
    """Clamps operands while a graph is traced; `flags` say whether they were in range."""

    def __init__(self) -> None:
        self.flags: list[torch.Tensor] = []
        self.known: dict[tuple[Any, ...], torch.Tensor] = {}

    def guarded(self, spec: OpSpec, args: list[Any]) -> list[Any]:
        """The arguments of an op, with checked operands clamped into range."""
        name = spec.target._opname.removesuffix("_")
        if name in UNGUARDED:
            raise NotTraceable(f"{spec.name} has operands that cannot be checked before it runs")
        guard = GUARDS.get(name)
        return args if guard is None else guard(self, args)

    def inside(
        self, index: torch.Tensor, low: int, high: int, ignored: int | None = None
    ) -> torch.Tensor:
        """`index` clamped to `low <= index < high`; adds a flag: it was in range already."""
        if not index.numel() or index.dtype in (torch.bool, torch.uint8):
            return index
        key = (id(index), str(low), str(high), ignored)  # symbols have no hash
        if key not in self.known:
            bounded = index.clamp(low, max(high - 1, low))
            if ignored is not None:
                bounded = torch.where(index == ignored, index, bounded)
            self.flags.append((bounded == index).all())
            self.known[key] = bounded
        return self.known[key]

    def not_zero(self, divisor: torch.Tensor) -> torch.Tensor:
        """`divisor` with zeros replaced by ones; adds a flag: there were none."""
        key = (id(divisor),)
        if key not in self.known:
            self.flags.append((divisor != 0).all())
            self.known[key] = torch.where(divisor == 0, 1, divisor)
        return self.known[key]

    def probabilities(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor` itself; adds a flag: all of it is between 0 and 1 (NaN is not)."""
        key = (id(tensor), "probabilities")
        if key not in self.known and tensor.numel():
            self.flags.append(((tensor >= 0) & (tensor <= 1)).all())
            self.known[key] = tensor
        return tensor

    def flag(self) -> torch.Tensor | None:
        """All flags combined; None if nothing was checked."""
        if not self.flags:
            return None
        return torch.stack(self.flags).all()


def may_refuse(node: Node) -> bool:
    """Whether eager may raise for some values of the node's operands."""
    name = node.op.target._opname.removeprefix("_foreach_").removesuffix("_")
    if name == "div":
        return len(node.args) > 2 and node.args[2] is not None  # it rounds
    return name in GUARDS or name in UNGUARDED


Guard = Callable[[Guards, list[Any]], list[Any]]


def _along(index: int, *, negative: bool = False) -> Guard:
    """For ops on `(self, dim, index)`, with the index at position `index`."""

    def guard(guards: Guards, args: list[Any]) -> list[Any]:
        tensor, dim = args[0], args[1]
        size = tensor.shape[dim] if tensor.dim() else 1
        low = -size if negative else 0
        return _with(args, index, guards.inside(args[index], low, size))

    return guard


def _with(args: list[Any], position: int, value: Any) -> list[Any]:
    return [*args[:position], value, *args[position + 1 :]]


def _index(guards: Guards, args: list[Any]) -> list[Any]:
    sizes = args[0].shape
    bounded = [
        index if index is None else guards.inside(index, -sizes[dim], sizes[dim])
        for dim, index in enumerate(args[1])
    ]
    return _with(args, 1, bounded)


def _take(guards: Guards, args: list[Any]) -> list[Any]:
    number = args[0].numel()
    return _with(args, 1, guards.inside(args[1], -number, number))


def _embedding(guards: Guards, args: list[Any]) -> list[Any]:
    return _with(args, 1, guards.inside(args[1], 0, args[0].shape[0]))


def _embedding_backward(guards: Guards, args: list[Any]) -> list[Any]:
    return _with(args, 1, guards.inside(args[1], 0, args[2]))


def _loss(scores: int) -> Guard:
    """For ops on `(..., scores, target, weight, reduction, ignore_index)`."""

    def guard(guards: Guards, args: list[Any]) -> list[Any]:
        tensor, target, ignored = args[scores], args[scores + 1], args[scores + 4]
        classes = tensor.shape[1] if tensor.dim() > 1 else tensor.shape[0]
        return _with(args, scores + 1, guards.inside(target, 0, classes, ignored))

    return guard


def _divide(guards: Guards, args: list[Any]) -> list[Any]:
    """Integer division."""
    left, right = args[0], args[1]
    if not _is_integral(left) or not _is_integral(right):
        return args
    if isinstance(right, torch.Tensor):
        return _with(args, 1, guards.not_zero(right)) if right.numel() else args
    if type(right) is int and right:
        return args
    raise NotTraceable("an integer divided by a number that may be 0")


def _divide_rounding(guards: Guards, args: list[Any]) -> list[Any]:
    rounds = len(args) > 2 and args[2] is not None
    return _divide(guards, args) if rounds else args


def _is_integral(operand: Any) -> bool:
    if isinstance(operand, torch.Tensor):
        return not (operand.is_floating_point() or operand.is_complex())
    return getattr(operand, "kind", type(operand)) in (int, bool)


def _one_hot(guards: Guards, args: list[Any]) -> list[Any]:
    if args[1] <= 0:
        raise NotTraceable("as many classes as the numbers say")
    return _with(args, 0, guards.inside(args[0], 0, args[1]))


def _binary_cross_entropy(guards: Guards, args: list[Any]) -> list[Any]:
    return [guards.probabilities(args[0]), guards.probabilities(args[1]), *args[2:]]


GUARDS: Final[dict[str, Guard]] = {
    "binary_cross_entropy": _binary_cross_entropy,
    "embedding": _embedding,
    "embedding_dense_backward": _embedding_backward,
    "one_hot": _one_hot,
    "index": _index,
    "index_put": _index,
    "_index_put_impl": _index,
    "_unsafe_index": _index,
    "_unsafe_index_put": _index,
    "index_select": _along(2),
    "index_add": _along(2),
    "index_copy": _along(2),
    "index_fill": _along(2, negative=True),
    "gather": _along(2),
    "scatter": _along(2),
    "scatter_add": _along(2),
    "scatter_reduce": _along(2),
    "take": _take,
    "put": _take,
    "div": _divide_rounding,
    "floor_divide": _divide,
    "fmod": _divide,
    "remainder": _divide,
    "nll_loss_forward": _loss(0),
    "nll_loss2d_forward": _loss(0),
    "nll_loss_backward": _loss(1),
    "nll_loss2d_backward": _loss(1),
}

UNGUARDED: Final = frozenset(
    # ops for which Inductor derives indices from values of unknown range, or whose check would cost
    # as much as the op
    {"_unsafe_masked_index", "_unsafe_masked_index_put_accumulate", "index_reduce",
     "max_unpool2d", "max_unpool3d", "_embedding_bag", "_embedding_bag_forward_only",
     "repeat_interleave"}
)  # fmt: skip
