"""Tables for `Backend.decompositions`: ATen ops in terms of simpler ones, as functions on tensors.

    def decompositions(self):
        return decompositions.core(LOWERED)  # the names of ops that the backend lowers itself

Covers all of torch's decompositions of ops outside core ATen, of the `prims` that some of them
produce, and fused attention (forward and backward) as matrix products.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

from torpor import _torch

Table = dict[str, Callable[..., Any]]


def core(lowered: Iterable[str] = ()) -> Table:
    """A decomposition per op name, for each op that has one, except those in `lowered`."""
    kept = frozenset(lowered)
    return {name: function for name, function in _all().items() if name not in kept}


@functools.cache
def _all() -> Table:
    return _torch.torch_decompositions() | _ATTENTION


# -- fused attention -------------------------------------------------------------------------------


def _scores(
    query: torch.Tensor,
    key: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, float]:
    """The input of softmax, and its scale."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    scores = (query @ key.transpose(-2, -1)) * scale
    if is_causal:
        ones = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device)
        scores = scores.masked_fill(ones.triu(1), -math.inf)
    if bias is not None and bias.dtype is torch.bool:
        scores = scores.masked_fill(~bias, -math.inf)
    elif bias is not None:
        scores = scores + bias
    return scores, scale


def _wide(*tensors: torch.Tensor) -> list[torch.Tensor]:
    """Upcast to float32, unless float64: the fused kernels accumulate that way."""
    return [t if t.dtype is torch.float64 else t.float() for t in tensors]


def _weights(scores: torch.Tensor, sums: torch.Tensor) -> torch.Tensor:
    """Softmax, given the log-sum-exp of each row; fully masked rows are 0."""
    return (scores - sums.masked_fill(sums == -math.inf, 0).unsqueeze(-1)).exp()


def _for_each_head(tensor: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
    """Grouped keys or values, repeated for each head of the query."""
    heads, groups = query.shape[1], tensor.shape[1]
    return tensor if heads == groups else tensor.repeat_interleave(heads // groups, 1)


def _of_groups(grad: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The gradient of the input of `_for_each_head`."""
    groups = tensor.shape[1]
    return grad if grad.shape[1] == groups else grad.unflatten(1, (groups, -1)).sum(2)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The output, laid out as by the kernels (heads within rows), and the log-sum-exp of rows."""
    q, k, v = _wide(query, key, value)
    k, v = _for_each_head(k, q), _for_each_head(v, q)
    scores, _ = _scores(q, k, bias, is_causal, scale)
    sums = scores.logsumexp(-1)
    weights = _weights(scores, sums)
    output = (weights @ v).to(query.dtype)
    return output.transpose(1, 2).contiguous().transpose(1, 2), sums


def _gradients(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    sums: torch.Tensor,
    bias: torch.Tensor | None,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of query, key, value and scores."""
    g, q, k, v, o = _wide(grad, query, key, value, output)
    k, v = _for_each_head(k, q), _for_each_head(v, q)
    scores, scale = _scores(q, k, bias, is_causal, scale)
    weights = _weights(scores, sums[..., : scores.shape[-2]])
    of_scores = weights * (g @ v.transpose(-2, -1) - (g * o).sum(-1, keepdim=True))
    of_query = (of_scores @ k) * scale
    of_key = (of_scores.transpose(-2, -1) @ q) * scale
    of_value = weights.transpose(-2, -1) @ g
    of_key, of_value = _of_groups(of_key, key), _of_groups(of_value, value)
    made = (of_query.to(query.dtype), of_key.to(key.dtype), of_value.to(value.dtype))
    return *made, of_scores


def _for_cpu(
    query: Any, key: Any, value: Any, dropout_p: float = 0.0, is_causal: bool = False, *,
    attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p:
        return NotImplemented
    return _attend(query, key, value, attn_mask, is_causal, scale)


def _for_cpu_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, dropout_p: float,
    is_causal: bool, *, attn_mask: Any = None, scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p:
        return NotImplemented
    made = _gradients(grad, query, key, value, out, sums, attn_mask, is_causal, scale)
    return made[:3]


def _efficient_backward(
    grad: Any, query: Any, key: Any, value: Any, bias: Any, out: Any, sums: Any, seed: Any,
    offset: Any, dropout_p: float, wanted: Any, is_causal: bool = False, *,
    scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p or (wanted[3] and bias is not None):
        return NotImplemented
    made = _gradients(grad, query, key, value, out, sums, bias, is_causal, scale)
    return (*made[:3], None)


def _flash_backward(
    grad: Any, query: Any, key: Any, value: Any, out: Any, sums: Any, starts: Any,
    key_starts: Any, rows: int, columns: int, dropout_p: float, is_causal: bool, seed: Any,
    offset: Any, *, scale: float | None = None,
) -> Any:  # fmt: skip
    if dropout_p:
        return NotImplemented
    return _gradients(grad, query, key, value, out, sums, None, is_causal, scale)[:3]


_FUSED: Final = "aten._scaled_dot_product"
_ATTENTION: Final[Table] = {
    f"{_FUSED}_flash_attention_for_cpu.default": _for_cpu,
    f"{_FUSED}_flash_attention_for_cpu_backward.default": _for_cpu_backward,
    f"{_FUSED}_efficient_attention_backward.default": _efficient_backward,
    f"{_FUSED}_flash_attention_backward.default": _flash_backward,
}
