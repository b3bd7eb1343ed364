"""Packs the weights of recurrent layers into one buffer, as cuDNN requires.

Eager's modules keep them packed (`flatten_parameters`). Lazy parameters each have their own memory,
which steps replace; so they are packed before cuDNN runs, and again when one has been replaced.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch

from torpor import _torch
from torpor.backend.data import BackendData
from torpor.ir.types import TensorType
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import plain

aten = torch.ops.aten


class _Packed(NamedTuple):
    """Packed weights, and what they were packed from."""

    handles: list[ref[BackendData]]
    types: list[TensorType]
    how: tuple[Any, ...]
    memory: torch.Tensor


_PACKED: WeakKeyDictionary[BackendData, _Packed] = WeakKeyDictionary()
"""By the buffer of the first weight."""


def packed(weights: Sequence[LazyTensor], *how: Any) -> torch.Tensor:
    """`weights` packed into one buffer; `how` are arguments of `_cudnn_rnn_flatten_weight`."""
    reals = [plain(weight) for weight in weights]
    handles: list[Any] = [weight._lazy_storage.data for weight in weights]
    types = [TensorType.of_tensor(weight) for weight in weights]
    known = _PACKED.get(handles[0])
    if known is None or [h() for h in known.handles] != handles or known[1:3] != (types, how):
        with _torch.kernels():  # it redirects the tensors it is given to the new buffer
            memory = aten._cudnn_rnn_flatten_weight.default([real.clone() for real in reals], *how)
        known = _PACKED[handles[0]] = _Packed([ref(h) for h in handles], types, how, memory)
    return known.memory
