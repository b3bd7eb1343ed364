"""User-facing functions to cut a trace, wait for results, and inspect tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from torpor import _torch
from torpor.backend.interface import Backend, MemoryInfo
from torpor.backend.registry import activate, get_backend, make
from torpor.compiling.compilation import compile_graph
from torpor.execute import shutdown  # noqa: F401  # register themselves
from torpor.execute import sync as _sync
from torpor.execute.storage import TRACE
from torpor.frontend.devices import lazy_device
from torpor.ir.graph import Graph
from torpor.observe import gauges  # noqa: F401  # register themselves
from torpor.observe.events import no_sync as no_sync
from torpor.observe.memory import predict
from torpor.symbols.leaves import SIZES
from torpor.text.dot import dot
from torpor.text.printer import print_graph
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import value_of
from torpor.transactions import closures  # register themselves


def sync(*tensors: Any, wait: bool = False, device: Any = None) -> None:
    """Cut the trace and start computing everything live, or compute only `tensors`.

    With `wait=True` it returns when the results are available. An error of an earlier step that has
    not been raised yet is raised here, after this step has been launched.
    """
    where = None if device is None else lazy_device(device)
    if tensors:
        parts = map(_torch.local_part, tensors)
        _sync_tensors([t for t in parts if isinstance(t, LazyTensor)], wait)
        return
    _sync.cut(where)
    _sync.raise_errors(where)
    closures.run()
    if wait:
        _sync.wait(where)


def _sync_tensors(tensors: list[LazyTensor], wait: bool) -> None:
    _sync.compute([t._lazy_storage for t in tensors])
    if wait:
        for tensor in tensors:
            _sync.finish(tensor._lazy_storage)
    _sync.rest()


def wait(device: Any = None) -> None:
    """Block until the device's queue (or all queues) is empty; raise errors that occurred on it."""
    _sync.wait(None if device is None else lazy_device(device))


def is_pending(tensor: torch.Tensor) -> bool:
    """Whether `tensor` is recorded, and nothing has triggered its computation."""
    part = _torch.local_part(tensor)
    return isinstance(part, LazyTensor) and part._lazy_storage.data is None


@contextmanager
def using(name: str, **options: Any) -> Iterator[Backend]:
    """Use another backend inside the body."""
    before = get_backend()
    backend = activate(make(name, **options))
    try:
        yield backend
    finally:
        activate(before)


def pad(tensor: torch.Tensor, *dims: int, value: float = 0) -> torch.Tensor:
    """Pad `tensor` with `value` at the end of `dims`, to the backend's bucket sizes.

    For backends without dynamic shapes, which compile a graph per size: the buckets
    (`Backend.bucket_sizes`) limit the number of graphs. Mask the padding where it matters.
    """
    wanted = get_backend().bucket_sizes([tensor.shape[dim] for dim in dims])
    amounts = [0] * (2 * tensor.dim())
    for dim, size in zip(dims, wanted, strict=True):
        amounts[2 * (tensor.dim() - 1 - dim % tensor.dim()) + 1] = size - tensor.shape[dim]
    return torch.nn.functional.pad(tensor, amounts, value=value)


def mark_dynamic(tensor: torch.Tensor, *dims: int) -> None:
    """Declare sizes of a lazy tensor as dynamic: they are symbolic from the start.

    Otherwise a size becomes symbolic when a graph recurs with another one (`config.dynamic`).
    """
    if not isinstance(tensor, LazyTensor) or tensor._lazy_view is not None:
        raise ValueError("mark_dynamic takes a lazy tensor that is no view of another")
    if not tensor.is_contiguous():
        raise ValueError("mark_dynamic takes a contiguous tensor")
    with TRACE.lock:
        for dim in dims:
            if not -tensor.dim() <= dim < tensor.dim():
                raise IndexError(f"no dimension {dim} in a tensor of {tensor.dim()}")
            SIZES.mark(tensor._lazy_storage, dim % tensor.dim())


def manual_seed(seed: int) -> None:
    """Seed torch's generators and the backend's own."""
    torch.manual_seed(seed)
    get_backend().set_rng_seed(seed)


def seed_state() -> torch.Tensor:
    """The state of the generator that lazy tensors draw from, as `torch.get_rng_state` gives it."""
    device = get_backend().backend_device(lazy_device()).torch_device
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def memory(device: Any = None) -> MemoryInfo:
    """Memory of a device, in bytes."""
    backend = get_backend()
    return backend.memory_info(backend.backend_device(lazy_device(device)))


def graph(tensor: torch.Tensor, format: str = "text") -> str:
    """The graph that would compute `tensor`: as IR text, as Graphviz, or as the backend's text.

    `format="memory"` shows its estimated peak memory, and the tensors that make it up.
    """
    tensor = _torch.local_part(tensor)
    if not isinstance(tensor, LazyTensor):
        raise TypeError(f"expected a lazy tensor, got {type(tensor).__name__}")
    with TRACE.lock:
        recorded = Graph.of([value_of(tensor)], TRACE.computed)
    if format == "text":
        return print_graph(recorded)
    if format == "dot":
        return dot(recorded)
    if format == "backend":
        backend = get_backend()
        device = backend.backend_device(tensor.device)
        shown = compile_graph(recorded.with_sizes(), "shown", backend, device)
        return backend.computation_text(shown)
    if format == "memory":
        return str(predict(recorded))
    raise ValueError(f"format is 'text', 'dot', 'backend' or 'memory', not {format!r}")
