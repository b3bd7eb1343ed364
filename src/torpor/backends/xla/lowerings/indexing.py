"""Ops that read or write elements by index.

An index out of range is an error in eager and nothing in XLA: `checks.py` looks at them first.
"""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from torpor.backends.xla.lowerings.table import (
    NotLowered,
    cast,
    dtype_of,
    lowers,
    opmath,
    shape_of,
)
from torpor.ir.node import Node


def _is_mask(index: Any) -> bool:
    return index is not None and index.dtype in (jnp.bool_, jnp.uint8)


def _index(indices: Any) -> tuple[Any, ...]:
    if any(map(_is_mask, indices)):
        raise NotLowered("a mask among indices")
    return tuple(slice(None) if i is None else i for i in indices)


@lowers("index.Tensor", "_unsafe_index.Tensor")
def _take(node: Node, x: Any, indices: Any) -> Any:
    return x[_index(indices)]


@lowers("index_put.default", "_unsafe_index_put.default", "_index_put_impl.default")
def _put(node: Node, x: Any, indices: Any, values: Any, accumulate: bool = False, *_: Any) -> Any:
    values = cast(values, x.dtype)
    given = [dim for dim, index in enumerate(indices) if index is not None]
    if len(given) == 1 and _is_mask(indices[given[0]]):
        return _put_under_mask(x, given[0], cast(indices[given[0]], jnp.bool_), values, accumulate)
    at = x.at[_index(indices)]
    if accumulate and x.dtype != jnp.bool_:
        return at.add(values)
    return at.max(values) if accumulate else at.set(values)


def _put_under_mask(x: Any, dim: int, mask: Any, values: Any, accumulate: bool) -> Any:
    """`x` with values, in order, at the places under a mask on the dimensions from `dim` on."""
    after = x.ndim - dim - mask.ndim
    if values.ndim <= after:
        values = values.reshape((1,) * (after + 1 - values.ndim) + values.shape)
    axis = values.ndim - after - 1
    if not values.shape[axis]:
        return x
    order = jnp.cumsum(mask.reshape(-1)).reshape(mask.shape) - 1
    new = jnp.take(values, jnp.clip(order, 0, values.shape[axis] - 1), axis=axis)
    if accumulate:
        new = x | new if x.dtype == jnp.bool_ else x + new
    return jnp.where(mask.reshape(mask.shape + (1,) * after), new, x)


@lowers("nonzero_static.default")
def _nonzero_static(node: Node, x: Any, size: int, fill_value: int = -1) -> Any:
    if not x.ndim:
        return jnp.zeros(shape_of(node), jnp.int64)
    return jnp.stack(jnp.nonzero(x, size=size, fill_value=fill_value), axis=1)


@lowers("_unsafe_masked_index.default")
def _masked_index(node: Node, x: Any, mask: Any, indices: Any, fill: Any) -> Any:
    found = x.at[_index(indices)].get(mode="clip")
    return jnp.where(mask, found, cast(fill, x.dtype))


@lowers("_unsafe_masked_index_put_accumulate.default")
def _masked_put(node: Node, x: Any, mask: Any, indices: Any, values: Any) -> Any:
    sizes = iter(x.shape)
    inside = [None if i is None else jnp.clip(i, -n, n - 1) for i, n in zip(indices, sizes)]
    return x.at[_index(inside)].add(jnp.where(mask, values, 0))


# -- along one dimension ---------------------------------------------------------------------------


@lowers("index_select.default")
def _index_select(node: Node, x: Any, dim: int, index: Any) -> Any:
    return jnp.take(x, index, axis=dim) if x.ndim else x.reshape(shape_of(node))


@lowers("embedding.default")
def _embedding(node: Node, weight: Any, index: Any, *rest: Any) -> Any:
    return jnp.take(weight, index, axis=0)


