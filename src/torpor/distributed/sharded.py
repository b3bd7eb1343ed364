"""Sharded data parallel as DTensor redistribution: gathered in forward, scattered in backward.

    from torpor.distributed.sharded import shard_parameters

    model = shard_parameters(Model(), init_device_mesh("cpu", (2,)))

Between steps a rank holds its shard of each parameter, gradient and optimizer state. In a forward
call a module's parameter is the whole one: an all-gather, whose gradient is a reduce-scatter. Both
are nodes of the step where parameters are lazy, so what is gathered lives from its first use to its
last one, and the next gather starts while this layer computes. On plain tensors it is the same
program, eagerly.
"""

from __future__ import annotations

import functools
import threading
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from torpor.errors import UnsupportedError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor


def shard_parameters(module: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Let every rank of `mesh` hold a shard of each parameter of `module`, along dimension 0.

    The module is changed in place and returned; names in its `state_dict` stay. Parameters have to
    be equal on all ranks. Gradients are the mean over ranks. Make the optimizer afterwards.
    """
    known: dict[int, nn.Parameter] = {}  # a parameter that two modules share stays one
    for part in list(module.modules()):
        own = {name: p for name, p in part._parameters.items() if p is not None}
        _refuse(part, own)
        for name, parameter in own.items():
            if id(parameter) not in known:
                known[id(parameter)] = _shard(parameter, mesh)
            part._parameters[name] = known[id(parameter)]
        part.__class__ = _gathering(type(part), tuple(own))
    return module


def _refuse(part: nn.Module, own: dict[str, nn.Parameter]) -> None:
    from torch.distributed.tensor import DTensor

    kind = type(part).__name__
    if own and isinstance(part, nn.RNNBase):
        raise UnsupportedError(f"{kind} keeps its weights in a list besides; use `fully_shard`")
    if any(isinstance(parameter, DTensor) for parameter in own.values()):
        raise UnsupportedError(f"parameters of {kind} are DTensors already; use `fully_shard`")


def _shard(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    # from the data that every rank has: no communication
    placement = Shard(0) if parameter.dim() else Replicate()
    whole = parameter.detach()
    shard = distribute_tensor(whole, mesh, [placement] * mesh.ndim, src_data_rank=None)
    return nn.Parameter(shard, parameter.requires_grad)


class _ShardedCalls(threading.local):
    """How many forward calls of such modules this thread is inside of."""

    depth = 0


_calls = _ShardedCalls()


def _gathering(cls: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass whose parameters `names` are whole inside a forward call."""

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        _calls.depth += 1
        try:
            return cls.forward(self, *args, **kwargs)
        finally:
            _calls.depth -= 1

    members: dict[str, Any] = {name: _parameter(name) for name in names}
    members |= {"forward": functools.wraps(cls.forward)(forward), "__module__": cls.__module__}
    return type(f"Sharded{cls.__name__}", (cls,), members)


def _parameter(name: str) -> property:
    def parameter(self: nn.Module) -> Any:
        shard: Any = self._parameters[name]
        return _gather(shard) if _calls.depth else shard

    return property(parameter)


def _gather(shard: DTensor) -> torch.Tensor:
    from torch.distributed.tensor import Partial, Replicate

    mesh = shard.device_mesh
    whole = shard.redistribute(placements=[Replicate()] * mesh.ndim)
    local = whole.to_local(grad_placements=[Partial()] * mesh.ndim)
    if local.requires_grad:
        local.register_hook(lambda gradient: gradient / mesh.size())  # then ranks are summed
    return local
