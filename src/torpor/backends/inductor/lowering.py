"""Lowering for Inductor: the shared FX lowering, with Inductor's decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torpor import _torch
from torpor.backends.blocks.block_backend import BlockLowering as InductorLowering
from torpor.ir.node import Node

__all__ = ["InductorLowering", "decompositions", "miscompiles"]

aten = torch.ops.aten

_POOLED_BACK = ("avg_pool2d_backward", "avg_pool3d_backward")


def decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions to apply before Inductor gets the graph."""
    return _torch.inductor_decompositions() | {
        aten.native_dropout_backward.default: _native_dropout_backward
    }


def _native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """Rounds once, like the kernel. Torch's decomposition also rounds `scale` to the dtype."""
    return (grad * mask) * scale


def miscompiles(node: Node) -> bool:
    """Whether Inductor generates wrong code for the op.

    With `ceil_mode`, a window may extend beyond the padding; Inductor divides by its full size.
    """
    if node.op.target._opname in _POOLED_BACK:
        *_, ceil_mode, count_include_pad, divisor = node.args
        return bool(ceil_mode and count_include_pad and divisor is None)
    return False
