"""Collectives as ops: one starts a collective, `wait` is where its result is needed.

    %2 = torpor.all_reduce.default((%1,), None, '0', 'sum')
    %3 = torpor.wait.default(%2)
    %5 = torpor.all_gather.default((%4,), %2, '0', 2)

Each takes a result of the collective that was recorded before it (`after`): so they run in the
program's order, none is merged with another, and none is left out that a later one follows.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Final

import torch

from torpor import _torch
from torpor.errors import RankError
from torpor.ir.graph import Graph
from torpor.ir.node import Node

Tensors = Sequence[torch.Tensor]
Start = tuple[Any, list[torch.Tensor]]
"""A work, and the tensors that hold its results when it is done."""

_library = torch.library.Library("torpor", "FRAGMENT")
_starts: dict[str, Any] = {}
COLLECTIVES: set[Any] = set()
"""The ops that start a collective."""


class _Running(threading.local):
    """What this thread is at."""

    step = False  # it runs a graph: the collectives that it calls are that graph's
    started = 0  # collectives, by all graphs so far
    groups: Mapping[str, Any] | None = None  # it plays a rank, whose groups these are

    def __init__(self) -> None:
        self.pending: dict[int, _Started] = {}
        """Collectives nobody has waited for yet, by the addresses of their results."""


RUNNING: Final = _Running()


class Attend:
    """What a rank does while it waits for others; `distributed.agreement` has something to do."""

    call: Callable[[str, float], None] = staticmethod(lambda group, since: None)
    done: Callable[..., None] = staticmethod(lambda *facts: None)
    """A collective is over: its group, op and bytes, when it was begun, and then waited for."""


SLICE: Final = timedelta(milliseconds=50)
"""How long a rank waits for others before it looks whether they will come."""


class _Started:
    """A collective that was started, and what it works on."""

    def __init__(self, work: Any, tensors: list[torch.Tensor], group: str, facts: Any) -> None:
        self.work = work
        self.tensors = tensors
        self.group = group
        self.facts = facts  # its op, its bytes, and when it was begun

    def wait(self) -> None:
        """Until it is done; Python's lock is free, and a signal is handled."""
        since = time.perf_counter()
        self._wait()
        if RUNNING.groups is None:
            Attend.done(self.group, *self.facts, since)

    def _wait(self) -> None:
        if self.tensors and self.tensors[0].device.type == "cuda":
            self.work.wait()  # for the stream: the watchdog of NCCL looks after the rest
            return
        since = time.monotonic()
        while True:
            try:
                self.work.wait(SLICE)
                return
            except RuntimeError:
                if self.work.is_completed():  # it has failed, or ended right after the slice did
                    self._end()
                    return
            if RUNNING.groups is None:
                Attend.call(self.group, since)

    def _end(self) -> None:
        try:
            self.work.wait()
        except RuntimeError as error:
            raise RankError(f"a collective of group {self.group} failed: {error}") from None


def finish() -> None:
    """Wait for all that was started: their errors are this step's."""
    try:
        for started in {id(s): s for s in list(RUNNING.pending.values())}.values():
            started.wait()
    finally:
        RUNNING.pending.clear()


def forget() -> None:
    """Nobody will wait for what was started: its step has failed."""
    RUNNING.pending.clear()


def _own(tensors: Tensors) -> list[torch.Tensor]:
    """Copies to work on in place."""
    return [t.clone(memory_format=torch.contiguous_format) for t in tensors]


def _whole(tensors: Tensors) -> list[torch.Tensor]:
    return [t.contiguous() for t in tensors]


class Collective:
    """How a collective is started, and what types its results have."""

    target: Any
    start: Callable[..., Start]
    types: Callable[..., list[torch.Tensor]]


def collective(schema: str) -> Callable[[Any], Any]:
    """Define an op that starts a collective; the function has `start` and `types`."""

    def register(cls: Any) -> Any:
        name = schema.partition("(")[0]
        _library.define(schema)
        _library.impl(name, _starter(name, cls.start), "CompositeExplicitAutograd")
        _library._register_fake(name, cls.types)
        cls.target = getattr(torch.ops.torpor, name).default
        COLLECTIVES.add(cls.target)
        return cls

    return register


