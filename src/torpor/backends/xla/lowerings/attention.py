"""Fused attention of GPUs and its gradients, by matrix products whose scores are in memory.

As in the kernels, products are of the dtype that was given and sums are in single precision.
"""

from __future__ import annotations

from typing import Any, Final

import jax
import jax.numpy as jnp

from torpor.backends.xla.lowerings.table import DTYPES, NotLowered, cast, lowers
from torpor.ir.node import Node
from torpor.ops.spec import spec_of

_KINDS: Final = ("flash", "efficient", "cudnn")
_KERNELS: Final = [f"_scaled_dot_product_{kind}_attention" for kind in _KINDS]


def _given(node: Node, args: Any) -> dict[str, Any]:
    """Arguments by their names, which the kernels share."""
    names = (argument.name.rstrip("_") for argument in spec_of(node.op.target).arguments)
    given = dict(zip(names, args, strict=True))
    if given["dropout_p"]:
        raise NotLowered("dropout inside attention")
    if given.get("scale") is None:
        given["scale"] = given["query"].shape[-1] ** -0.5
    return given


def _product(x: Any, y: Any) -> Any:
    return jnp.matmul(x, y, preferred_element_type=jnp.promote_types(x.dtype, jnp.float32))


def _turned(x: Any) -> Any:
    return jnp.swapaxes(x, -2, -1)


def _for_each_head(x: Any, query: Any) -> Any:
    """Keys or values of groups of heads, once for each head of the query."""
    return jnp.repeat(x, query.shape[1] // x.shape[1], axis=1)


def _of_groups(grad: Any, x: Any) -> Any:
    """The gradient of what `_for_each_head` was given."""
    return grad.reshape(x.shape[0], x.shape[1], -1, *grad.shape[2:]).sum(2)


def _scores(query: Any, key: Any, given: dict[str, Any]) -> Any:
    """What softmax is taken of."""
    scores = _product(query, _turned(key)) * given["scale"]
    if given["is_causal"]:
        rows, columns = scores.shape[-2:]
        scores = jnp.where(jnp.tri(rows, columns, dtype=jnp.bool_), scores, -jnp.inf)
    bias = given.get("attn_bias")
    return scores if bias is None else scores + bias


def _weights(scores: Any, sums: Any) -> Any:
    """Softmax by the sums of exponentials; rows that are masked as a whole are 0."""
    return jnp.exp(scores - jnp.where(sums == -jnp.inf, 0, sums)[..., None])


def _padded_to(sums: Any, shape: tuple[int, ...]) -> Any:
    """The sums as a kernel leaves them: with a last dimension, for more rows, or none."""
    if len(shape) > sums.ndim:
        return sums[..., None]
    rows = sums.shape[-1]
    return jnp.pad(sums, ((0, 0), (0, 0), (0, max(0, shape[-1] - rows))))[..., : shape[-1]]


@lowers(*[f"{name}.default" for name in _KERNELS])
def _attend(node: Node, *args: Any) -> Any:
    given = _given(node, args)
    query = given["query"]
    key, value = (_for_each_head(given[name], query) for name in ("key", "value"))
    scores = _scores(query, key, given)
    sums = jax.nn.logsumexp(scores, axis=-1)
    made = _product(cast(_weights(scores, sums), query.dtype), value)
    types = [output.type for output in node.outputs[2:]]  # where they would draw, and the like
    rest = [None if t is None else jnp.zeros(t.shape, DTYPES[t.dtype]) for t in types]
    return [made, _padded_to(sums, node.outputs[1].type.shape), *rest]


@lowers(*[f"{name}_backward.default" for name in _KERNELS])
def _attend_backward(node: Node, *args: Any) -> Any:
    given = _given(node, args)
    if len(node.outputs) > 3 and node.outputs[3].type is not None:
        raise NotLowered("the gradient of a bias")
    query, grad, out = given["query"], given["grad_out"], given["out"]
    key, value = (_for_each_head(given[name], query) for name in ("key", "value"))
    sums = given["logsumexp"]
    weights = _weights(
        _scores(query, key, given), sums.reshape(sums.shape[:3])[..., : query.shape[2]]
    )
    along = jnp.sum(cast(grad, sums.dtype) * cast(out, sums.dtype), axis=-1, keepdims=True)
    of_scores = cast(weights * (_product(grad, _turned(value)) - along), query.dtype)
    of_key = _product(_turned(of_scores), query) * given["scale"]
    of_value = _product(_turned(cast(weights, query.dtype)), grad)
    made = [
        _product(of_scores, key) * given["scale"],
        _of_groups(of_key, given["key"]),
        _of_groups(of_value, given["value"]),
    ]
    return [*made, None][: len(node.outputs)]
