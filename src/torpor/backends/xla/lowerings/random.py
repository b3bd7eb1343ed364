"""Random ops, where XLA draws (`rng="fast"`): not eager's numbers, but equal ones for equal seeds.

Each is a function of the node, the key from which it draws and the op's arguments.
"""

from __future__ import annotations

from typing import Any, Final

import jax.numpy as jnp
from jax import random

from torpor.backends.xla.lowerings.table import Lowering, dtype_of, opmath, shape_of
from torpor.ir.node import Node


def _uniform(node: Node, key: Any, x: Any, low: Any = 0.0, high: Any = 1.0, *_: Any) -> Any:
    drawn = random.uniform(key, shape_of(node), opmath(dtype_of(node)))
    return drawn * (high - low) + low


def _normal(node: Node, key: Any, x: Any, mean: Any = 0.0, deviation: Any = 1.0, *_: Any) -> Any:
    return random.normal(key, shape_of(node), opmath(dtype_of(node))) * deviation + mean


def _uniform_of_size(node: Node, key: Any, *rest: Any) -> Any:
    return _uniform(node, key, None)


def _normal_of_size(node: Node, key: Any, *rest: Any) -> Any:
    return _normal(node, key, None)


def _bernoulli(node: Node, key: Any, x: Any, p: Any = None, *_: Any) -> Any:
    return random.bernoulli(key, x if p is None else p, shape_of(node))


def _dropout(node: Node, key: Any, x: Any, p: float, train: bool | None) -> Any:
    if train is False:
        return x, jnp.ones(x.shape, jnp.bool_)
    mask = random.bernoulli(key, 1 - p, x.shape)
    return jnp.where(mask, x * (1 / (1 - p) if p < 1 else 0.0), 0), mask


def _exponential(node: Node, key: Any, x: Any, rate: float = 1.0, *_: Any) -> Any:
    return random.exponential(key, shape_of(node), opmath(dtype_of(node))) / rate


def _whole(node: Node, key: Any, low: Any, high: Any) -> Any:
    return random.randint(key, shape_of(node), low, high, jnp.int64)


DRAWS: Final[dict[str, Lowering]] = {
    **dict.fromkeys(("aten.rand.default", "aten.rand_like.default"), _uniform_of_size),
    **dict.fromkeys(("aten.randn.default", "aten.randn_like.default"), _normal_of_size),
    "aten.uniform.default": _uniform,
    "aten.normal_functional.default": _normal,
    "aten.bernoulli.default": lambda node, key, x, *_: _bernoulli(node, key, x),
    "aten.bernoulli.p": _bernoulli,
    "aten.native_dropout.default": _dropout,
    "aten.exponential.default": _exponential,
    "aten.randint.default": lambda node, key, high, *_: _whole(node, key, 0, high),
    "aten.randint.low": lambda node, key, low, high, *_: _whole(node, key, low, high),
    "aten.randint_like.default": lambda node, key, x, high, *_: _whole(node, key, 0, high),
    "aten.randint_like.low_dtype": lambda node, key, x, low, high, *_: _whole(node, key, low, high),
    "aten.randperm.default": lambda node, key, n, *_: random.permutation(key, n),
}
"""By the name of the op."""