@lowers("embedding_dense_backward.default")
def _embedding_backward(
    node: Node, grad: Any, index: Any, rows: int, padding: int, by_frequency: bool
) -> Any:
    index = index.ravel()
    grad = cast(grad.reshape(index.size, -1), opmath(grad.dtype))
    if by_frequency:
        counts = jnp.zeros(rows, grad.dtype).at[index].add(1)
        grad = grad / counts[index][:, None]
    grad = jnp.where((index == padding)[:, None], 0, grad)
    return jnp.zeros((rows, grad.shape[1]), grad.dtype).at[index].add(grad)


def _rows(x: Any, dim: int, index: Any) -> Any:
    """`x` at some places of one dimension, to be written to."""
    return x.at[(slice(None),) * (dim % x.ndim) + (jnp.atleast_1d(index),)]


@lowers("index_add.default")
def _index_add(node: Node, x: Any, dim: int, index: Any, source: Any, alpha: Any = 1) -> Any:
    added = cast(source, x.dtype) * cast(alpha, x.dtype)
    if not x.ndim:
        return x + added.reshape(())
    return _rows(x, dim, index).add(added if added.ndim else added[None])


@lowers("index_copy.default")
def _index_copy(node: Node, x: Any, dim: int, index: Any, source: Any) -> Any:
    if not x.ndim:
        return source.reshape(())
    return _rows(x, dim, index).set(source if source.ndim else source[None])


@lowers("index_fill.int_Scalar", "index_fill.int_Tensor")
def _index_fill(node: Node, x: Any, dim: int, index: Any, value: Any) -> Any:
    value = cast(value, x.dtype).reshape(())
    return _rows(x, dim, index).set(value) if x.ndim else value


_REDUCTIONS = {"prod": "multiply", "amax": "max", "amin": "min", "sum": "add", "add": "add",
               "multiply": "multiply"}  # fmt: skip


@lowers("index_reduce.default")
def _index_reduce(
    node: Node, x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True
) -> Any:
    rows, source = jnp.atleast_1d(x), jnp.atleast_1d(source)
    made = _combined(lambda y: _rows(y, dim, index), rows, source, reduce, include_self)
    return made.reshape(x.shape)


def _combined(at: Any, x: Any, source: Any, reduce: str, include_self: bool) -> Any:
    """`x` with `source` combined into places of it, which `at` gives."""
    if not include_self:
        neutral = _neutral(reduce, x.dtype)
        x = at(x).set(jnp.full((), neutral, x.dtype))
    if reduce == "mean":
        total = at(x).add(source)
        counts = at(jnp.full(x.shape, 1 if include_self else 0, x.dtype)).add(jnp.ones_like(source))
        counts = jnp.maximum(counts, 1)
        whole = jnp.issubdtype(x.dtype, jnp.integer)
        return jnp.floor_divide(total, counts) if whole else total / counts
    return getattr(at(x), _REDUCTIONS[reduce])(source)


def _neutral(reduce: str, dtype: Any) -> Any:
    if reduce in ("sum", "add", "mean"):
        return 0
    if reduce in ("prod", "multiply"):
        return 1
    if jnp.issubdtype(dtype, jnp.floating):
        return -jnp.inf if reduce == "amax" else jnp.inf
    if dtype == jnp.bool_:
        return reduce == "amin"
    limits = jnp.iinfo(dtype)
    return limits.min if reduce == "amax" else limits.max


# -- one index for each element --------------------------------------------------------------------


def _grid(index: Any, dim: int) -> tuple[Any, ...]:
    """The places that an index of all dimensions but one names."""
    places = [lax.broadcasted_iota(index.dtype, index.shape, d) for d in range(index.ndim)]
    places[dim % index.ndim] = index
    return tuple(places)


