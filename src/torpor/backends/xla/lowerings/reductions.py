"""Reductions, scans, orderings and softmax."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from torpor.backends.xla.lowerings.table import (
    NotLowered,
    cast,
    dims_of,
    dtype_of,
    lowers,
    lowers_all,
    opmath,
    shape_of,
)
from torpor.ir.node import Node


def _reduction(function: Callable[..., Any], *, all_dims: bool) -> Callable[..., Any]:
    """A reduction in the dtype of its result: over everything, or over some dimensions."""

    def lowered(node: Node, x: Any, *args: Any) -> Any:
        dims, keep = (None, False) if all_dims else (*args, False)[:2]
        x = cast(x, opmath(dtype_of(node)))
        return function(x, axis=dims_of(dims, x.ndim), keepdims=keep)

    return lowered


def _mean(x: Any, axis: Any, keepdims: bool) -> Any:
    count = math.prod(x.shape[dim] for dim in axis)
    return (
        jnp.sum(x, axis, keepdims=keepdims) / count
        if count
        else jnp.nan * jnp.sum(x, axis, keepdims=keepdims)
    )


lowers_all(
    {"sum": jnp.sum, "mean": _mean, "prod": jnp.prod},
    lambda function: _reduction(function, all_dims=True),
)
lowers_all(
    {"sum.dim_IntList": jnp.sum, "mean.dim": _mean, "prod.dim_int": jnp.prod, "nansum": jnp.nansum},
    lambda function: _reduction(function, all_dims=False),
)


@lowers("amax.default", "amin.default")
def _extreme(node: Node, x: Any, dims: Any = (), keep: bool = False) -> Any:
    function = jnp.max if "amax" in node.op.name else jnp.min
    return function(x, axis=dims_of(dims, x.ndim), keepdims=keep)


@lowers("max.default", "min.default")
def _extreme_of_all(node: Node, x: Any) -> Any:
    return jnp.max(x) if "max" in node.op.name else jnp.min(x)


@lowers("aminmax.default")
def _aminmax(node: Node, x: Any, dim: Any = None, keep: bool = False) -> Any:
    dims = dims_of(dim, x.ndim)
    return jnp.min(x, dims, keepdims=keep), jnp.max(x, dims, keepdims=keep)


@lowers("max.dim", "min.dim")
def _extreme_with_index(node: Node, x: Any, dim: int, keep: bool = False) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    index = (jnp.argmax if "max" in node.op.name else jnp.argmin)(x, dim, keepdims=True)
    value = jnp.take_along_axis(x, index, dim)
    return (value, index) if keep else (value.squeeze(dim), index.squeeze(dim))


@lowers("argmax.default", "argmin.default")
def _arg_extreme(node: Node, x: Any, dim: Any = None, keep: bool = False) -> Any:
    function = jnp.argmax if "argmax" in node.op.name else jnp.argmin
    return function(x, dim, keepdims=keep) if x.ndim else jnp.zeros((), jnp.int64)


@lowers("any.default", "any.dim", "any.dims", "all.default", "all.dim", "all.dims")
def _any_or_all(node: Node, x: Any, dims: Any = None, keep: bool = False) -> Any:
    function = jnp.any if "any" in node.op.name else jnp.all
    return function(x != 0, axis=dims_of(dims, x.ndim), keepdims=keep)


@lowers("count_nonzero.default", "count_nonzero.dim_IntList")
def _count_nonzero(node: Node, x: Any, dims: Any = None) -> Any:
    return jnp.sum(x != 0, axis=dims_of(dims, x.ndim), dtype=jnp.int64)


def _variance(x: Any, dims: Any, correction: Any, keep: bool) -> tuple[Any, Any]:
    """Variance and mean."""
    x = cast(x, opmath(x.dtype))
    axes = dims_of(dims, x.ndim)
    count = math.prod(x.shape[dim] for dim in axes)
    mean = _mean(x, axes, True)
    total = jnp.sum(jnp.square(jnp.abs(x - mean)), axis=axes, keepdims=keep)
    divisor = max(count - (1 if correction is None else correction), 0)
    variance = total / jnp.asarray(divisor, total.dtype)
    return variance, mean if keep else jnp.squeeze(mean, axes)


@lowers("var.correction", "std.correction", "var_mean.correction", "std_mean.correction")
def _spread(
    node: Node, x: Any, dims: Any = None, correction: Any = None, keep: bool = False
) -> Any:
    variance, mean = _variance(x, dims, correction, keep)
    spread = jnp.sqrt(variance) if "std" in node.op.name else variance
    return (spread, mean) if "mean" in node.op.name else spread


def norm(x: Any, order: Any, axes: tuple[int, ...], keep: bool) -> Any:
    """The vector norm of `x` along `axes`."""
    size = jnp.abs(x)
    if order == math.inf or order == -math.inf:
        return (jnp.max if order > 0 else jnp.min)(size, axis=axes, keepdims=keep)
    if order == 0:
        return jnp.sum(size != 0, axis=axes, keepdims=keep)
    if order == 1:
        return jnp.sum(size, axis=axes, keepdims=keep)
    if order == 2:
        return jnp.sqrt(jnp.sum(jnp.square(size), axis=axes, keepdims=keep))
    return jnp.sum(size**order, axis=axes, keepdims=keep) ** (1 / order)


@lowers("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.ScalarOpt_dim_dtype")
def _norm(node: Node, x: Any, order: Any = 2, dims: Any = None, keep: bool = False, *_: Any) -> Any:
    x = x if jnp.iscomplexobj(x) else cast(x, opmath(dtype_of(node)))
    return norm(x, 2 if order is None else order, dims_of(dims, x.ndim), keep)


@lowers("norm.Scalar")
def _norm_of_all(node: Node, x: Any, order: Any = 2) -> Any:
    return _norm(node, x, order)


@lowers("dist.default")
def _dist(node: Node, x: Any, y: Any, order: Any = 2) -> Any:
    return _norm(node, x - y, order)


@lowers("logsumexp.default")
def _logsumexp(node: Node, x: Any, dims: Any, keep: bool = False) -> Any:
    x = cast(x, opmath(dtype_of(node)))
    return jax.nn.logsumexp(x, axis=dims_of(dims, x.ndim), keepdims=keep)


@lowers("trace.default")
def _trace(node: Node, x: Any) -> Any:
    return jnp.trace(cast(x, dtype_of(node)))


# -- scans -----------------------------------------------------------------------------------------


@lowers("cumsum.default", "cumprod.default")
def _scan(node: Node, x: Any, dim: int, dtype: Any = None) -> Any:
    x = cast(x, opmath(dtype_of(node)))
    function = jnp.cumsum if "cumsum" in node.op.name else jnp.cumprod
    return function(x, axis=dim) if x.ndim else x


@lowers("logcumsumexp.default")
def _logcumsumexp(node: Node, x: Any, dim: int) -> Any:
    if jnp.iscomplexobj(x):
        raise NotLowered("complex logcumsumexp")
    return lax.cumlogsumexp(cast(x, jnp.float64), axis=dim % x.ndim) if x.ndim else x


@lowers("cummax.default", "cummin.default")
def _running_extreme(node: Node, x: Any, dim: int) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    dim %= x.ndim
    later = jnp.greater_equal if "cummax" in node.op.name else jnp.less_equal

    def combine(a: Any, b: Any) -> Any:
        takes = later(b[0], a[0]) | (b[0] != b[0]) & True
        takes &= ~((a[0] != a[0]) & (b[0] == b[0]))
        return jnp.where(takes, b[0], a[0]), jnp.where(takes, b[1], a[1])

    places = lax.broadcasted_iota(jnp.int64, x.shape, dim)
    return lax.associative_scan(combine, (x, places), axis=dim)


# -- orderings -------------------------------------------------------------------------------------


def ordered(x: Any, dim: int, descending: bool) -> tuple[Any, Any]:
    """Values in order and where they came from; equal ones stay in order, NaN is the largest."""
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    index = jnp.argsort(x, axis=dim, stable=True, descending=descending)
    return jnp.take_along_axis(x, index, dim), index


@lowers("sort.default")
def _sort(node: Node, x: Any, dim: int = -1, descending: bool = False) -> Any:
    return ordered(x, dim, descending)


@lowers("sort.stable")
def _stable_sort(
    node: Node, x: Any, stable: Any = None, dim: int = -1, descending: bool = False
) -> Any:
    return ordered(x, dim, descending)


@lowers("argsort.default")
def _argsort(node: Node, x: Any, dim: int = -1, descending: bool = False) -> Any:
    return ordered(x, dim, descending)[1]


@lowers("topk.default")
def _topk(
    node: Node, x: Any, k: int, dim: int = -1, largest: bool = True, in_order: bool = True
) -> Any:
    values, index = ordered(x, dim, largest)
    if not x.ndim:
        return values, index
    return [lax.slice_in_dim(part, 0, k, axis=dim % x.ndim) for part in (values, index)]


@lowers("kthvalue.default")
def _kth(node: Node, x: Any, k: int, dim: int = -1, keep: bool = False) -> Any:
    values, index = ordered(x, dim, False)
    if not x.ndim:
        return values, index
    return [lax.index_in_dim(part, k - 1, dim % x.ndim, keepdims=keep) for part in (values, index)]


@lowers("median.default", "nanmedian.default")
def _median_of_all(node: Node, x: Any) -> Any:
    return _middle(x.ravel(), 0, "nan" in node.op.name)[0].reshape(())


@lowers("median.dim", "nanmedian.dim")
def _median(node: Node, x: Any, dim: int = -1, keep: bool = False) -> Any:
    if not x.ndim:
        return x, jnp.zeros((), jnp.int64)
    value, index = _middle(x, dim, "nan" in node.op.name)
    return (value, index) if keep else (value.squeeze(dim), index.squeeze(dim))


def _middle(x: Any, dim: int, ignore_nan: bool) -> tuple[Any, Any]:
    """The lower median along a dimension, which stays, and its place; NaN if there is one."""
    values, index = ordered(x, dim, False)
    nans = jnp.sum(x != x, axis=dim, keepdims=True)
    size = x.shape[dim]
    if ignore_nan:
        place = jnp.maximum(size - nans - 1, 0) // 2
    else:
        place = jnp.where(nans > 0, size - nans, (size - 1) // 2)
    return jnp.take_along_axis(values, place, dim), jnp.take_along_axis(index, place, dim)


@lowers("searchsorted.Tensor", "bucketize.Tensor")
def _search(node: Node, first: Any, second: Any, *args: Any) -> Any:
    search = "searchsorted" in node.op.name
    edges, x = (first, second) if search else (second, first)
    right = bool(args[1]) or (search and args[2:3] == ("right",))
    if search and len(args) > 3 and args[3] is not None:
        edges = jnp.take_along_axis(edges, args[3], axis=-1)
    side = "right" if right else "left"
    if edges.ndim <= 1:
        return jnp.searchsorted(edges, x, side=side)
    each = jax.vmap(lambda e, v: jnp.searchsorted(e, v, side=side))
    flat = each(edges.reshape(-1, edges.shape[-1]), x.reshape(-1, x.shape[-1]))
    return flat.reshape(x.shape)


@lowers("histc.default")
def _histogram(node: Node, x: Any, bins: int = 100, low: Any = 0, high: Any = 0) -> Any:
    if x.dtype not in (jnp.float32, jnp.float64) or low == high:
        raise NotLowered("a histogram whose range the data say, or of other dtypes")
    low, high = jnp.asarray(low, x.dtype), jnp.asarray(high, x.dtype)
    # XLA multiplies by the reciprocal of a constant, which is not what eager does
    width = lax.optimization_barrier(high - low)
    place = cast((x - low) * bins / width, jnp.int64)
    place = jnp.clip(place, 0, bins - 1)
    inside = cast((x >= low) & (x <= high), x.dtype)
    return jnp.zeros(bins, x.dtype).at[place.reshape(-1)].add(inside.reshape(-1))


# -- softmax ---------------------------------------------------------------------------------------


def _softmax(x: Any, dim: int, log: bool) -> Any:
    function = jax.nn.log_softmax if log else jax.nn.softmax
    return function(x, axis=dim) if x.ndim else jnp.zeros_like(x) + (0 if log else 1)


@lowers("_softmax.default", "_log_softmax.default", "softmax.int", "log_softmax.int")
def _softmaxes(node: Node, x: Any, dim: int, *rest: Any) -> Any:
    return _softmax(cast(x, opmath(dtype_of(node))), dim, "log" in node.op.name)


@lowers("_safe_softmax.default")
def _safe_softmax(node: Node, x: Any, dim: int, dtype: Any = None) -> Any:
    x = cast(x, opmath(dtype_of(node)))
    empty = jnp.all(x == -jnp.inf, axis=dim, keepdims=True)
    return jnp.where(empty, 0, _softmax(x, dim, False))


@lowers("_softmax_backward_data.default")
def _softmax_backward(node: Node, grad: Any, y: Any, dim: int, dtype: Any) -> Any:
    grad, y = cast(grad, opmath(y.dtype)), cast(y, opmath(y.dtype))
    product = grad * y
    return product - y * jnp.sum(product, axis=dim, keepdims=True) if y.ndim else product - product


@lowers("_log_softmax_backward_data.default")
def _log_softmax_backward(node: Node, grad: Any, y: Any, dim: int, dtype: Any) -> Any:
    grad, y = cast(grad, opmath(y.dtype)), cast(y, opmath(y.dtype))
    total = jnp.sum(grad, axis=dim, keepdims=True) if y.ndim else grad
    return grad - jnp.exp(y) * total


# -- classes ---------------------------------------------------------------------------------------


def _class_weights(x: Any, target: Any, weight: Any, ignored: int) -> tuple[Any, Any, int]:
    """For each target its class, its weight (0 if it is ignored), and the dimension of classes."""
    dim = 1 if x.ndim > 1 else 0
    kept = target != ignored
    chosen = jnp.where(kept, target, 0)
    weights = jnp.ones((), x.dtype) if weight is None else weight[chosen]
    return chosen, jnp.where(kept, weights, 0), dim


@lowers("nll_loss_forward.default", "nll_loss2d_forward.default")
def _nll(node: Node, x: Any, target: Any, weight: Any, reduction: int, ignored: int) -> Any:
    chosen, weights, dim = _class_weights(x, target, weight, ignored)
    found = jnp.take_along_axis(x, jnp.expand_dims(chosen, dim), dim).squeeze(dim)
    losses = jnp.where(weights == 0, 0, -found * weights)
    total = jnp.sum(cast(weights, opmath(x.dtype)))
    if reduction == 0:
        return losses, jnp.zeros(shape_of(node, 1), x.dtype)
    summed = jnp.sum(cast(losses, opmath(x.dtype)))
    return summed / total if reduction == 1 else summed, total


@lowers("nll_loss_backward.default", "nll_loss2d_backward.default")
def _nll_backward(
    node: Node,
    grad: Any,
    x: Any,
    target: Any,
    weight: Any,
    reduction: int,
    ignored: int,
    total: Any,
) -> Any:
    chosen, weights, dim = _class_weights(x, target, weight, ignored)
    scale = -weights * (grad / total if reduction == 1 else grad)
    scale = jnp.where(weights == 0, 0, scale)
    classes = lax.broadcasted_iota(chosen.dtype, x.shape, dim)
    hit = classes == jnp.expand_dims(chosen, dim)
    return jnp.where(hit, cast(jnp.expand_dims(scale, dim), x.dtype), 0)