def _starter(name: str, start: Callable[..., Start]) -> Callable[..., list[torch.Tensor]]:
    def kernel(inputs: Tensors, after: Any, group: str, *args: Any) -> list[torch.Tensor]:
        RUNNING.step, begun = True, time.perf_counter()
        try:
            groups = RUNNING.groups
            found = _torch.resolve_group(group) if groups is None else groups[group]
            work, results = start(found, inputs, *args)
            RUNNING.started += 1
        except RuntimeError as error:
            raise RankError(f"a collective of group {group} failed: {error}") from None
        finally:
            RUNNING.step = False
        facts = name, sum(t.nbytes for t in inputs), begun
        started = _Started(work, results, group, facts)
        RUNNING.pending.update({t.data_ptr(): started for t in results if t.numel()})
        return results

    return kernel


def _options(kind: str, **values: Any) -> Any:
    """Options of a collective; `kind` is the name of their class."""
    options = getattr(torch.distributed.distributed_c10d, f"{kind}Options")()
    for name, value in values.items():
        setattr(options, name, _torch.reduction(value) if name == "reduceOp" else value)
    return options


def _alike(inputs: Tensors, *args: Any) -> list[torch.Tensor]:
    return [torch.empty_like(t, memory_format=torch.contiguous_format) for t in inputs]


