"""Lowering for Inductor: the steps of the FX backends, with Inductor's decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torpor import _torch
from torpor.backends.fx.backend import FxLowering as InductorLowering
from torpor.ir.node import Node

__all__ = ["InductorLowering", "decompositions", "miscompiles"]

aten = torch.ops.aten

_POOLED_BACK = ("avg_pool2d_backward", "avg_pool3d_backward")


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The ops that are taken apart before Inductor sees them."""
    return _torch.inductor_decompositions() | {
        aten.native_dropout_backward.default: _native_dropout_backward
    }


def _native_dropout_backward(grad: Tensor, mask: Tensor, scale: float) -> Tensor:
    """As the kernel rounds it: once. Torch's own decomposition rounds `scale` to the type too."""
    return (grad * mask) * scale


def miscompiles(node: Node) -> bool:
    """Inductor makes wrong code of the op.

    It divides by a window's whole size where, with `ceil_mode`, the window reaches beyond the
    padding.
    """
    if node.op.target._opname in _POOLED_BACK:
        *_, ceil_mode, count_include_pad, divisor = node.args
        return bool(ceil_mode and count_include_pad and divisor is None)
    return False
