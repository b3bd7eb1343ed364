"""Gradients of activations, those that come with them, and losses."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.scipy import special

from torpor.backends.xla.lowerings.pointwise import softplus
from torpor.backends.xla.lowerings.table import (
    cast,
    dtype_of,
    in_opmath,
    lowers,
    lowers_all,
    opmath,
    shape_of,
)
from torpor.ir.node import Node

SQRT_HALF = math.sqrt(0.5)


# -- gradients of activations ----------------------------------------------------------------------


def _gelu(x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        inner = math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)
        return 0.5 * x * (1 + jnp.tanh(inner))
    return x * 0.5 * (1 + special.erf(x * SQRT_HALF))


def _gelu_backward(grad: Any, x: Any, approximate: str) -> Any:
    if approximate == "tanh":
        factor = math.sqrt(2 / math.pi)
        tanh = jnp.tanh(factor * (x + 0.044715 * x * x * x))
        slope = (1 - tanh * tanh) * factor * (1 + 3 * 0.044715 * x * x)
        return grad * (0.5 * (1 + tanh) + 0.5 * x * slope)
    density = jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi))
    return grad * (0.5 * (1 + special.erf(x * SQRT_HALF)) + x * density)


def _silu_backward(grad: Any, x: Any) -> Any:
    s = jax.nn.sigmoid(x)
    return grad * s * (1 + x * (1 - s))


def _mish_backward(grad: Any, x: Any) -> Any:
    tanh, s = jnp.tanh(softplus(x)), jax.nn.sigmoid(x)
    return grad * (tanh + x * s * (1 - tanh * tanh))


def _softplus_backward(grad: Any, x: Any, beta: Any, threshold: Any) -> Any:
    return jnp.where(x * beta > threshold, grad, grad * jax.nn.sigmoid(x * beta))


def _hardswish_backward(grad: Any, x: Any) -> Any:
    return jnp.where(x < -3, 0, jnp.where(x <= 3, grad * (x / 3 + 0.5), grad))


def _logit_backward(grad: Any, x: Any, eps: Any = None) -> Any:
    outside = (x < 0) | (x > 1) if eps is None else (x < eps) | (x > 1 - eps)
    return jnp.where(outside, jnp.nan if eps is None else 0.0, grad / (x * (1 - x)))


lowers_all(
    {
        "gelu": _gelu,
        "gelu_backward": _gelu_backward,
        "silu_backward": _silu_backward,
        "mish_backward": _mish_backward,
        "sigmoid_backward": lambda grad, y: grad * (1 - y) * y,
        "tanh_backward": lambda grad, y: grad * (1 - y * y),
        "threshold_backward": lambda grad, x, limit: jnp.where(x <= limit, 0, grad),
        "leaky_relu_backward": lambda grad, x, slope, _: jnp.where(x > 0, grad, grad * slope),
        "hardtanh_backward": lambda grad, x, low, high: jnp.where(
            (x <= low) | (x >= high), 0, grad
        ),
        "hardsigmoid_backward": lambda grad, x: jnp.where((x > -3) & (x < 3), grad / 6, 0),
        "hardswish_backward": _hardswish_backward,
        "softplus_backward": _softplus_backward,
        "hardshrink_backward": lambda grad, x, limit: jnp.where(
            (x >= -limit) & (x <= limit), 0, grad
        ),
        "softshrink_backward": lambda grad, x, limit: jnp.where(
            (x >= -limit) & (x <= limit), 0, grad
        ),
        "logit_backward": _logit_backward,
        "native_dropout_backward": lambda grad, mask, scale: grad * mask * scale,
    },
    in_opmath,
)


@lowers("elu_backward.default")
def _elu_backward(
    node: Node, grad: Any, alpha: Any, scale: Any, input_scale: Any, is_result: bool, x: Any
) -> Any:
    dtype = opmath(dtype_of(node))
    grad, x = cast(grad, dtype), cast(x, dtype)
    inner = (x + alpha * scale) if is_result else alpha * scale * jnp.exp(x * input_scale)
    return jnp.where(x <= 0, grad * input_scale * inner, grad * scale)


@lowers("_prelu_kernel_backward.default")
def _prelu_backward(node: Node, grad: Any, x: Any, weight: Any) -> Any:
    return jnp.where(x > 0, grad, weight * grad), jnp.where(x > 0, 0, x * grad)


@lowers("log_sigmoid_forward.default")
def _log_sigmoid(node: Node, x: Any) -> Any:
    small = jnp.minimum(x, 0)
    z = jnp.exp(-jnp.abs(x))
    buffer = shape_of(node, 1)
    return small - jnp.log1p(z), z if buffer == x.shape else jnp.zeros(buffer, x.dtype)


@lowers("log_sigmoid_backward.default")
def _log_sigmoid_backward(node: Node, grad: Any, x: Any, buffer: Any) -> Any:
    return grad * jax.nn.sigmoid(-cast(x, opmath(x.dtype)))


@lowers("glu.default")
def _glu(node: Node, x: Any, dim: int) -> Any:
    a, b = jnp.split(cast(x, opmath(x.dtype)), 2, axis=dim)
    return a * jax.nn.sigmoid(b)


@lowers("glu_backward.default")
def _glu_backward(node: Node, grad: Any, x: Any, dim: int) -> Any:
    a, b = jnp.split(cast(x, opmath(x.dtype)), 2, axis=dim)
    s = jax.nn.sigmoid(b)
    return jnp.concatenate([grad * s, grad * a * s * (1 - s)], axis=dim)


# -- losses ----------------------------------------------------------------------------------------


def _reduced(loss: Any, reduction: int) -> Any:
    return [lambda x: x, jnp.mean, jnp.sum][reduction](loss)


def _loss(function: Any) -> Any:
    def lowered(node: Node, x: Any, y: Any, reduction: int, *rest: Any) -> Any:
        dtype = opmath(dtype_of(node))
        return _reduced(function(cast(x, dtype), cast(y, dtype), *rest), reduction)

    return lowered


def _loss_backward(slope: Any) -> Any:
    def lowered(node: Node, grad: Any, x: Any, y: Any, reduction: int, *rest: Any) -> Any:
        dtype = opmath(dtype_of(node))
        grad, x, y = cast(grad, dtype), cast(x, dtype), cast(y, dtype)
        count = math.prod(shape_of(node)) if reduction == 1 else 1
        return grad * slope(x, y, *rest) / count

    return lowered


def _huber(x: Any, y: Any, delta: Any) -> Any:
    far = jnp.abs(x - y)
    return jnp.where(far < delta, 0.5 * far * far, delta * (far - 0.5 * delta))


def _smooth_l1(x: Any, y: Any, beta: Any) -> Any:
    far = jnp.abs(x - y)
    return jnp.where(far < beta, 0.5 * far * far / jnp.where(beta == 0, 1, beta), far - 0.5 * beta)


def _smooth_l1_slope(x: Any, y: Any, beta: Any) -> Any:
    far = x - y
    return jnp.where(jnp.abs(far) < beta, far / jnp.where(beta == 0, 1, beta), jnp.sign(far))


lowers_all(
    {
        "mse_loss": lambda x, y: jnp.square(x - y),
        "huber_loss": _huber,
        "smooth_l1_loss": _smooth_l1,
        "soft_margin_loss": lambda x, y: jnp.log1p(jnp.exp(-y * x)),
    },
    _loss,
)
lowers_all(
    {
        "mse_loss_backward": lambda x, y: 2 * (x - y),
        "huber_loss_backward": lambda x, y, delta: jnp.clip(x - y, -delta, delta),
        "smooth_l1_loss_backward": _smooth_l1_slope,
        "soft_margin_loss_backward": lambda x, y: -y * jax.nn.sigmoid(-y * x),
    },
    _loss_backward,
)


@lowers("binary_cross_entropy.default")
def _binary_cross_entropy(node: Node, x: Any, y: Any, weight: Any, reduction: int) -> Any:
    loss = (y - 1) * jnp.maximum(jnp.log1p(-x), -100) - y * jnp.maximum(jnp.log(x), -100)
    return _reduced(loss if weight is None else loss * weight, reduction)


@lowers("binary_cross_entropy_backward.default")
def _binary_cross_entropy_backward(
    node: Node, grad: Any, x: Any, y: Any, weight: Any, reduction: int
) -> Any:
    grad = grad * (x - y) / jnp.maximum((1 - x) * x, 1e-12)
    grad = grad if weight is None else grad * weight
    return grad / x.size if reduction == 1 else grad


@lowers("binary_cross_entropy_with_logits.default")
def _bce_with_logits(node: Node, x: Any, y: Any, weight: Any, positive: Any, reduction: int) -> Any:
    log_weight = 1 if positive is None else (positive - 1) * y + 1
    loss = (1 - y) * x - log_weight * jax.nn.log_sigmoid(x)
    return _reduced(loss if weight is None else loss * weight, reduction)
