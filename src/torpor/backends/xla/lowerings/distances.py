"""Distances between rows, and their gradients."""

from __future__ import annotations

import math
from typing import Any

import jax.numpy as jnp

from torpor.backends.xla.lowerings.table import lowers, shape_of
from torpor.ir.node import Node


def _norm(gaps: Any, p: float) -> Any:
    """The p-norm along the last dimension."""
    if p == 0:
        return jnp.sum(gaps != 0, axis=-1)
    gaps = jnp.abs(gaps)
    if p == math.inf:
        return jnp.max(gaps, axis=-1, initial=0)
    if p == 1:
        return jnp.sum(gaps, axis=-1)
    return jnp.sqrt(jnp.sum(gaps * gaps, axis=-1)) if p == 2 else jnp.sum(gaps**p, -1) ** (1 / p)


def _norm_backward(grad: Any, gaps: Any, norm: Any, p: float) -> Any:
    """The gradient of `gaps`; 0 where there is no gap."""
    grad, norm, size = grad[..., None], norm[..., None], jnp.abs(gaps)
    if p == 0:
        return jnp.zeros_like(gaps)
    if p == 1:
        return jnp.sign(gaps) * grad
    if p == math.inf:
        return jnp.sign(gaps) * (size == norm) * grad
    none = (norm == 0) | ((gaps == 0) & (p < 2))
    power = size ** (p - 2) if p > 2 else jnp.where(none, 1, size) ** (p - 2)
    return jnp.where(none, 0, gaps * power * grad / jnp.where(none, 1, norm) ** (p - 1))


def _pairs(x: Any, y: Any) -> Any:
    return x[..., :, None, :] - y[..., None, :, :]


@lowers("_cdist_forward.default")
def _cdist(node: Node, x: Any, y: Any, p: float, mode: Any = None) -> Any:
    return _norm(_pairs(x, y), p)


@lowers("_cdist_backward.default")
def _cdist_backward(node: Node, grad: Any, x: Any, y: Any, p: float, norm: Any) -> Any:
    return jnp.sum(_norm_backward(grad, _pairs(x, y), norm, p), axis=-2)


def _upper(x: Any) -> Any:
    """The pairs of rows of which `pdist` gives the distances, in its order."""
    return jnp.triu_indices(x.shape[0], 1)


@lowers("_pdist_forward.default")
def _pdist(node: Node, x: Any, p: float = 2) -> Any:
    first, second = _upper(x)
    return _norm(x[first] - x[second], p).reshape(shape_of(node))


@lowers("_pdist_backward.default")
def _pdist_backward(node: Node, grad: Any, x: Any, p: float, norm: Any) -> Any:
    first, second = _upper(x)
    made = _norm_backward(grad, x[first] - x[second], norm, p)
    return jnp.zeros_like(x).at[first].add(made).at[second].add(-made)