@lowers("gather.default")
def _gather(node: Node, x: Any, dim: int, index: Any, sparse: bool = False) -> Any:
    if not index.size:
        return jnp.zeros(index.shape, x.dtype)
    if not x.ndim or not index.ndim:
        return x.reshape(-1)[index.reshape(-1)].reshape(index.shape)
    dim %= x.ndim
    kept = tuple(slice(None) if d == dim else slice(n) for d, n in enumerate(index.shape))
    return jnp.take_along_axis(x[kept], index, dim)


def _scattered(x: Any, dim: int, index: Any, source: Any, how: Any) -> Any:
    if not index.size:
        return x
    shape, flat = x.shape, not x.ndim or not index.ndim
    x, index = (x.reshape(-1), index.reshape(-1)) if flat else (x, index)
    if source.ndim:
        source = source[tuple(slice(n) for n in index.shape)]
    elif flat or source.ndim != index.ndim:
        source = jnp.broadcast_to(source, index.shape)
    grid = _grid(index, 0 if flat else dim)
    return how(lambda y: y.at[grid], x, cast(source, x.dtype)).reshape(shape)


@lowers("scatter.src", "scatter.value")
def _scatter(node: Node, x: Any, dim: int, index: Any, source: Any) -> Any:
    source = cast(source, x.dtype)
    return _scattered(x, dim, index, source, lambda at, y, s: at(y).set(s))


@lowers("scatter_add.default")
def _scatter_add(node: Node, x: Any, dim: int, index: Any, source: Any) -> Any:
    return _scattered(x, dim, index, source, lambda at, y, s: at(y).add(s))


@lowers("scatter.reduce", "scatter.value_reduce")
def _scatter_by(node: Node, x: Any, dim: int, index: Any, source: Any, reduce: str) -> Any:
    source = cast(source, x.dtype)
    return _scattered(x, dim, index, source, lambda at, y, s: _combined(at, y, s, reduce, True))


@lowers("scatter_reduce.two")
def _scatter_reduce(
    node: Node, x: Any, dim: int, index: Any, source: Any, reduce: str, include_self: bool = True
) -> Any:
    return _scattered(
        x, dim, index, source, lambda at, y, s: _combined(at, y, s, reduce, include_self)
    )


@lowers("take.default")
def _take_flat(node: Node, x: Any, index: Any) -> Any:
    return x.reshape(-1)[index]


@lowers("put.default")
def _put_flat(node: Node, x: Any, index: Any, source: Any, accumulate: bool = False) -> Any:
    at = x.reshape(-1).at[index.reshape(-1)]
    source = source.reshape(-1)
    return (at.add(source) if accumulate else at.set(source)).reshape(x.shape)


@lowers("masked_scatter.default")
def _masked_scatter(node: Node, x: Any, mask: Any, source: Any) -> Any:
    mask, x = jnp.broadcast_arrays(mask, x)
    taken = jnp.cumsum(mask.reshape(-1)).reshape(mask.shape) - 1
    if not source.size:
        return x
    return jnp.where(mask, source.reshape(-1)[jnp.clip(taken, 0, source.size - 1)], x)


@lowers("isin.Tensor_Tensor")
def _isin(node: Node, x: Any, among: Any, unique: bool = False, invert: bool = False) -> Any:
    return jnp.isin(x, among, invert=invert)


@lowers("one_hot.default")
def _one_hot(node: Node, x: Any, classes: int = -1) -> Any:
    size = shape_of(node)[-1]
    return cast(x[..., None] == jnp.arange(size), dtype_of(node))


@lowers("masked_scatter_backward.default")
def _masked_scatter_backward(node: Node, grad: Any, mask: Any, sizes: Any) -> Any:
    """The elements under the mask, in order, then zeros."""
    mask = jnp.broadcast_to(mask, grad.shape).reshape(-1)
    count = min(math.prod(sizes), mask.size)
    order = jnp.argsort(~mask, stable=True)[:count]
    taken = jnp.where(mask[order], grad.reshape(-1)[order], 0)
    return jnp.pad(taken, (0, math.prod(sizes) - count)).reshape(tuple(sizes))
