"""Lowering for Inductor: the steps of the FX backends, with Inductor's decompositions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor import _torch
from torpor.backends.fx.backend import FxLowering as InductorLowering

__all__ = ["InductorLowering", "decompositions"]


def decompositions() -> dict[Any, Callable[..., Any]]:
    """The ops that are taken apart before Inductor sees them."""
    return _torch.inductor_decompositions()
