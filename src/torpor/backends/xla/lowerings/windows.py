"""Convolutions and pools, and their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from torpor.backends.xla.lowerings.table import (
    NotLowered,
    backward_of,
    cast,
    lowers,
    opmath,
    shape_of,
)
from torpor.ir.node import Node

Ints = Sequence[int]


def _each(numbers: Ints, rank: int) -> tuple[int, ...]:
    """One number for each dimension; one alone stands for all."""
    return tuple(numbers) * rank if len(numbers) == 1 else tuple(numbers)


# -- convolutions ----------------------------------------------------------------------------------


def _layout(rank: int) -> tuple[str, str, str]:
    spatial = "DHW"[3 - rank :]
    return f"NC{spatial}", f"OI{spatial}", f"NC{spatial}"


def _forward(x: Any, w: Any, stride: Ints, padding: Ints, dilation: Ints, groups: int) -> Any:
    return lax.conv_general_dilated(
        x, w, stride, [(p, p) for p in padding], rhs_dilation=dilation,
        dimension_numbers=_layout(x.ndim - 2), feature_group_count=groups,
    )  # fmt: skip


def _transposed(
    x: Any, w: Any, stride: Ints, padding: Ints, dilation: Ints, output_padding: Ints, groups: int
) -> Any:
    """The gradient of a convolution: between the elements of `x` there are `stride - 1` zeros."""
    rank = x.ndim - 2
    inputs, outputs = w.shape[0], w.shape[1]
    w = w.reshape(groups, inputs // groups, outputs, *w.shape[2:]).swapaxes(1, 2)
    w = jnp.flip(w.reshape(groups * outputs, inputs // groups, *w.shape[3:]), range(2, 2 + rank))
    reach = [d * (k - 1) for d, k in zip(dilation, w.shape[2:], strict=True)]
    pads = [(r - p, r - p + o) for r, p, o in zip(reach, padding, output_padding, strict=True)]
    return lax.conv_general_dilated(
        x, w, (1,) * rank, pads, lhs_dilation=stride, rhs_dilation=dilation,
        dimension_numbers=_layout(rank), feature_group_count=groups,
    )  # fmt: skip


def _convolve(x: Any, w: Any, settings: Sequence[Any]) -> Any:
    stride, padding, dilation, transposed, output_padding, groups = settings
    rank = w.ndim - 2
    if jnp.iscomplexobj(x):
        raise NotLowered("a complex convolution")
    stride, padding, dilation, output_padding = (
        _each(numbers, rank) for numbers in (stride, padding, dilation, output_padding)
    )
    alone = x.ndim == rank + 1
    x = x[None] if alone else x
    if transposed:
        y = _transposed(x, w, stride, padding, dilation, output_padding, groups)
    else:
        y = _forward(x, w, stride, padding, dilation, groups)
    return y[0] if alone else y


@lowers("convolution.default", "_convolution.default")
def _convolution(node: Node, x: Any, w: Any, bias: Any, *settings: Any) -> Any:
    if not math.prod(shape_of(node)):
        return jnp.zeros(shape_of(node), x.dtype)
    y = _convolve(x, w, settings[:6])
    return y if bias is None else y + bias.reshape(-1, *(1,) * (w.ndim - 2))


@lowers("convolution_backward.default")
def _convolution_backward(
    node: Node, grad: Any, x: Any, w: Any, bias_sizes: Any, *settings: Any
) -> Any:
    *how, wanted = settings
    back = backward_of(lambda x, w: _convolve(x, w, how), x, w)
    dx, dw = back(grad) if grad.size else (jnp.zeros_like(x), jnp.zeros_like(w))
    channels = grad.ndim - (w.ndim - 2) - 1
    others = tuple(dim for dim in range(grad.ndim) if dim != channels)
    db = jnp.sum(cast(grad, opmath(grad.dtype)), axis=others)
    return [made if want else None for made, want in zip((dx, dw, db), wanted, strict=True)]


# -- windows ---------------------------------------------------------------------------------------


class Windows:
    """The windows of a pool: for each offset in a window, the places it is at."""

    def __init__(
        self, shape: Ints, out: Ints, kernel: Ints, stride: Ints, padding: Ints, dilation: Ints
    ) -> None:
        rank = len(kernel)
        self.sizes, self.out = tuple(shape[-rank:]), tuple(out[-rank:])
        self.kernel, self.padding = tuple(kernel), _each(padding, rank)
        self.stride, self.dilation = _each(stride or kernel, rank), _each(dilation, rank)
        numbers = zip(self.sizes, self.out, kernel, self.stride, self.dilation, self.padding)
        self.after = [max(0, (o - 1) * s + (k - 1) * d + 1 - n - p) for n, o, k, s, d, p in numbers]

    def pad(self, x: Any, value: Any) -> Any:
        """`x` with `value` where windows leave it."""
        pads = [(0, 0, 0)] * (x.ndim - len(self.sizes))
        pads += [(p, a, 0) for p, a in zip(self.padding, self.after, strict=True)]
        return lax.pad(x, jnp.asarray(value, x.dtype), pads)

    def offsets(self) -> Iterator[tuple[int, ...]]:
        """Every offset in a window, in the order of memory."""
        return itertools.product(*(range(k) for k in self.kernel))

    def at(self, padded: Any, offset: Ints) -> Any:
        """What all windows have at one offset."""
        first = [o * d for o, d in zip(offset, self.dilation, strict=True)]
        last = [f + (n - 1) * s + 1 for f, n, s in zip(first, self.out, self.stride, strict=True)]
        whole = padded.ndim - len(first)
        return lax.slice(
            padded,
            [0] * whole + first,
            [*padded.shape[:whole], *last],
            [1] * whole + [*self.stride],
        )

    def put(self, x: Any, offset: Ints) -> Any:
        """The gradient of `at` and `pad`: `x` at one offset of all windows, zeros elsewhere."""
        pads = [(0, 0, 0)] * (x.ndim - len(offset))
        for o, d, s, p, n, w in zip(
            offset, self.dilation, self.stride, self.padding, self.sizes, self.out
        ):
            first = o * d - p
            covered = (w - 1) * s + 1
            pads.append((first, n - first - covered, s - 1))
        return lax.pad(x, jnp.zeros((), x.dtype), pads)

    def places(self, offset: Ints) -> np.ndarray[Any, Any]:
        """For each window the number of the element that it has at one offset."""
        number = np.zeros((), np.int64)
        for o, d, s, p, n, w in zip(
            offset, self.dilation, self.stride, self.padding, self.sizes, self.out
        ):
            number = number[..., None] * n + (np.arange(w) * s + o * d - p)
        return number


def _lowest(dtype: Any) -> Any:
    return -jnp.inf if jnp.issubdtype(dtype, jnp.floating) else jnp.iinfo(dtype).min


@lowers("max_pool2d_with_indices.default", "max_pool3d_with_indices.default")
def _max_pool(
    node: Node, x: Any, kernel: Any, stride: Any = (), padding: Any = (0,), dilation: Any = (1,),
    ceil: bool = False,
) -> Any:  # fmt: skip
    rank = 2 if "2d" in node.op.name else 3
    windows = Windows(x.shape, shape_of(node), _each(kernel, rank), stride, padding, dilation)
    padded = windows.pad(x, _lowest(x.dtype))
    inside = windows.pad(jnp.ones(windows.sizes, jnp.bool_), False)
    best = jnp.full(shape_of(node), _lowest(x.dtype), x.dtype)
    index = jnp.full(shape_of(node), -1, jnp.int64)
    for offset in windows.offsets():
        value = windows.at(padded, offset)
        takes = ((value > best) | (value != value) | (index < 0)) & windows.at(inside, offset)
        best = jnp.where(takes, value, best)
        index = jnp.where(takes, windows.places(offset), index)
    return best, index


@lowers("max_pool2d_with_indices_backward.default", "max_pool3d_with_indices_backward.default")
def _max_pool_backward(
    node: Node, grad: Any, x: Any, kernel: Any, stride: Any, padding: Any, dilation: Any,
    ceil: bool, index: Any,
) -> Any:  # fmt: skip
    rank = 2 if "2d" in node.op.name else 3
    windows = Windows(x.shape, grad.shape, _each(kernel, rank), stride, padding, dilation)
    grad = cast(grad, opmath(grad.dtype))
    made = jnp.zeros(x.shape, grad.dtype)
    for offset in windows.offsets():
        hit = index == windows.places(offset)
        made += windows.put(jnp.where(hit, grad, 0), offset)
    return made


def _average(x: Any, out: Ints, args: Sequence[Any], rank: int) -> Any:
    kernel, stride, padding, _, with_pad, divisor = args
    windows = Windows(x.shape, out, _each(kernel, rank), stride, padding, (1,))
    padded = windows.pad(x, 0)
    total = sum(windows.at(padded, offset) for offset in windows.offsets())
    return total / _divisors(windows, with_pad, divisor, x.dtype)


def _divisors(windows: Windows, with_pad: bool, divisor: Any, dtype: Any) -> Any:
    """By what each window is divided: its elements, padding with them or not."""
    if divisor is not None:
        return jnp.asarray(divisor, dtype)
    counts: Any = np.ones((), np.int64)
    for n, o, k, s, p in zip(
        windows.sizes, windows.out, windows.kernel, windows.stride, windows.padding, strict=True
    ):
        first = np.arange(o) * s - p
        last = np.minimum(first + k, n + p)
        if not with_pad:
            first, last = np.maximum(first, 0), np.minimum(last, n)
        counts = counts[..., None] * (last - first)
    return jnp.asarray(counts, dtype)


@lowers("avg_pool2d.default", "avg_pool3d.default")
def _average_pool(node: Node, x: Any, *args: Any) -> Any:
    rank = 2 if "2d" in node.op.name else 3
    return _average(cast(x, opmath(x.dtype)), shape_of(node), args, rank)


@lowers("avg_pool2d_backward.default", "avg_pool3d_backward.default")
def _average_pool_backward(node: Node, grad: Any, x: Any, *args: Any) -> Any:
    rank = 2 if "2d" in node.op.name else 3
    wide = cast(x, opmath(x.dtype))
    back = backward_of(lambda y: _average(y, grad.shape, args, rank), wide)
    return back(cast(grad, wide.dtype))[0]


def _adaptive(x: Any, out: Ints) -> Any:
    """The mean of each of `out` parts of the last dimensions, as products with sparse matrices."""
    for dim, parts in enumerate(out, x.ndim - len(out)):
        size = x.shape[dim]
        matrix = np.zeros((size, parts))
        for part in range(parts):
            first, last = part * size // parts, -(-(part + 1) * size // parts)
            matrix[first:last, part] = 1 / (last - first)
        x = jnp.moveaxis(jnp.matmul(jnp.moveaxis(x, dim, -1), cast(matrix, x.dtype)), -1, dim)
    return x


@lowers("_adaptive_avg_pool2d.default", "_adaptive_avg_pool3d.default",
        "adaptive_avg_pool1d.default")  # fmt: skip
def _adaptive_average(node: Node, x: Any, out: Any) -> Any:
    return _adaptive(cast(x, opmath(x.dtype)), out)


@lowers("_adaptive_avg_pool2d_backward.default", "_adaptive_avg_pool3d_backward.default")
def _adaptive_average_backward(node: Node, grad: Any, x: Any) -> Any:
    rank = 2 if "2d" in node.op.name else 3
    wide = cast(x, opmath(x.dtype))
    return backward_of(lambda y: _adaptive(y, grad.shape[-rank:]), wide)(cast(grad, wide.dtype))[0]


@lowers("im2col.default")
def _im2col(node: Node, x: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    return _columns(x, kernel, dilation, padding, stride).reshape(shape_of(node))


def _columns(x: Any, kernel: Any, dilation: Any, padding: Any, stride: Any) -> Any:
    reach = [d * (k - 1) + 1 for d, k in zip(dilation, kernel, strict=True)]
    numbers = zip(x.shape[-2:], reach, padding, stride, strict=True)
    out = [(n + 2 * p - r) // s + 1 for n, r, p, s in numbers]
    windows = Windows(x.shape, out, kernel, stride, padding, dilation)
    padded = windows.pad(x, 0)
    return jnp.stack([windows.at(padded, offset) for offset in windows.offsets()], axis=-3)


@lowers("col2im.default")
def _col2im(
    node: Node, x: Any, size: Any, kernel: Any, dilation: Any, padding: Any, stride: Any
) -> Any:
    image = jnp.zeros(shape_of(node), x.dtype)
    made, back = jax.vjp(lambda y: _columns(y, kernel, dilation, padding, stride), image)
    return back(x.reshape(made.shape))[0]
