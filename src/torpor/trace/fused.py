"""Fused kernels of GPUs that may draw random numbers: dropout and attention.

What they draw is drawn when it is recorded, as all random numbers are. What they compute is
recorded, so that a step with dropout stays one graph.
"""

from __future__ import annotations

from typing import Any

import torch

from torpor import _torch
from torpor.backend.registry import get_backend
from torpor.execute.storage import TRACE
from torpor.ir.types import TensorType
from torpor.ops.spec import OpSpec, ReturnKind, spec_of
from torpor.trace.dispatch import special
from torpor.trace.random import random_recorder
from torpor.trace.recorder import other_value
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import apply, physical, value_of
from torpor.trace.wrap import wrap_data, wrap_value

aten = torch.ops.aten
_dropout = random_recorder(spec_of(aten.native_dropout.default))


@special("aten.native_dropout.default")
def native_dropout(input: LazyTensor, p: float, train: bool | None) -> Any:
    """The kernel's mask, drawn now; its product with the input, recorded."""
    type_ = TensorType.of_tensor(input)
    device = physical(input.device)
    apart = device.type == "cuda" and not get_backend().draws
    if not (apart and train is not False and 0 < p < 1 and _is_dense(type_)):
        return _dropout(input, p, train)
    with _torch.kernels():
        drawn = aten.native_dropout.default(_alike(type_, device), p, train)[1]
    mask = wrap_data(drawn, input.device)
    return aten.native_dropout_backward.default(input, mask, _scale(p, type_.dtype)), mask


def _is_dense(type_: TensorType) -> bool:
    """Every place of its memory is one element: the kernel's result has its strides."""
    return type_.numel > 0 and type_.is_dense


def _alike(type_: TensorType, device: torch.device) -> torch.Tensor:
    """A tensor at the same place in its memory: how a kernel draws depends on alignment too."""
    memory = torch.empty((type_.offset + type_.span,), dtype=type_.dtype, device=device)
    return memory.as_strided(type_.shape, type_.stride, type_.offset)


def _scale(p: float, dtype: torch.dtype) -> float:
    """1 / (1 - p), rounded as the kernel rounds it."""
    kept = torch.tensor(1.0 - p, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    return kept.reciprocal().item()


def _record_attention(name: str) -> None:
    """Record an attention kernel where it drops nothing out, and so draws nothing."""
    op = getattr(aten, name).default
    spec = spec_of(op)
    drawing = random_recorder(spec)

    @special(str(op))
    def attention(*args: Any, **kwargs: Any) -> Any:
        bound = spec.bind(args, kwargs)
        if spec.draws(bound):
            return drawing(*args, **kwargs)
        return _recorded(spec, bound)


def _recorded(spec: OpSpec, bound: list[Any]) -> tuple[Any, ...]:
    """The results of a node; the numbers among them are lengths of queries and keys."""
    query, key = bound[:2]
    with TRACE.lock:
        values = [_value(a) if isinstance(a, torch.Tensor) else a for a in bound]
        outputs = iter(apply(spec.target, values).outputs)
        numbers = iter((query.shape[2], key.shape[2]))
        return tuple(
            next(numbers) if returned.kind is ReturnKind.OTHER else wrap_value(next(outputs))
            for returned in spec.returns
        )


def _value(tensor: torch.Tensor) -> Any:
    return value_of(tensor) if isinstance(tensor, LazyTensor) else other_value(tensor)


for _name in ("flash", "efficient", "cudnn"):
    _record_attention(f"_scaled_dot_product_{_name}_attention")