def _resized(t: torch.Tensor, times: int, parts: int = 1) -> torch.Tensor:
    return t.new_empty((t.shape[0] * times // parts, *t.shape[1:]))


@collective("all_reduce(Tensor[] inputs, Tensor? after, str group, str reduce_op) -> Tensor[]")
class AllReduce(Collective):
    """The same sum on every rank."""

    @staticmethod
    def start(group: Any, inputs: Tensors, reduce_op: str) -> Start:
        results = _own(inputs)
        if len(results) == 1:
            return group.allreduce(results, _options("Allreduce", reduceOp=reduce_op)), results
        options = _options("AllreduceCoalesced", reduceOp=reduce_op)
        return group.allreduce_coalesced(results, options), results

    types = staticmethod(_alike)


@collective("broadcast(Tensor[] inputs, Tensor? after, str group, int root) -> Tensor[]")
class Broadcast(Collective):
    """What one rank has."""

    @staticmethod
    def start(group: Any, inputs: Tensors, root: int) -> Start:
        results = _own(inputs)
        options = _options("Broadcast", rootRank=root, rootTensor=0)
        return group.broadcast(results, options), results

    types = staticmethod(_alike)


@collective(
    "reduce(Tensor[] inputs, Tensor? after, str group, str reduce_op, int root) -> Tensor[]"
)
class Reduce(Collective):
    """The sum on one rank."""

    @staticmethod
    def start(group: Any, inputs: Tensors, reduce_op: str, root: int) -> Start:
        results = _own(inputs)
        options = _options("Reduce", reduceOp=reduce_op, rootRank=root, rootTensor=0)
        return group.reduce(results, options), results

    types = staticmethod(_alike)


@collective("all_gather(Tensor[] inputs, Tensor? after, str group, int size) -> Tensor[]")
class AllGather(Collective):
    """What all ranks have, one after the other."""

    @staticmethod
    def start(group: Any, inputs: Tensors, size: int) -> Start:
        whole = _whole(inputs)
        results = [_resized(t, size) for t in whole]
        if len(results) == 1:
            return group._allgather_base(results[0], whole[0], _options("Allgather")), results
        return group.allgather_into_tensor_coalesced(results, whole), results

    @staticmethod
    def types(inputs: Tensors, after: Any, group: str, size: int) -> list[torch.Tensor]:
        return [_resized(t, size) for t in inputs]


@collective("all_gather_list(Tensor[] inputs, Tensor? after, str group, int size) -> Tensor[]")
class AllGatherList(Collective):
    """What all ranks have, a tensor of each."""

    @staticmethod
    def start(group: Any, inputs: Tensors, size: int) -> Start:
        results = [torch.empty_like(w) for w in _whole(inputs) for _ in range(size)]
        return group.allgather([results], _whole(inputs), _options("Allgather")), results

    @staticmethod
    def types(inputs: Tensors, after: Any, group: str, size: int) -> list[torch.Tensor]:
        return _alike([t for t in inputs for _ in range(size)])


@collective(
    "reduce_scatter(Tensor[] inputs, Tensor? after, str group, str reduce_op, int size) -> Tensor[]"
)
class ReduceScatter(Collective):
    """A part of the sum on each rank."""

    @staticmethod
    def start(group: Any, inputs: Tensors, reduce_op: str, size: int) -> Start:
        whole = _whole(inputs)
        results = [_resized(t, 1, size) for t in whole]
        options = _options("ReduceScatter", reduceOp=reduce_op)
        if len(results) == 1:
            return group._reduce_scatter_base(results[0], whole[0], options), results
        return group.reduce_scatter_tensor_coalesced(results, whole, options), results

    @staticmethod
    def types(
        inputs: Tensors, after: Any, group: str, reduce_op: str, size: int
    ) -> list[torch.Tensor]:
        return [_resized(t, 1, size) for t in inputs]


@collective(
    "reduce_scatter_list(Tensor[] inputs, Tensor? after, str group, str reduce_op) -> Tensor[]"
)
class ReduceScatterList(Collective):
    """One of the sums on each rank."""

    @staticmethod
    def start(group: Any, inputs: Tensors, reduce_op: str) -> Start:
        result = torch.empty_like(inputs[0], memory_format=torch.contiguous_format)
        options = _options("ReduceScatter", reduceOp=reduce_op)
        return group.reduce_scatter([result], [_whole(inputs)], options), [result]

    @staticmethod
    def types(inputs: Tensors, *args: Any) -> list[torch.Tensor]:
        return _alike(inputs[:1])


@collective(
    "all_to_all(Tensor[] inputs, Tensor? after, str group, int[] output_splits, "
    "int[] input_splits) -> Tensor[]"
)
class AllToAll(Collective):
    """A part from each rank; without splits parts are equal."""

    @staticmethod
    def start(group: Any, inputs: Tensors, outputs: list[int], parts: list[int]) -> Start:
        (whole,) = _whole(inputs)
        result = whole.new_empty((sum(outputs) if outputs else whole.shape[0], *whole.shape[1:]))
        options = _options("AllToAll")
        return group.alltoall_base(result, whole, outputs, parts, options), [result]

    @staticmethod
    def types(
        inputs: Tensors, after: Any, group: str, outputs: list[int], parts: list[int]
    ) -> list[torch.Tensor]:
        rows = sum(outputs) if outputs else inputs[0].shape[0]
        return [inputs[0].new_empty((rows, *inputs[0].shape[1:]))]


@collective("send(Tensor[] inputs, Tensor? after, str group, int to, int tag) -> Tensor[]")
class Send(Collective):
    """To one rank."""

    @staticmethod
    def start(group: Any, inputs: Tensors, to: int, tag: int) -> Start:
        results = _own(inputs)  # which nobody writes over before it is sent
        return group.send(results, to, tag), results

    types = staticmethod(_alike)


@collective("recv(Tensor[] inputs, Tensor? after, str group, int source, int tag) -> Tensor[]")
class Recv(Collective):
    """From one rank."""

    @staticmethod
    def start(group: Any, inputs: Tensors, source: int, tag: int) -> Start:
        results = _alike(inputs)
        return group.recv(results, source, tag), results

    types = staticmethod(_alike)


def _wait(result: torch.Tensor) -> torch.Tensor:
    started = RUNNING.pending.get(result.data_ptr())
    if started is not None:
        started.wait()
        for tensor in started.tensors:
            RUNNING.pending.pop(tensor.data_ptr(), None)
    return result.view(result.shape)


_library.define("wait(Tensor result) -> Tensor")
_library.impl("wait", _wait, "CompositeExplicitAutograd")
_library._register_fake("wait", lambda result: torch.empty_like(result))
WAIT: Final = torch.ops.torpor.wait.default
ORDERED: Final = frozenset({*COLLECTIVES, WAIT})
"""Ops that the process group runs: no compiler gets to see them."""

PEER_TO_PEER: Final = frozenset({Send.target, Recv.target})


def collectives_in(graph: Graph) -> list[Node]:
    """The nodes of `graph` that start collectives, in the order in which they run."""
    return [node for node in graph.nodes if node.op.target in COLLECTIVES]
