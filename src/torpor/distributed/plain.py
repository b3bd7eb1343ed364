"""Collectives on plain tensors: each runs in its turn, after those that were recorded before it.

Whoever calls one, from Python or from C++ (object collectives, barriers, the reducer of
DistributedDataParallel), calls an op of `c10d`. Its autograd key, which has nothing else to do for
such an op, is where torpor looks first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from torpor import _torch
from torpor.distributed import ops
from torpor.distributed.recorders import settle
from torpor.ops.spec import spec_of

_NAMES: Final = (
    "allreduce_", "allreduce_coalesced_", "broadcast_", "reduce_", "allgather_", "_allgather_base_",
    "allgather_coalesced_", "allgather_into_tensor_coalesced_", "reduce_scatter_",
    "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_", "alltoall_base_", "alltoall_",
    "send", "recv_", "recv_any_source_", "gather_", "scatter_", "barrier", "monitored_barrier_",
)  # fmt: skip
_library: Any = None


def install() -> None:
    """Look at collectives from now on; nothing is looked at where torch has none."""
    global _library
    if _library is None and torch.distributed.is_available():
        _library = torch.library.Library("c10d", "IMPL")
        for name in _NAMES:
            for key in ("AutogradCPU", "AutogradCUDA"):
                _library.impl(name, _kernel(getattr(torch.ops.c10d, name).default), key)


def _kernel(op: Any) -> Callable[..., Any]:
    names = [argument.name for argument in spec_of(op).arguments]
    place = names.index("process_group")

    def call(*args: Any) -> Any:
        if not ops.RUNNING.step and not _has_lazy(args):
            settle(args[place])
        with _torch.below_autograd():
            return op(*args)

    return call


def _has_lazy(args: Any) -> bool:
    """One of the tensors is lazy: the call is recorded, or waits for what is, by itself."""
    return any(
        _has_lazy(arg) if isinstance(arg, (list, tuple)) else _torch.has_own_dispatch(type(arg))
        for arg in args
        if isinstance(arg, (list, tuple, torch.Tensor))
    )
