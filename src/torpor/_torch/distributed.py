"""Process groups, works and stores, in the form in which the dispatcher passes them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any, Final
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import _C

_NAMES: Final = ("SUM", "AVG", "PRODUCT", "MIN", "MAX", "BAND", "BOR", "BXOR")


def is_distributed() -> bool:
    """Whether this process is one of several ranks."""
    return bool(dist.is_available() and dist.is_initialized())


def resolve_group(name: str) -> Any:
    """The process group with that name."""
    return dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]  # a NewType


def group_in(boxed: Any) -> Any:
    """Unbox the process group argument of a `c10d` op."""
    return dist.ProcessGroup.unbox(boxed) if isinstance(boxed, _C.ScriptObject) else boxed


def reduction_in(boxed: Any) -> str | None:
    """The name of the reduction argument of a `c10d` op; None for one with a factor."""
    op = boxed.op() if isinstance(boxed, _C.ScriptObject) else boxed  # type: ignore[attr-defined]  # of ReduceOp
    return next((name.lower() for name in _NAMES if op == getattr(dist.ReduceOp, name)), None)


def reduction(name: str) -> Any:
    """The reduction with that name."""
    return getattr(dist.ReduceOp, name.upper())


def finished_work(result: Any, device: torch.device) -> Any:
    """A completed work, as a `c10d` op returns one."""
    future: Any = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
    future.set_result(result)
    make: Any = getattr(_C._distributed_c10d, "_create_work_from_future")  # noqa: B009  # untyped
    work = make(future)
    return dist.Work.boxed(work) if hasattr(dist.Work, "boxed") else work


def is_fake_group(group: Any) -> bool:
    """Whether it is `torch.testing`'s fake group: one process simulates a rank, without others."""
    return bool(dist.get_backend(group) == "fake")


def rank_and_world() -> tuple[int, int]:
    """This process's rank, and the number of ranks."""
    return (dist.get_rank(), dist.get_world_size()) if is_distributed() else (0, 1)


def ranks_of_group(name: str) -> list[int]:
    """The ranks in the group with that name, in order."""
    return list(dist.get_process_group_ranks(resolve_group(name)))


def gloo_group(store: Any, rank: int, size: int, seconds: float) -> Any:
    """A group that is registered nowhere, for a thread that simulates a rank."""
    group: Any = dist.ProcessGroup(store, rank, size)
    backend = dist.ProcessGroupGloo(store, rank, size, timedelta(seconds=seconds))
    kind = dist.ProcessGroup.BackendType.GLOO
    group._register_backend(torch.device("cpu"), kind, backend)
    group._set_default_backend(kind)
    return group


def store_of(group: Any) -> Any:
    """The store shared by the ranks of a group."""
    return dist.distributed_c10d._world.pg_map[group][1]


def on_data_parallel(
    prepare: Callable[[torch.nn.Module], None],
    buckets: Callable[[Iterable[torch.Tensor]], AbstractContextManager[Any]],
) -> None:
    """Call `prepare` with a module before DistributedDataParallel wraps it.

    Its reducer builds its buckets, initially and when rebuilding them, within `buckets`.
    """
    parallel: Any = torch.nn.parallel.DistributedDataParallel
    start, make = parallel.__init__, parallel._ddp_init_helper
    rebuild = dist.Reducer._rebuild_buckets
    parameters_of: WeakKeyDictionary[Any, list[torch.Tensor]] = WeakKeyDictionary()

    @functools.wraps(start)
    def __init__(self: Any, module: torch.nn.Module, *args: Any, **kwargs: Any) -> None:
        prepare(module)
        start(self, module, *args, **kwargs)

    @functools.wraps(make)
    def _ddp_init_helper(self: Any, parameters: Any, *args: Any, **kwargs: Any) -> Any:
        with buckets(parameters):
            made = make(self, parameters, *args, **kwargs)
        parameters_of[self.reducer] = parameters
        return made

    def _rebuild_buckets(self: Any) -> Any:
        with buckets(parameters_of.get(self, ())):
            return rebuild(self)

    parallel.__init__, parallel._ddp_init_helper = __init__, _ddp_init_helper
    dist.Reducer._rebuild_buckets = _rebuild_buckets  # type: ignore[method-assign]  # the purpose
