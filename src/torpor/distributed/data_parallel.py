"""DistributedDataParallel over lazy parameters: its buckets are lazy, so that nothing runs.

Its reducer, in C++, copies gradients into buckets, calls the process group for each, and copies
what comes back. On lazy buckets all of that is recorded: forward, backward, collectives and the
optimizer are one graph, with the very buckets that eager has.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

from torpor import _torch
from torpor.frontend.enable import LAZINESS
from torpor.frontend.mode import LazyMode
from torpor.frontend.switching import convert_parts, parts_of
from torpor.overrides.whole import keep_parts
from torpor.trace.tensor import LazyTensor


def install() -> None:
    """Look at what DistributedDataParallel makes."""
    if torch.distributed.is_available():
        _torch.on_data_parallel(_prepare, _buckets)


def _prepare(module: torch.nn.Module) -> None:
    """Under `enable()` parameters become lazy before the reducer holds on to them."""
    if LAZINESS.on:
        with LAZINESS.lock:
            convert_parts(list(parts_of(module)))


class _Buckets(LazyMode):
    """Memory for gradients is lazy; the reducer's own books stay plain."""

    def __init__(self, dtypes: set[torch.dtype]) -> None:
        super().__init__()
        self.dtypes = dtypes

    def _traces(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        is_memory = func is torch.ops.aten.empty.memory_format
        is_bucket = is_memory and kwargs.get("dtype") in self.dtypes
        return is_bucket and super()._traces(func, args, kwargs)


def _buckets(parameters: Iterable[Any]) -> AbstractContextManager[Any]:
    """What the reducer makes is lazy if parameters are; it groups gradients as they arrive."""
    lazy = [p for p in parameters if type(p) is LazyTensor]
    if lazy:
        keep_parts()
    concrete = {p.dtype for p in lazy if p.device.type != "lazy"}
    return _Buckets(concrete) if concrete else nullcontext()
