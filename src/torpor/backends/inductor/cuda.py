"""Captures and replays CUDA graphs: a memory pool and a capture stream for each device."""

from __future__ import annotations

import gc
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from torpor import _torch
from torpor.overrides.draws import CAPTURED, DRAWING

if TYPE_CHECKING:
    from torpor.backends.inductor.cuda_graphs import CapturedGraph, Replay, Tensors, Turns


class CudaMemory:
    """A memory pool and a capture stream, for graphs that are replayed on `stream`."""

    def __init__(self, device: int, stream: int) -> None:
        self.device, self.stream = device, stream
        self.lock = threading.RLock()
        self.graphs: set[CapturedGraph] = set()
        self.captured: weakref.WeakSet[CapturedGraph] = weakref.WeakSet()
        self.serial = 0
        self.side = torch.cuda.Stream(device)
        self.pool: Any = None
        self.in_pool: weakref.WeakSet[Any] = weakref.WeakSet()  # a pool dies with its last graph
        self.spare: Any = None  # a pool for code that runs without a graph
        weakref.finalize(self, _torch.forget_cublas_workspaces).atexit = False

    def is_current(self) -> bool:
        """Whether the caller's kernels run on this stream, and it is not being captured."""
        here = _torch.cuda_stream(self.device) == self.stream
        return here and not torch.cuda.is_current_stream_capturing()

    def shared_pool(self) -> Any:
        if not self.in_pool:
            self.pool = self.new_pool()
        return self.pool

    def new_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Allocate from a separate pool: the program's tensors would pin blocks of the main one."""
        if not self.is_current():
            yield
            return
        with self.lock, torch.cuda.device(self.device):
            if self.spare is None:
                torch.cuda.empty_cache()  # a pool cannot use memory cached by others
                self.spare = torch.cuda.MemPool()
            with torch.cuda.use_mem_pool(self.spare):
                yield

    def window(self, tensor: torch.Tensor, replay: Replay) -> torch.Tensor:
        """A tensor on the same memory, which stays mapped while the graph is alive."""
        return _torch.window_on(tensor, replay)

    def capture(
        self, run: Callable[[], Sequence[torch.Tensor]], pool: Any, draws: bool, turns: Turns
    ) -> tuple[Tensors, Replay]:
        """Capture the kernels that `run` launches, without running them."""
        graph = torch.cuda.CUDAGraph()
        for generator in turns.values():
            graph.register_generator_state(generator)
        keep = list(self.in_pool)
        with torch.cuda.device(self.device), _no_collection(), _no_workspaces():
            torch.cuda.synchronize()
            self.spare = None
            torch.cuda.empty_cache()
            with torch.cuda.stream(self.side):
                self._begin(graph, pool, draws)
                CAPTURED.generators = turns
                try:
                    results = list(run())
                    graph.capture_end()
                except BaseException:
                    self._abandon(graph, pool)
                    raise
                finally:
                    CAPTURED.generators = {}
        if pool == self.pool:
            self.in_pool.add(graph)
        del keep
        return results, graph.replay

    def _begin(self, graph: Any, pool: Any, draws: bool) -> None:
        """Start a capture, detached from the device's generator unless the graph draws.

        A capture marks the generator's state as captured; nothing else could draw from it then.
        """
        generator = torch.cuda.default_generators[self.device]
        with DRAWING:
            own = generator.graphsafe_get_state()
            if not draws:
                generator.graphsafe_set_state(own.clone_state())
            try:
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            finally:
                generator.graphsafe_set_state(own)

    def _abandon(self, graph: Any, pool: Any) -> None:
        try:
            graph.capture_end()
        except RuntimeError:  # the failure has ended the capture
            _torch.end_allocating_to_pool(self.device, pool)


@contextmanager
def _no_collection() -> Iterator[None]:
    """Disable garbage collection: a capture forbids freeing GPU memory."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


@contextmanager
def _no_workspaces() -> Iterator[None]:
    """Drop cuBLAS workspaces before and after, so that a graph allocates its own."""
    _torch.forget_cublas_workspaces()
    try:
        yield
    finally:
        _torch.forget_cublas_workspaces()


_memories: weakref.WeakValueDictionary[tuple[int, int], CudaMemory] = weakref.WeakValueDictionary()
_finding = threading.Lock()


def cuda_memory(device: torch.device) -> CudaMemory:
    """The `CudaMemory` for graphs replayed on the current stream of `device`."""
    index = torch.cuda.current_device() if device.index is None else device.index
    key = index, _torch.cuda_stream(index)
    with _finding:
        found = _memories.get(key)
        if found is None:
            found = _memories[key] = CudaMemory(*key)
    return found
