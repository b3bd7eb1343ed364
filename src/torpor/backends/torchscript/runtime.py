"""Data of TorchScript programs, and ops that they leave to eager's kernels."""

from __future__ import annotations

from typing import Any

import torch

from torpor import metrics
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backends.reference import runtime as reference
from torpor.backends.reference.lowering import Instruction
from torpor.ir.types import TensorType

COUNTERS = ("TorchScriptGraph", "TorchScriptOps", "TorchScriptFallback", "TorchScriptRerun")
"""Graphs compiled, ops run by TorchScript, ops run by eager's kernels, programs rerun."""


class TSData(BackendData):
    """A tensor or a number, as an input or output of a TorchScript graph."""

    __slots__ = ("scalar",)

    def __init__(
        self,
        device: BackendDevice,
        type_: TensorType,
        tensor: torch.Tensor | None = None,
        scalar: Any = None,
    ) -> None:
        super().__init__(device, type_, tensor)
        self.scalar = scalar  # a Python number, if made from one

    def filled(self) -> bool:
        return self.tensor is not None or self.scalar is not None

    def assign(self, other: BackendData) -> None:
        super().assign(other)
        self.scalar = other.scalar if isinstance(other, TSData) else None


def run_alone(instruction: Instruction, env: list[Any]) -> None:
    """Run an op that TorchScript cannot express with eager's kernel, and count it."""
    metrics.count("TorchScriptFallback")
    reference.step(instruction, env)
