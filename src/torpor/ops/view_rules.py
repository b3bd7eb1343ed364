"""How a write through a view updates its base tensor.

Each rule gives, for one view op, the op that computes the base's new contents from the view's new
contents (and the base's old contents):

    y = x.select(0, 1); y.add_(1)      x' = select_scatter(x, y', 0, 1)
    y = x.t();          y.add_(1)      x' = t(y')
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from torpor.ir.node import Value
from torpor.ir.types import contiguous_strides
from torpor.symbols.expressions import present

aten = torch.ops.aten

Call = tuple[Any, list[Any]]  # op, arguments in schema order
Inverse = Callable[[Value, Value, tuple[Any, ...], int], Call | None]


def _same(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return None, [new]


def _view(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    plain = all(v.type.stride == contiguous_strides(v.type.shape) for v in (base, new))
    return (aten.view.default, [new, base.type.shape]) if plain else None


def _t(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.t.default, [new]


def _transpose(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.transpose.int, [new, args[1], args[2]]


def _permute(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    rank = len(args[1])
    back = [0] * rank
    for position, dim in enumerate(args[1]):
        back[dim % rank] = position
    return aten.permute.default, [new, tuple(back)]


def _unsqueeze(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.squeeze.dim, [new, args[1]]


def _slice(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.slice_scatter.default, [base, new, *args[1:]]


def _select(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.select_scatter.default, [base, new, *args[1:]]


def _diagonal(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.diagonal_scatter.default, [base, new, *args[1:]]


def _unbind(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.select_scatter.default, [base, new, args[1], index]


def _split(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    size = present(args[1])
    start = size * index
    return aten.slice_scatter.default, [base, new, args[2], start, start + size, 1]


def _split_with_sizes(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    sizes = present(args[1])
    start = sum(sizes[:index])
    return aten.slice_scatter.default, [base, new, args[2], start, start + sizes[index], 1]


def _view_as_real(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.view_as_complex.default, [new]


def _view_as_complex(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.view_as_real.default, [new]


def _conj(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten._conj_physical.default, [new]


def _neg(base: Value, new: Value, args: tuple[Any, ...], index: int) -> Call | None:
    return aten.neg.default, [new]


INVERSES: Final[dict[str, Inverse]] = {
    "aten._conj.default": _conj,
    "aten._neg_view.default": _neg,
    "aten._reshape_alias.default": _view,
    "aten._unsafe_view.default": _view,
    "aten.alias.default": _same,
    "aten.detach.default": _same,
    "aten.diagonal.default": _diagonal,
    "aten.lift_fresh.default": _same,
    "aten.permute.default": _permute,
    "aten.select.int": _select,
    "aten.slice.Tensor": _slice,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_with_sizes,
    "aten.squeeze.default": _view,
    "aten.squeeze.dim": _view,
    "aten.squeeze.dims": _view,
    "aten.t.default": _t,
    "aten.transpose.int": _transpose,
    "aten.unbind.int": _unbind,
    "aten.unsqueeze.default": _unsqueeze,
    "aten.unsafe_split.Tensor": _split,
    "aten.unsafe_split_with_sizes.default": _split_with_sizes,
    "aten.view.default": _view,
    "aten.view_as_complex.default": _view_as_complex,
    "aten.view_as_real.default": _view_as_real,
}
