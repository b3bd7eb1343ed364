"""Layer, group and batch norm, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp
from jax import lax

from torpor.backends.xla.lowerings.table import cast, lowers, opmath, shape_of
from torpor.ir.node import Node
from torpor.ops.spec import spec_of


def _statistics(x: Any, axes: tuple[int, ...]) -> tuple[Any, Any]:
    """Mean and variance, with their dimensions kept."""
    mean = jnp.mean(x, axis=axes, keepdims=True)
    return mean, jnp.mean(jnp.square(x - mean), axis=axes, keepdims=True)


def _affine(x: Any, weight: Any, bias: Any) -> Any:
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def _gradient(grad: Any, normal: Any, scale: Any, axes: tuple[int, ...]) -> Any:
    """The gradient of `normal = (x - mean) * scale` with the statistics of `x` itself."""
    mean = jnp.mean(grad, axis=axes, keepdims=True)
    along = jnp.mean(grad * normal, axis=axes, keepdims=True)
    return (grad - mean - normal * along) * scale


# -- layer norm ------------------------------------------------------------------------------------


@lowers("native_layer_norm.default")
def _layer_norm(node: Node, x: Any, shape: Any, weight: Any, bias: Any, eps: float) -> Any:
    x = cast(x, opmath(x.dtype))
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    mean, variance = _statistics(x, axes)
    scale = lax.rsqrt(variance + eps)
    return _affine((x - mean) * scale, weight, bias), mean, scale


@lowers("native_layer_norm_backward.default")
def _layer_norm_backward(
    node: Node, grad: Any, x: Any, shape: Any, mean: Any, scale: Any, weight: Any, bias: Any,
    wanted: Any,
) -> Any:  # fmt: skip
    dtype = opmath(x.dtype)
    grad, x, mean, scale = (cast(t, dtype) for t in (grad, x, mean, scale))
    axes = tuple(range(x.ndim - len(shape), x.ndim))
    batch = tuple(range(x.ndim - len(shape)))
    normal = (x - mean) * scale
    inner = grad if weight is None else grad * weight
    made = (
        _gradient(inner, normal, scale, axes),
        jnp.sum(grad * normal, axis=batch),
        jnp.sum(grad, axis=batch),
    )
    return [part if want else None for part, want in zip(made, wanted, strict=True)]


# -- group norm ------------------------------------------------------------------------------------


def _per_channel(weight: Any, x: Any) -> Any:
    return weight.reshape(-1, *(1,) * (x.ndim - 2))


@lowers("native_group_norm.default")
def _group_norm(
    node: Node, x: Any, weight: Any, bias: Any, n: int, c: int, hw: int, groups: int, eps: float
) -> Any:
    wide = cast(x, opmath(x.dtype)).reshape(n, groups, -1)
    mean, variance = _statistics(wide, (2,))
    scale = lax.rsqrt(variance + eps)
    y = ((wide - mean) * scale).reshape(x.shape)
    parameters = [None if p is None else _per_channel(p, x) for p in (weight, bias)]
    return _affine(y, *parameters), mean.squeeze(2), scale.squeeze(2)


@lowers("native_group_norm_backward.default")
def _group_norm_backward(
    node: Node, grad: Any, x: Any, mean: Any, scale: Any, weight: Any, n: int, c: int, hw: int,
    groups: int, wanted: Any,
) -> Any:  # fmt: skip
    dtype = opmath(x.dtype)
    grad, wide = cast(grad, dtype), cast(x, dtype).reshape(n, groups, -1)
    mean, scale = cast(mean, dtype)[..., None], cast(scale, dtype)[..., None]
    normal = (wide - mean) * scale
    inner = grad.reshape(x.shape)
    inner = (inner if weight is None else inner * _per_channel(weight, x)).reshape(wide.shape)
    others = (0, *range(2, x.ndim))
    made = (
        _gradient(inner, normal, scale, (2,)).reshape(x.shape),
        jnp.sum(grad.reshape(x.shape) * normal.reshape(x.shape), axis=others),
        jnp.sum(grad.reshape(x.shape), axis=others),
    )
    return [part if want else None for part, want in zip(made, wanted, strict=True)]


# -- batch norm ------------------------------------------------------------------------------------


def _channels(x: Any, t: Any) -> Any:
    """`t`, one number for each channel, in the shape of `x`."""
    return t.reshape(1, -1, *(1,) * (x.ndim - 2))


def _named(node: Node, args: tuple[Any, ...]) -> dict[str, Any]:
    spec = spec_of(node.op.target)
    return dict(zip((a.name for a in spec.arguments), args, strict=True))


@lowers("native_batch_norm.default", "_native_batch_norm_legit.default",
        "_native_batch_norm_legit.no_stats", "_native_batch_norm_legit_functional.default",
        "_batch_norm_with_update.default", "_batch_norm_no_update.default",
        "_batch_norm_with_update_functional.default",
        "_native_batch_norm_legit_no_training.default")  # fmt: skip
def _batch_norm(node: Node, *args: Any) -> Any:
    named = _named(node, args)
    x = cast(named["input"], opmath(named["input"].dtype))
    running = [named.get("running_mean"), named.get("running_var")]
    default = "no_training" not in node.op.name and "no_update" not in node.op.name
    training = named.get("training", default)
    axes = (0, *range(2, x.ndim))
    eps, momentum = named["eps"], named.get("momentum", 0.0)
    if training:
        mean, variance = _statistics(x, axes)
        scale = lax.rsqrt(variance + eps)
    else:
        mean, variance = (_channels(x, cast(t, x.dtype)) for t in running)
        scale = lax.rsqrt(variance + eps)
    parameters = [None if p is None else _channels(x, p) for p in (named["weight"], named["bias"])]
    made = [_affine((x - mean) * scale, *parameters)]
    saved = [mean.ravel(), scale.ravel()] if training else [jnp.zeros(0, x.dtype)] * 2
    made += [s if s.shape == shape_of(node, i) else jnp.zeros(shape_of(node, i), x.dtype)
             for i, s in enumerate(saved, 1)]  # fmt: skip
    if "batch_norm_with_update" in node.op.name or "batch_norm_no_update" in node.op.name:
        made.append(jnp.zeros(shape_of(node, 3), jnp.uint8))
    if len(node.outputs) > len(made):
        made += _moved(x, running, mean, variance, momentum, training, axes)
    return made


def _moved(
    x: Any, running: list[Any], mean: Any, variance: Any, momentum: Any, training: bool,
    axes: tuple[int, ...],
) -> list[Any]:  # fmt: skip
    """The running statistics after the step; those that there are."""
    if not training:
        return [t for t in running if t is not None]
    count = math.prod(x.shape[dim] for dim in axes)
    unbiased = variance.ravel() * (count / max(count - 1, 1))
    pairs = zip(running, (mean.ravel(), unbiased), strict=True)
    return [old * (1 - momentum) + new * momentum for old, new in pairs if old is not None]


@lowers("native_batch_norm_backward.default", "batch_norm_backward.default")
def _batch_norm_backward(node: Node, *args: Any) -> Any:
    named = _named(node, args)
    grad, x = named.get("grad_out"), named["input"]
    dtype = opmath(x.dtype)
    grad, x = cast(grad, dtype), cast(x, dtype)
    training = named.get("train", named.get("update"))
    wanted = named["output_mask"]
    axes = (0, *range(2, x.ndim))
    if training:
        mean = named.get("save_mean")
        scale = named.get("save_invstd", named.get("save_var"))
        mean, scale = _channels(x, cast(mean, dtype)), _channels(x, cast(scale, dtype))
    else:
        mean, variance = (
            _channels(x, cast(named[n], dtype)) for n in ("running_mean", "running_var")
        )
        scale = lax.rsqrt(variance + named["eps"])
    normal = (x - mean) * scale
    weight = named["weight"]
    inner = grad if weight is None else grad * _channels(x, weight)
    dx = _gradient(inner, normal, scale, axes) if training else inner * scale
    made = (dx, jnp.sum(grad * normal, axis=axes), jnp.sum(grad, axis=axes))
    return [part if want else None for part, want in zip(made, wanted, strict=True)]


# -- weight norm -----------------------------------------------------------------------------------


@lowers("_weight_norm_interface_backward.default")
def _weight_norm_backward(
    node: Node, grad: Any, v: Any, g: Any, norms: Any, dim: int
) -> tuple[Any, Any]:
    grad, v, g, norms = (cast(t, opmath(v.dtype)) for t in (grad, v, g, norms))
    others = tuple(d for d in range(v.ndim) if d != dim % v.ndim)
    along = jnp.sum(grad * v, axis=others, keepdims=True)
    norms = norms.reshape(along.shape)
    of_g = along / norms
    return (g.reshape(along.shape) / norms) * (grad - v * (of_g / norms)), of_g
