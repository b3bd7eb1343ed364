"""What eager's kernels refuse and XLA computes all the same: indices out of range, division by 0.

A check looks at the arguments of a node while it is traced and says whether eager may refuse them.
Where it does, eager's kernels run the graph, and raise what they raise. Checks that need whole
numbers alone run before anything else, so that a step that fails has written nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import jax.numpy as jnp

from torpor.ir.node import Node

Check = Callable[..., Any]
"""From the arguments of an op to whether some are refused: a boolean, or None if none can be."""


def _outside(index: Any, size: int, lowest: int = 0) -> Any:
    return jnp.any((index < lowest) | (index >= size))


def _along(x: Any, dim: int, index: Any, *rest: Any) -> Any:
    return _outside(index, x.shape[dim] if x.ndim else 1)


def _indices(x: Any, indices: Any, values: Any = None, *rest: Any) -> Any:
    given = {dim: index for dim, index in enumerate(indices) if index is not None}
    if any(index.dtype in (jnp.bool_, jnp.uint8) for index in given.values()):
        ((dim, mask),) = given.items()
        return _too_many_or_few(mask, values, x.ndim - dim - mask.ndim)
    bad = [_outside(index, x.shape[dim], -x.shape[dim]) for dim, index in given.items()]
    return jnp.any(jnp.stack(bad)) if bad else None


def _too_many_or_few(mask: Any, values: Any, after: int) -> Any:
    """A mask has as many places as there are values, of which each has `after` dimensions."""
    count = values.shape[-after - 1] if values.ndim > after else 1
    return None if count == 1 else jnp.count_nonzero(mask) != count


def _division(x: Any, y: Any, mode: Any = "floor") -> Any:
    whole = all(jnp.issubdtype(jnp.asarray(t).dtype, jnp.integer) for t in (x, y))
    return jnp.any(jnp.asarray(y) == 0) if whole and mode is not None else None


def _classes(x: Any, target: Any, weight: Any, reduction: Any, ignored: Any, *rest: Any) -> Any:
    classes = x.shape[1 if x.ndim > 1 else 0]
    return jnp.any(((target < 0) | (target >= classes)) & (target != ignored))


def _sorter(edges: Any, *rest: Any) -> Any:
    sorter = rest[4] if len(rest) > 4 else None
    return None if sorter is None else _outside(sorter, edges.shape[-1])


CHECKS: Final[dict[str, Check]] = {
    "embedding": lambda weight, index, *rest: _outside(index, weight.shape[0]),
    "embedding_dense_backward": lambda grad, index, rows, *rest: _outside(index, rows),
    **dict.fromkeys(("index", "index_put", "_index_put_impl"), _indices),
    **dict.fromkeys(
        ("gather", "scatter", "scatter_add", "scatter_reduce", "index_select", "index_add",
         "index_copy", "index_fill", "index_reduce"),
        _along,
    ),
    **dict.fromkeys(
        ("take", "put"), lambda x, index, *rest: _outside(index, x.size, -x.size)
    ),
    "one_hot": lambda x, classes=-1: _outside(x, classes),
    **dict.fromkeys(("nll_loss_forward", "nll_loss2d_forward"), _classes),
    **dict.fromkeys(
        ("nll_loss_backward", "nll_loss2d_backward"), lambda grad, *rest: _classes(*rest)
    ),
    **dict.fromkeys(("floor_divide", "remainder", "fmod", "div"), _division),
    **dict.fromkeys(
        ("binary_cross_entropy",), lambda x, *rest: jnp.any((x < 0) | (x > 1))
    ),
    "searchsorted": _sorter,
    "masked_scatter": lambda x, mask, source: jnp.sum(
        jnp.broadcast_to(mask, jnp.broadcast_shapes(mask.shape, x.shape))
    ) > source.size,
}  # fmt: skip
"""By the name of the op without its overload."""


def check_of(node: Node) -> Check | None:
    """The check of a node, if it has one that may say something of its types."""
    name = node.op.name.split(".")[1]
    if name in ("div", "floor_divide", "remainder", "fmod"):
        type_ = node.outputs[0].type
        if type_.dtype.is_floating_point or type_.dtype.is_complex:
            return None
    return CHECKS.get(name)


def needs_reals(node: Node) -> bool:
    """The check of a node looks at more than whole numbers."""
    return node.op.name.startswith("aten.binary_cross_entropy")
