"""Calls what a TorchDynamo backend compiled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torpor.backends.blocks.program import Compiled


def unboxed(function: Callable[..., Any]) -> Compiled:
    """Adapt `function` to the boxed calling convention: one list of tensors in, tensors out."""

    def run(inputs: list[torch.Tensor]) -> Sequence[torch.Tensor]:
        results = function(*inputs)
        return results if isinstance(results, (tuple, list)) else (results,)

    return run
