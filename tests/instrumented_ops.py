"""Custom ops that make running visible: one counts its runs, one waits at a gate, one fails.

They have fake kernels, so torpor records them like any other op; what happens happens in the CPU
kernel, which only a running graph calls.
"""

import threading

import torch
from torch import Tensor

PATIENCE = 30.0
"""Seconds the gated op waits before it gives up: a test that would hang then fails instead."""

_runs: list[tuple[int, ...]] = []
_gate = threading.Event()
_timed_out: list[bool] = []


@torch.library.custom_op("torpor_tests::counted", mutates_args=(), device_types="cpu")
def _counted(x: Tensor) -> Tensor:
    _runs.append(tuple(x.shape))
    return x.clone()


@torch.library.custom_op("torpor_tests::gated", mutates_args=(), device_types="cpu")
def _gated(x: Tensor) -> Tensor:
    if not _gate.wait(PATIENCE):
        _timed_out.append(True)
    return x.clone()


@torch.library.custom_op("torpor_tests::failing", mutates_args=(), device_types="cpu")
def _failing(x: Tensor) -> Tensor:
    raise ArithmeticError("the kernel failed")


for _op in (_counted, _gated, _failing):
    _op.register_fake(lambda x: torch.empty_like(x))
    _op.register_autograd(lambda ctx, grad: grad)


def counted(x: Tensor) -> Tensor:
    """A copy of `x`; every run of it is counted."""
    return torch.ops.torpor_tests.counted(x)


def runs() -> int:
    """How often `counted` ran since `reset`."""
    return len(_runs)


def gated(x: Tensor) -> Tensor:
    """A copy of `x`, computed once `open_gate` was called."""
    return torch.ops.torpor_tests.gated(x)


def open_gate() -> None:
    _gate.set()


def gate_timed_out() -> bool:
    """Whether somebody waited for a gated value while the gate was shut."""
    return bool(_timed_out)


def failing(x: Tensor) -> Tensor:
    """Raises `ArithmeticError` when it runs."""
    return torch.ops.torpor_tests.failing(x)


def reset() -> None:
    _runs.clear()
    _timed_out.clear()
    _gate.clear()
