"""`torch.distributed.fsdp.fully_shard`: the functions that allocate, free and fill its buffers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor._torch.import_hooks import replace_function

Function = Callable[..., Any]

_PACKAGE = "torch.distributed.fsdp._fully_shard"
_WITH_BUFFERS = ("foreach_all_gather", "foreach_all_gather_copy_out", "foreach_reduce")
_WITH_MEMORY = ("alloc_storage", "free_storage")


def has_lazy_shard(args: tuple[Any, ...], cls: type) -> bool:
    """Whether the parameters among the arguments have shards of class `cls`."""
    params = next((arg for arg in args if isinstance(arg, list)), [])
    return any(isinstance(param._sharded_param_data, cls) for param in params[:1])


def on_fully_shard(
    around_buffers: Callable[[Function], Function], around_memory: Callable[[Function], Function]
) -> None:
    """Wrap the functions that make buffers, and those that resize the memory of a tensor."""
    for name in _WITH_BUFFERS:
        replace_function(f"{_PACKAGE}._fsdp_collectives.{name}", around_buffers)
    for name in _WITH_MEMORY:
        replace_function(f"{_PACKAGE}._fsdp_param.{name}", around_memory)
