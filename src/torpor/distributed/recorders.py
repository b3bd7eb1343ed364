"""Recorders of collectives: what torch.distributed calls, as ops of `distributed.ops`.

A call that writes to its tensors (`c10d.allreduce_`) is its functional twin and a write; the work
it returns is done, for what comes after it in the program is recorded after it. What is not
recorded (`gather`, `scatter`, `barrier`, tensors that are plain) runs at once, after all that was.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch

from torpor import _torch
from torpor.distributed import ops
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ops.spec import spec_of
from torpor.overrides.eager import count_sync, run_eager
from torpor.overrides.special import copy_
from torpor.trace.dispatch import special
from torpor.trace.recorder import make_recorder
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import value_of
from torpor.trace.wrap import wrap_storage

_recorders: dict[Any, Callable[..., Any]] = {}


class LaunchRequest(NamedTuple):
    """A collective to record: on what, and the tensors that its results are written to."""

    collective: Any
    inputs: Sequence[torch.Tensor]
    arguments: tuple[Any, ...]
    targets: Sequence[torch.Tensor] | None = None  # None: the inputs


def _recorder(target: Any) -> Callable[..., Any]:
    if target not in _recorders:
        _recorders[target] = make_recorder(spec_of(target))
    return _recorders[target]


def start(collective: Any, inputs: Sequence[torch.Tensor], group: Any, *args: Any) -> list[Any]:
    """Record a collective after all that were recorded before; its results are not there yet."""
    name = group if isinstance(group, str) else _torch.group_in(group).group_name
    if TRACE.effects and TRACE.effects[-1].type.device != inputs[0].device:
        settle()  # a graph is of one device
    with TRACE.lock:
        after = wrap_storage(TRACE.effects[-1]) if TRACE.effects else None
        results: list[Any] = _recorder(collective.target)(list(inputs), after, name, *args)
        _groups.add(name)
        value = value_of(results[0])
        # a storage of its own: to the result's will be written what was waited for
        TRACE.effects[:] = [LazyStorage(value.type, value, None)]
        TRACE.enlist(TRACE.effects[0])
    return results


def wait(result: LazyTensor) -> LazyTensor:
    """The result of a collective, when it is there."""
    return _recorder(ops.WAIT)(result)  # type: ignore[no-any-return]  # of a recorder


_groups: set[str] = set()
"""Names of groups that collectives were recorded of."""


def settle(group: Any = None) -> None:
    """Run what was recorded, if there are collectives in it: another one, of `group`, will run."""
    if TRACE.effects and not TRACE.is_at_work() and not _is_apart(group):
        sync.cut()


def _is_apart(group: Any) -> bool:
    """Another thread talks in a group of its own, a writer of checkpoints for one.

    There is no order to keep, and a cut at a moment of its choosing would give each rank another
    graph.
    """
    if group is None or threading.current_thread() is threading.main_thread():
        return False
    return _torch.group_in(group).group_name not in _groups


# -- calls that write ------------------------------------------------------------------------------


def _c10d(
    name: str,
) -> Callable[[Callable[..., LaunchRequest | None]], Callable[..., LaunchRequest | None]]:
    """The decorated function says what a call of `c10d.name` is; None: it is run at once."""

    def register(
        describe: Callable[..., LaunchRequest | None],
    ) -> Callable[..., LaunchRequest | None]:
        def record(*args: Any, **kwargs: Any) -> Any:
            spec = spec_of(getattr(torch.ops.c10d, name).default)
            bound = spec.bind(args, kwargs)
            call = describe(*bound)
            if call is None or not _is_lazy(call.inputs if call.targets is None else call.targets):
                settle()
                count_sync(spec)
                return run_eager(spec, args, kwargs)
            group = bound[next(i for i, a in enumerate(spec.arguments) if a.name == _GROUP)]
            work = _written(call, group)
            return (bound[0], work) if len(spec.returns) > 1 else work

        special(f"c10d.{name}.default")(record)
        return describe

    return register


_GROUP = "process_group"


def _is_lazy(tensors: Iterable[Any]) -> bool:
    return all(isinstance(tensor, LazyTensor) for tensor in tensors)


def _written(call: LaunchRequest, group: Any) -> Any:
    targets = list(call.inputs if call.targets is None else call.targets)
    results = start(call.collective, call.inputs, group, *call.arguments)
    with torch.no_grad():
        if call.collective is ops.AllToAll and len(targets) > 1:
            results = list(torch.split(wait(results[0]), [t.numel() for t in targets]))
        for target, result in zip(targets, results, strict=True):
            copy_(target, wait(result).view(target.shape))
    return _torch.finished_work(targets, call.inputs[0].device)


@_c10d("allreduce_")
def _allreduce(
    tensors: Any, group: Any, op: Any, sparse_indices: Any, *_: Any
) -> LaunchRequest | None:
    name = _torch.reduction_in(op)
    plain = name is None or sparse_indices is not None
    return None if plain else LaunchRequest(ops.AllReduce, tensors, (name,))


@_c10d("allreduce_coalesced_")
def _allreduce_coalesced(tensors: Any, group: Any, op: Any, *_: Any) -> LaunchRequest | None:
    return _allreduce(tensors, group, op, None)


@_c10d("broadcast_")
def _broadcast(tensors: Any, group: Any, root: int, *_: Any) -> LaunchRequest:
    return LaunchRequest(ops.Broadcast, tensors, (root,))


@_c10d("reduce_")
def _reduce(tensors: Any, group: Any, op: Any, root: int, *_: Any) -> LaunchRequest | None:
    name = _torch.reduction_in(op)
    return None if name is None else LaunchRequest(ops.Reduce, tensors, (name, root))


@_c10d("allgather_")
def _allgather(outputs: Any, inputs: Any, group: Any, *_: Any) -> LaunchRequest | None:
    if len(inputs) != 1 or any(output.shape != inputs[0].shape for output in outputs[0]):
        return None
    return LaunchRequest(ops.AllGatherList, inputs, (len(outputs[0]),), outputs[0])


@_c10d("_allgather_base_")
def _allgather_base(output: Any, source: Any, group: Any, *_: Any) -> LaunchRequest | None:
    return _allgather_into([output], [source], group)


@_c10d("allgather_into_tensor_coalesced_")
def _allgather_into(outputs: Any, inputs: Any, group: Any, *_: Any) -> LaunchRequest:
    flat = [tensor.detach().reshape(-1) for tensor in inputs]
    return LaunchRequest(ops.AllGather, flat, (_torch.group_in(group).size(),), outputs)


@_c10d("reduce_scatter_")
def _reduce_scatter(
    outputs: Any, inputs: Any, group: Any, op: Any, *_: Any
) -> LaunchRequest | None:
    name = _torch.reduction_in(op)
    uneven = len(inputs) != 1 or any(each.shape != outputs[0].shape for each in inputs[0])
    if name is None or uneven:
        return None
    return LaunchRequest(ops.ReduceScatterList, inputs[0], (name,), outputs)


@_c10d("_reduce_scatter_base_")
def _reduce_scatter_base(
    output: Any, source: Any, group: Any, op: Any, *_: Any
) -> LaunchRequest | None:
    return _reduce_scatter_into([output], [source], group, op)


@_c10d("reduce_scatter_tensor_coalesced_")
def _reduce_scatter_into(
    outputs: Any, inputs: Any, group: Any, op: Any, *_: Any
) -> LaunchRequest | None:
    name, size = _torch.reduction_in(op), _torch.group_in(group).size()
    flat = [tensor.detach().reshape(-1) for tensor in inputs]
    return None if name is None else LaunchRequest(ops.ReduceScatter, flat, (name, size), outputs)


@_c10d("alltoall_base_")
def _alltoall_base(
    output: Any, source: Any, group: Any, output_splits: Any, input_splits: Any, *_: Any
) -> LaunchRequest:
    return LaunchRequest(
        ops.AllToAll, [source], (tuple(output_splits), tuple(input_splits)), [output]
    )


@_c10d("alltoall_")
def _alltoall(outputs: Any, inputs: Any, *_: Any) -> LaunchRequest:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in inputs])
    splits = tuple(t.numel() for t in outputs), tuple(t.numel() for t in inputs)
    return LaunchRequest(ops.AllToAll, [flat], splits, outputs)


@_c10d("send")
def _send(tensors: Any, group: Any, to: int, tag: int) -> LaunchRequest:
    return LaunchRequest(ops.Send, tensors, (to, tag), tensors)


@_c10d("recv_")
def _recv(tensors: Any, group: Any, source: int, tag: int) -> LaunchRequest:
    return LaunchRequest(ops.Recv, tensors, (source, tag))


def _at_once(*args: Any) -> None:
    return None


for _name in (
    "gather_", "scatter_", "barrier", "monitored_barrier_", "recv_any_source_",
    "allgather_coalesced_",
):  # fmt: skip
    _c10d(_name)(_at_once)


# -- functional collectives ------------------------------------------------------------------------


def _functional(
    *names: str,
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    return special(*(f"_c10d_functional.{name}.default" for name in names))


@_functional("wait_tensor", "_wrap_tensor_autograd")
def wait_tensor(tensor: LazyTensor) -> LazyTensor:
    """Where the result of a collective is needed: from here on its tensor holds it.

    Eager wraps a result, to wait at its first use. A recorded wait is put there anyway.
    """
    return copy_(tensor, wait(tensor))  # type: ignore[no-any-return]  # its first argument


@_functional("all_reduce")
def all_reduce(tensor: Any, op: str, group: Any) -> Any:
    """The same sum on every rank."""
    return start(ops.AllReduce, [tensor], group, op.lower())[0]


@_functional("all_reduce_coalesced")
def all_reduce_coalesced(tensors: Any, op: str, group: Any) -> Any:
    """The same sums on every rank."""
    return start(ops.AllReduce, tensors, group, op.lower())


@_functional("all_reduce_")
def all_reduce_(tensor: Any, op: str, group: Any) -> Any:
    """`all_reduce`, written to its argument."""
    return copy_(tensor, wait(all_reduce(tensor, op, group)))


@_functional("all_reduce_coalesced_")
def all_reduce_coalesced_(tensors: Any, op: str, group: Any) -> Any:
    """`all_reduce_coalesced`, written to its arguments."""
    results = all_reduce_coalesced(tensors, op, group)
    return list(itertools.starmap(copy_, zip(tensors, map(wait, results), strict=True)))


@_functional("all_gather_into_tensor", "all_gather_into_tensor_out")
def all_gather_into_tensor(tensor: Any, size: int, group: Any, out: Any = None) -> Any:
    """What all ranks have, one after the other."""
    (result,) = start(ops.AllGather, [tensor], group, size)
    return result if out is None else copy_(out, wait(result))


@_functional("all_gather_into_tensor_coalesced")
def all_gather_into_tensor_coalesced(tensors: Any, size: int, group: Any) -> Any:
    """The same of several tensors."""
    return start(ops.AllGather, tensors, group, size)


@_functional("reduce_scatter_tensor", "reduce_scatter_tensor_out")
def reduce_scatter_tensor(tensor: Any, op: str, size: int, group: Any, out: Any = None) -> Any:
    """A part of the sum on each rank."""
    (result,) = start(ops.ReduceScatter, [tensor], group, op.lower(), size)
    return result if out is None else copy_(out, wait(result))


@_functional("reduce_scatter_tensor_coalesced")
def reduce_scatter_tensor_coalesced(tensors: Any, op: str, size: int, group: Any) -> Any:
    """The same of several tensors."""
    return start(ops.ReduceScatter, tensors, group, op.lower(), size)


@_functional("all_to_all_single")
def all_to_all_single(tensor: Any, outputs: Any, inputs: Any, group: Any) -> Any:
    """A part from each rank."""
    return start(ops.AllToAll, [tensor], group, tuple(outputs), tuple(inputs))[0]


@_functional("broadcast")
def broadcast(tensor: Any, root: int, group: Any) -> Any:
    """What one rank has."""
    return start(ops.Broadcast, [tensor], group, root)[0]


@_functional("broadcast_")
def broadcast_(tensor: Any, root: int, group: Any) -> Any:
    """`broadcast`, written to its argument."""
    return copy_(tensor, wait(broadcast(tensor, root, group)))


@_functional("isend")
def isend(tensor: Any, to: int, tag: int, group: Any) -> Any:
    """To one rank."""
    return start(ops.Send, [tensor], group, to, tag)[0]


@_functional("irecv")
def irecv(tensor: Any, source: int, tag: int, group: Any) -> Any:
    """From one rank."""
    return start(ops.Recv, [tensor], group, source, tag)[0]
