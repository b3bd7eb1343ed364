"""`torpor.check(backend=...)`: runs every graph on the reference backend too, and compares."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch

from torpor import config
from torpor.backend import registry
from torpor.backend.data import BackendData
from torpor.backend.interface import Backend
from torpor.backends.equality import same_bits
from torpor.debug.bisect import Fault, bisect, drawing
from torpor.debug.judge import Judge, placed
from torpor.errors import DifferenceError, TorporWarning
from torpor.execute import sync
from torpor.ir.graph import Graph
from torpor.observe.watch import WATCHERS, After, Run

_CHOICES: Final = ("raise", "warn")


class Check:
    """A context manager that checks runs.

    `faults` has the differences found so far, `graphs` the number of runs compared.
    """

    def __init__(self, backend: str | None, on_difference: str, **options: Any) -> None:
        if on_difference not in _CHOICES:
            raise ValueError(f"on_difference is 'raise' or 'warn', not {on_difference!r}")
        self.name = backend
        self.options = options
        self.on_difference = on_difference
        self.faults: list[Fault] = []
        self.graphs = 0
        self.left_out = 0  # runs by the reference itself, or with random ops
        self._reference = registry.make("reference")
        self._reported: set[Graph] = set()
        self._lock = threading.Lock()
        self._before: tuple[Backend, int] | None = None

    def __enter__(self) -> Check:
        sync.cut()
        sync.wait()
        self._before = registry.get_backend(), config.compile_after
        if self.name is not None:
            registry.activate(registry.make(self.name, **self.options))
        config.compile_after = 0  # compile at the first run, to check the backend
        sync.PLANS.clear()
        WATCHERS.append(self._watch)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        assert self._before is not None, "entered before"
        try:
            if kind is None:
                sync.cut()
                sync.wait()
        finally:
            WATCHERS.remove(self._watch)
            backend, config.compile_after = self._before
            with contextlib.suppress(Exception):  # an error is being raised already
                sync.cut()
                sync.wait()
            registry.activate(backend)
        if self.on_difference == "warn":
            for fault in self.faults:
                warnings.warn(str(fault), TorporWarning, stacklevel=2)

    # -- on the queue --------------------------------------------------------------------------

    def _watch(self, run: Run) -> After | None:
        graph, backend = run.graph, run.backend
        if run.interpreted or drawing(graph) is not None:
            self.left_out += 1
            return None
        arguments = [_copy(given, backend) for _, given in run.inputs()]
        if any(argument is None for argument in arguments):  # an earlier graph failed
            return None

        def after(results: Sequence[BackendData]) -> None:
            with self._lock:
                self._compare(graph, arguments, results, backend)

        return after

    def _compare(
        self, graph: Graph, arguments: list[Any], results: Sequence[BackendData], backend: Backend
    ) -> None:
        self.graphs += 1
        if graph in self._reported or any(result.error is not None for result in results):
            return
        got = [backend.tensor_from_data(result) for result in results]
        if self._agree(graph, arguments, got, backend):
            return
        fault = bisect(graph, arguments, self._reference, backend)
        if fault is None:  # right when run again: the fault is nondeterministic
            fault = self._unsteady(graph, arguments, got, backend)
        self._reported.add(graph)
        self.faults.append(fault)
        if self.on_difference == "raise":
            raise DifferenceError(str(fault))

    def _agree(
        self, graph: Graph, arguments: list[Any], got: list[torch.Tensor], backend: Backend
    ) -> bool:
        judge = Judge(graph, arguments, self._reference)
        right = judge.values(graph.outputs)
        pairs = zip(graph.outputs, got, strict=True)
        if all(same_bits(tensor, right[value]) for value, tensor in pairs):
            return True
        if backend.exact:
            return False
        expected = judge.expected(graph.outputs, exact=False)
        pairs = zip(graph.outputs, got, strict=True)
        return all(expected[value].gap(tensor) is None for value, tensor in pairs)

    def _unsteady(
        self, graph: Graph, arguments: list[Any], got: list[torch.Tensor], backend: Backend
    ) -> Fault:
        """A report of a difference that a second run does not reproduce."""
        judge = Judge(graph, arguments, self._reference)
        expected = judge.expected(graph.outputs, exact=backend.exact)
        value, gap = next(
            (value, gap)
            for value, tensor in zip(graph.outputs, got, strict=True)
            if (gap := expected[value].gap(tensor)) is not None
        )
        position = graph.nodes.index(value.node)
        pair = self._reference, backend
        return Fault(
            position, len(graph), value.node, value.index, gap, *pair, hidden=True, part=None
        )


def _copy(given: Any, backend: Backend) -> Any:
    """A copy of an argument for a second run; None if its graph has failed."""
    if not isinstance(given, BackendData):
        return given
    if given.error is not None:
        return None
    tensor = backend.tensor_from_data(given)
    return placed(tensor, tensor.device)
