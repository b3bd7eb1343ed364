"""Views and new tensors: logical shapes alone, since strides are a matter of the way out."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from torpor.backends.xla.lowerings.table import (
    NotLowered,
    cast,
    dims_of,
    dtype_of,
    lowers,
    lowers_all,
    shape_of,
)
from torpor.ir.node import Node
from torpor.ir.types import TensorType


@lowers("view.default", "_unsafe_view.default", "reshape.default", "_reshape_alias.default",
        "view_copy.default", "unsqueeze.default", "unsqueeze_copy.default", "squeeze.default",
        "squeeze.dim", "squeeze.dims", "squeeze_copy.default", "squeeze_copy.dim",
        "squeeze_copy.dims", "flatten.using_ints", "_reshape_copy.default",
        "unflatten.int")  # fmt: skip
def _reshape(node: Node, x: Any, *rest: Any) -> Any:
    return x.reshape(shape_of(node))


@lowers("expand.default", "expand_copy.default", "broadcast_to.default", "expand_as.default")
def _expand(node: Node, x: Any, *rest: Any) -> Any:
    return jnp.broadcast_to(x, shape_of(node))


@lowers("view.dtype", "view_copy.dtype")
def _bits(node: Node, x: Any, dtype: Any) -> Any:
    to = dtype_of(node)
    if x.dtype == to:
        return x
    if jnp.bool_ in (to, x.dtype) or jnp.iscomplexobj(x) or jnp.issubdtype(to, jnp.complexfloating):
        raise NotLowered("bits of booleans or complex numbers")
    ratio = jnp.dtype(to).itemsize // x.dtype.itemsize
    if ratio > 1:
        x = x.reshape(*x.shape[:-1], x.shape[-1] // ratio, ratio)
    return lax.bitcast_convert_type(x, to).reshape(shape_of(node))


@lowers("permute.default", "permute_copy.default")
def _permute(node: Node, x: Any, dims: Any) -> Any:
    return jnp.transpose(x, dims_of(dims, x.ndim)) if x.ndim else x


@lowers("transpose.int", "transpose_copy.int")
def _transpose(node: Node, x: Any, first: int, second: int) -> Any:
    return jnp.swapaxes(x, first, second) if x.ndim else x


@lowers("t.default", "t_copy.default", "numpy_T.default")
def _turned(node: Node, x: Any) -> Any:
    return x.T


lowers_all(
    {
        "movedim.int movedim.intlist": jnp.moveaxis,
        "flip": lambda x, dims: jnp.flip(x, dims_of(dims, x.ndim)) if x.ndim and dims else x,
        "rot90": lambda x, k=1, dims=(0, 1): jnp.rot90(x, k, dims),
        "diagonal diagonal_copy": lambda x, offset=0, a=0, b=1: jnp.diagonal(x, offset, a, b),
        "tril": lambda x, k=0: jnp.tril(x, k),
        "triu": lambda x, k=0: jnp.triu(x, k),
        "stack": lambda tensors, dim=0: jnp.stack(tensors, dim),
    },
    lambda function: lambda node, *args: function(*args),
)


@lowers("roll.default")
def _roll(node: Node, x: Any, shifts: Any, dims: Any = ()) -> Any:
    if not dims:
        return jnp.roll(x.ravel(), shifts[0]).reshape(x.shape)
    return jnp.roll(x, tuple(shifts), tuple(dims)) if x.ndim else x


# -- parts -----------------------------------------------------------------------------------------


def bounds(size: int, start: Any, end: Any, step: int = 1) -> tuple[int, int]:
    """Where a slice of a dimension begins and ends."""
    start, end, _ = slice(start, end, step).indices(size)
    return start, max(start, end)


def part(x: Any, dim: int, start: Any, end: Any, step: int = 1) -> Any:
    """A slice of one dimension."""
    dim %= x.ndim
    return lax.slice_in_dim(x, *bounds(x.shape[dim], start, end, step), step, axis=dim)


@lowers("slice.Tensor", "slice_copy.Tensor")
def _slice(
    node: Node, x: Any, dim: int = 0, start: Any = None, end: Any = None, step: int = 1
) -> Any:
    return part(x, dim, start, end, step)


@lowers("narrow.default", "narrow_copy.default")
def _narrow(node: Node, x: Any, dim: int, start: int, length: int) -> Any:
    start = start + x.shape[dim] if start < 0 else start
    return lax.slice_in_dim(x, start, start + length, axis=dim % x.ndim)


@lowers("select.int", "select_copy.int")
def _select(node: Node, x: Any, dim: int, index: int) -> Any:
    dim %= x.ndim
    return lax.index_in_dim(x, index % x.shape[dim], dim, keepdims=False)


@lowers("split.Tensor", "split_copy.Tensor", "split_with_sizes.default",
        "split_with_sizes_copy.default", "chunk.default", "unsafe_split.Tensor",
        "unsafe_split_with_sizes.default", "unsafe_chunk.default", "tensor_split.sections",
        "tensor_split.indices", "split.sizes")  # fmt: skip
def _split(node: Node, x: Any, given: Any, dim: int = 0) -> Any:
    dim %= x.ndim
    sizes = [output.type.shape[dim] for output in node.outputs]
    ends = [int(end) for end in np.cumsum(sizes)]
    return [lax.slice_in_dim(x, e - n, e, axis=dim) for n, e in zip(sizes, ends, strict=True)]


@lowers("unbind.int", "unbind_copy.int")
def _unbind(node: Node, x: Any, dim: int = 0) -> Any:
    dim %= x.ndim
    return [lax.index_in_dim(x, i, dim, keepdims=False) for i in range(x.shape[dim])]


@lowers("cat.default", "concat.default")
def _cat(node: Node, tensors: Any, dim: int = 0) -> Any:
    dtype, rank = dtype_of(node), len(shape_of(node))
    parts = [cast(t, dtype) for t in tensors if t.shape != (0,) or rank == 1]
    return jnp.concatenate(parts, axis=dim) if parts else jnp.zeros(shape_of(node), dtype)


@lowers("repeat.default")
def _repeat(node: Node, x: Any, repeats: Any) -> Any:
    return jnp.tile(x, tuple(repeats)) if repeats else x


@lowers("unfold.default", "unfold_copy.default")
def _unfold(node: Node, x: Any, dim: int, size: int, step: int) -> Any:
    if not x.ndim:
        return x.reshape(1)[:size]
    dim %= x.ndim
    count = shape_of(node)[dim]
    places = np.arange(count)[:, None] * step + np.arange(size)[None, :]
    return jnp.moveaxis(jnp.take(x, places, axis=dim), dim + 1, -1)


@lowers("unfold_backward.default")
def _unfold_backward(node: Node, grad: Any, sizes: Any, dim: int, size: int, step: int) -> Any:
    if not sizes:
        return grad.sum()
    dim %= len(sizes)
    count = grad.shape[dim]
    places = np.arange(count)[:, None] * step + np.arange(size)[None, :]
    grad = jnp.moveaxis(jnp.moveaxis(grad, -1, dim + 1), (dim, dim + 1), (0, 1))
    made = jnp.zeros((sizes[dim], *sizes[:dim], *sizes[dim + 1 :]), grad.dtype)
    return jnp.moveaxis(made.at[places].add(grad), 0, dim)


@lowers("constant_pad_nd.default")
def _pad(node: Node, x: Any, pad: Any, value: Any = 0) -> Any:
    pairs = [(pad[i], pad[i + 1], 0) for i in range(0, len(pad), 2)]
    pairs += [(0, 0, 0)] * (x.ndim - len(pairs))
    return lax.pad(x, cast(value, x.dtype), pairs[::-1])


# -- parts put back --------------------------------------------------------------------------------


@lowers("slice_scatter.default")
def _slice_scatter(
    node: Node, x: Any, source: Any, dim: int = 0, start: Any = None, end: Any = None,
    step: int = 1,
) -> Any:  # fmt: skip
    dim %= x.ndim
    first, last = bounds(x.shape[dim], start, end, step)
    source = cast(source, x.dtype)
    if step == 1:
        return lax.dynamic_update_slice_in_dim(x, source, first, dim)
    index = (slice(None),) * dim + (slice(first, last, step),)
    return x.at[index].set(source)


@lowers("select_scatter.default")
def _select_scatter(node: Node, x: Any, source: Any, dim: int, index: int) -> Any:
    dim %= x.ndim
    row = jnp.expand_dims(cast(source, x.dtype), dim)
    return lax.dynamic_update_slice_in_dim(x, row, index % x.shape[dim], dim)


@lowers("slice_backward.default")
def _slice_backward(
    node: Node, grad: Any, sizes: Any, dim: int, start: Any, end: Any, step: int
) -> Any:
    dim %= len(sizes)
    first, _ = bounds(sizes[dim], start, end, step)
    return _spread(grad, dim, first, sizes[dim], step)


@lowers("select_backward.default")
def _select_backward(node: Node, grad: Any, sizes: Any, dim: int, index: int) -> Any:
    dim %= len(sizes)
    return _spread(jnp.expand_dims(grad, dim), dim, index % sizes[dim], sizes[dim], 1)


def _spread(x: Any, dim: int, first: int, size: int, step: int) -> Any:
    """`x` along one dimension of `size` places from `first` on, each `step`-th one, among zeros."""
    count = x.shape[dim]
    covered = (count - 1) * step + 1 if count else 0
    pads = [(0, 0, 0)] * x.ndim
    pads[dim] = (first, size - first - covered, step - 1) if count else (0, size, 0)
    return lax.pad(x, jnp.zeros((), x.dtype), pads)


def _diagonal_places(
    shape: tuple[int, ...], offset: int, first: int, second: int
) -> tuple[Any, ...]:
    """An index of the diagonal, which is put last."""
    first, second = first % len(shape), second % len(shape)
    length = max(0, min(shape[first] + min(offset, 0), shape[second] - max(offset, 0)))
    places = np.arange(length)
    return first, second, places - min(offset, 0), places + max(offset, 0)


@lowers("diagonal_scatter.default")
def _diagonal_scatter(
    node: Node, x: Any, source: Any, offset: int = 0, first: int = 0, second: int = 1
) -> Any:
    first, second, rows, columns = _diagonal_places(x.shape, offset, first, second)
    turned = jnp.moveaxis(x, (first, second), (-2, -1))
    turned = turned.at[..., rows, columns].set(cast(source, x.dtype))
    return jnp.moveaxis(turned, (-2, -1), (first, second))


@lowers("diagonal_backward.default")
def _diagonal_backward(
    node: Node, grad: Any, sizes: Any, offset: int, first: int, second: int
) -> Any:
    return _diagonal_scatter(node, jnp.zeros(sizes, grad.dtype), grad, offset, first, second)


@lowers("diag_embed.default")
def _diag_embed(node: Node, x: Any, offset: int = 0, first: int = -2, second: int = -1) -> Any:
    return _diagonal_scatter(node, jnp.zeros(shape_of(node), x.dtype), x, offset, first, second)


# -- memory ----------------------------------------------------------------------------------------


def memory_places(type_: TensorType) -> np.ndarray[Any, Any]:
    """For each place in the memory of a type the element that is there, by its logical number."""
    if type_.offset or not type_.is_dense:
        raise NotLowered(f"depends on the memory behind {type_!r}")
    order = sorted(range(len(type_.shape)), key=lambda d: (-type_.stride[d], -type_.shape[d]))
    logical = np.arange(math.prod(type_.shape)).reshape(type_.shape)
    return logical.transpose(order).ravel()


def _window(type_: TensorType, size: Any, stride: Any, offset: Any) -> np.ndarray[Any, Any]:
    """The logical numbers of the elements that a window on the memory of a type shows."""
    memory = memory_places(type_)
    places = np.full(tuple(size), offset or 0, dtype=np.int64)
    for dim, (count, step) in enumerate(zip(size, stride, strict=True)):
        shape = (1,) * dim + (count,) + (1,) * (len(size) - dim - 1)
        places += (np.arange(count) * step).reshape(shape)
    if places.size and (places.min() < 0 or places.max() >= memory.size):
        raise NotLowered("a window that leaves the memory of its tensor")
    return memory[places]


@lowers("as_strided.default", "as_strided_copy.default")
def _as_strided(node: Node, x: Any, size: Any, stride: Any, offset: Any = None) -> Any:
    return x.ravel()[_window(node.args[0].type, size, stride, offset)]


@lowers("as_strided_scatter.default")
def _as_strided_scatter(
    node: Node, x: Any, source: Any, size: Any, stride: Any, offset: Any = None
) -> Any:
    places = _window(node.args[0].type, size, stride, offset)
    return x.ravel().at[places].set(cast(source, x.dtype)).reshape(x.shape)


# -- new tensors -----------------------------------------------------------------------------------


@lowers("zeros.default", "zeros_like.default", "new_zeros.default", "empty.memory_format",
        "empty_like.default", "new_empty.default", "empty_strided.default", "zero.default",
        "new_empty_strided.default", "empty_permuted.default",
        "_efficientzerotensor.default")  # fmt: skip
def _zeros(node: Node, *rest: Any) -> Any:
    return jnp.zeros(shape_of(node), dtype_of(node))


@lowers("ones.default", "ones_like.default", "new_ones.default")
def _ones(node: Node, *rest: Any) -> Any:
    return jnp.ones(shape_of(node), dtype_of(node))


_FILLS = {"scalar_tensor": 0, "full": 1, "full_like": 1, "new_full": 2}  # where the number stands


@lowers(*[f"{name}.default" for name in _FILLS])
def _full(node: Node, *args: Any) -> Any:
    number = args[_FILLS[node.op.name.split(".")[1]]]
    return jnp.full(shape_of(node), cast(number, dtype_of(node)))


@lowers("arange.start_step", "arange.start", "arange.default")
def _arange(node: Node, *args: Any) -> Any:
    numbers = args[: {"default": 1, "start": 2, "start_step": 3}[node.op.name.split(".")[-1]]]
    start, step = (0, 1) if len(numbers) == 1 else (numbers[0], (*numbers, 1)[2])
    dtype = dtype_of(node)
    exact = jnp.float64 if jnp.issubdtype(dtype, jnp.floating) else jnp.int64
    places = jnp.arange(shape_of(node)[0], dtype=exact)
    return cast(start, exact) + places * cast(step, exact)


@lowers("eye.default", "eye.m")
def _eye(node: Node, *rest: Any) -> Any:
    rows, columns = shape_of(node)
    return jnp.eye(rows, columns, dtype=dtype_of(node))


@lowers("linspace.default")
def _linspace(node: Node, start: Any, end: Any, steps: int, *rest: Any) -> Any:
    dtype = dtype_of(node)
    if not jnp.issubdtype(dtype, jnp.inexact):
        raise NotLowered("whole numbers, rounded as eager rounds them")
    if steps == 1:
        return jnp.full((1,), start, dtype)
    step = (cast(end, dtype) - cast(start, dtype)) / (steps - 1)
    places = np.arange(steps)
    return jnp.where(places < steps // 2, start + step * places, end - step * (steps - 1 - places))


@lowers("tril_indices.default", "triu_indices.default")
def _triangle(node: Node, rows: int, columns: int, offset: int = 0, *rest: Any) -> Any:
    made = np.tril_indices if "tril" in node.op.name else np.triu_indices
    return jnp.asarray(np.stack(made(rows, offset, columns)))


@lowers("pixel_shuffle.default")
def _pixel_shuffle(node: Node, x: Any, factor: int) -> Any:
    *batch, channels, height, width = x.shape
    n = len(batch)
    x = x.reshape(*batch, channels // factor**2, factor, factor, height, width)
    return x.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 2).reshape(shape_of(node))


@lowers("pixel_unshuffle.default")
def _pixel_unshuffle(node: Node, x: Any, factor: int) -> Any:
    *batch, channels, height, width = x.shape
    n = len(batch)
    x = x.reshape(*batch, channels, height // factor, factor, width // factor, factor)
    return x.transpose(*range(n), n, n + 2, n + 4, n + 1, n + 3).reshape(shape_of(node))


@lowers("channel_shuffle.default")
def _channel_shuffle(node: Node, x: Any, groups: int) -> Any:
    batch, channels, *rest = x.shape
    return x.reshape(batch, groups, channels // groups, *rest).swapaxes(1, 2).reshape(x.shape)
