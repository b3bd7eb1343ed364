"""`fully_shard` on lazy parameters: what it gathers and scatters is recorded.

It makes buffers on the parameters' device. Where parameters are lazy on a concrete device, so are
the buffers. It frees and allocates memory by hand; a recorded step needs memory when it runs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from torpor import _torch
from torpor.frontend.mode import LazyMode
from torpor.trace.dispatch import special
from torpor.trace.tensor import LazyTensor


@special("fsdp.all_gather_copy_in.default")
def _all_gather_copy_in(
    inputs: Sequence[torch.Tensor], output: torch.Tensor, sizes: Any, count: int, rank: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank gives, as a part of what all ranks will have."""
    own = output.narrow(0, count * rank, count)
    own.copy_(torch.cat([tensor.reshape(-1) for tensor in inputs]))
    return own, output


def _recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of parameters that are sharded: its buffers are lazy where they are."""

    def call(*args: Any, **kwargs: Any) -> Any:
        if not _torch.has_lazy_shard(args, LazyTensor):
            return function(*args, **kwargs)
        with LazyMode():
            return function(*args, **kwargs)

    return call


def _left_alone(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function that changes the memory of a tensor: a lazy one has none to change."""

    def call(tensor: Any) -> None:
        if not isinstance(tensor, LazyTensor):
            function(tensor)

    return call


def install() -> None:
    """Let torch's functions be those above, once somebody imports them."""
    _torch.on_fully_shard(_recorded, _left_alone)
