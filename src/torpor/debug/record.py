"""`torpor.record(path)`: saves every graph that runs, with its input data, to one file.

    with torpor.record("step.torpor"):
        loss = step(batch)

For each run, the file contains the graph as text, the user's lines, the contents of its leaves (or
their statistics), its run-time numbers, and checksums and probes of its results; besides those, the
versions of everything and the initial state of the random generators. See `file_format`.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import threading
import warnings
from collections.abc import Sequence
from typing import Any, Final

import torch

from torpor import __version__, _torch, config
from torpor.backend.data import BackendData
from torpor.backend.interface import Backend
from torpor.compiling.compilation import depth_of_user
from torpor.debug.facts import Facts, clock, events_since, facts_of_plan, to_json
from torpor.debug.file_format import Writer
from torpor.debug.tensors import checksum, layout, number_entry, probes, statistics, to_bytes
from torpor.errors import TorporWarning
from torpor.execute import sync
from torpor.execute.plan import Plan
from torpor.frontend.enable import LAZINESS
from torpor.ir.graph import Graph
from torpor.observe.watch import WATCHERS, After, Run
from torpor.text.printer import print_graph

FORMAT: Final = "torpor record"
VERSION: Final = 1


class RecordingSession:
    """A recording: a context manager, or `start` and `stop` explicitly.

    Pending work is finished when it starts, and run when it stops, so that the file contains what
    was recorded in between. Each of several ranks writes its own file, with the suffix `.rank0` and
    so on.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        data: bool = True,
        results: bool = False,
        max_bytes: int = 8 << 30,
    ) -> None:
        self.path = path
        self.data = data
        self.results = results
        self.max_bytes = max_bytes
        self.runs: list[dict[str, Any]] = []
        self.left_out = 0  # runs skipped because of `max_bytes`
        self.error: BaseException | None = None  # the first error of the recording itself
        self.ranks: dict[str, Any] = {}  # this rank, and the members of its groups
        self._graphs: dict[Graph, int] = {}  # keeps the graphs alive, and so their identity
        self._entries: list[dict[str, int]] = []
        self._plans: list[tuple[Plan, Backend]] = []  # the last plan of each graph
        self._began = 0.0
        self._lock = threading.Lock()
        self._writer: Writer | None = None
        self._start: dict[str, Any] = {}

    def start(self) -> RecordingSession:
        """Start: graphs submitted from now on are recorded."""
        if self._writer is not None:
            raise RuntimeError("this recording was started before")
        sync.cut()
        sync.wait()
        rank, world = _torch.rank_and_world()
        if world > 1:
            self.path = f"{os.fspath(self.path)}.rank{rank}"
            self.ranks = {"rank": rank, "groups": {}}
        self._writer = Writer(self.path)
        with _torch.without_modes():
            self._start = self._generators(self._writer)
        self._began = clock()
        WATCHERS.append(self._watch)
        return self

    def stop(self) -> None:
        """Run what is pending, and write the file."""
        writer = self._open_writer()
        try:
            sync.cut()
            sync.wait()
        finally:
            WATCHERS.remove(self._watch)
            self._writer = None
            self._finish(writer)

    def __enter__(self) -> RecordingSession:
        return self.start()

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.stop()
        else:  # report the body's error; the file is still written
            with contextlib.suppress(Exception):
                self.stop()

    def _finish(self, writer: Writer) -> None:
        if self.error is not None:
            writer.discard()
            raise self.error
        writer.close(self._manifest(writer))
        complaint = self._complaint()
        if complaint:
            warnings.warn(complaint, TorporWarning, stacklevel=depth_of_user())

    def _complaint(self) -> str:
        """What to warn about at the end: runs that are not in the file."""
        if self.left_out:
            text = f"{self.path} holds {len(self.runs)} runs; {self.left_out} more did not fit in"
            return f"{text} max_bytes={self.max_bytes}"
        return "" if self.runs else f"{self.path} holds no runs: {_why_nothing_ran()}"

    def _open_writer(self) -> Writer:
        if self._writer is None:
            raise RuntimeError("this recording was not started")
        return self._writer

    # -- the whole recording -------------------------------------------------------------------

    def _manifest(self, writer: Writer) -> dict[str, Any]:
        return {
            "format": FORMAT,
            "version": VERSION,
            "versions": versions(),
            "settings": settings(),
            "data": self.data,
            "generators": self._start,
            "graphs": self._entries,
            "runs": self.runs,
            **({"ranks": self.ranks} if self.ranks else {}),
            **self._facts(writer),
        }

    def _facts(self, writer: Writer) -> dict[str, int]:
        """Additional data for `torpor view`; replaying a file does not need it."""
        try:
            facts = Facts(events_since(self._began), [facts_of_plan(*plan) for plan in self._plans])
            return {"facts": writer.add(json.dumps(to_json(facts), allow_nan=False).encode())}
        except Exception as error:
            text = f"{self.path} holds no timeline: {type(error).__name__}: {error}"
            warnings.warn(text, TorporWarning, stacklevel=6)
            return {}

    def _generators(self, writer: Writer) -> dict[str, Any]:
        found = {"cpu": (torch.initial_seed(), torch.get_rng_state())}
        if torch.cuda.is_initialized():
            for i in range(torch.cuda.device_count()):
                state = torch.cuda.get_rng_state(i)
                found[f"cuda:{i}"] = (torch.cuda.default_generators[i].initial_seed(), state)
        return {
            device: {"seed": str(seed), "state": writer.add(to_bytes(state))}
            for device, (seed, state) in found.items()
        }

    # -- one run -------------------------------------------------------------------------------

    def _watch(self, run: Run) -> After | None:
        """Record the start of a run; errors here must not fail the step."""
        with self._lock:
            try:
                return self._before(run)
            except Exception as error:
                self.error = self.error or error
                return None

    def _before(self, run: Run) -> After | None:
        writer = self._writer
        if writer is None or self.error is not None:
            return None
        if self.left_out or writer.size + self._size(run) > self.max_bytes:
            self.left_out += 1
            return None
        entry: dict[str, Any] = {
            "graph": self._graph(run, writer),
            "backend": run.backend.name,
            "options": {name: repr(value)[:200] for name, value in run.backend.options.items()},
            "device": str(run.plan.computation.device),
            "interpreted": run.interpreted,
            "exact": run.backend.exact,
            "inputs": [self._input(given, run.backend, writer) for _, given in run.inputs()],
            "outputs": [],
        }
        if run.backend.draws:
            entry["generators"] = self._generators(writer)
        self.runs.append(entry)

        def after(results: Sequence[BackendData]) -> None:
            with self._lock:
                try:
                    entry["outputs"] = [self._output(r, run.backend, writer) for r in results]
                except Exception as error:
                    self.error = self.error or error

        return after

    def _size(self, run: Run) -> int:
        """The bytes that a run may add to the file."""
        if not self.data:
            return 0
        return sum(a.type.nbytes for a in run.arguments if isinstance(a, BackendData))

    def _graph(self, run: Run, writer: Writer) -> int:
        graph = run.graph
        number = self._graphs.get(graph)
        if number is None:
            number = self._graphs[graph] = len(self._entries)
            text, lines = print_graph(graph).encode(), json.dumps(_lines(graph)).encode()
            for node in run.plan.collectives if self.ranks else ():
                members = _torch.ranks_of_group(node.args[2])
                self.ranks["groups"][node.args[2]] = members
            self._entries.append({"text": writer.add(text), "lines": writer.add(lines)})
            self._plans.append((run.plan, run.backend))
        self._plans[number] = run.plan, run.backend
        return number

    def _input(self, argument: Any, backend: Backend, writer: Writer) -> Any:
        if not isinstance(argument, BackendData):
            return number_entry(argument)
        if argument.error is not None:
            return {"failed": str(argument.error)[:1000]}
        return self._tensor(backend.tensor_from_data(argument), writer, self.data)

    def _tensor(self, tensor: torch.Tensor, writer: Writer, data: bool) -> dict[str, Any]:
        entry = layout(tensor)
        if data:
            entry["blob"] = writer.add(to_bytes(tensor))
        else:
            entry["statistics"] = statistics(tensor)
        return entry

    def _output(self, result: BackendData, backend: Backend, writer: Writer) -> dict[str, Any]:
        if result.error is not None:
            return {"failed": str(result.error)[:1000]}
        tensor = backend.tensor_from_data(result)
        entry = self._tensor(tensor, writer, self.data and self.results)
        entry["statistics"] = statistics(tensor)
        entry["checksum"] = checksum(tensor)
        if self.data:
            entry["probes"] = writer.add(to_bytes(probes(tensor)))
        return entry


def _why_nothing_ran() -> str:
    """The likely reason why no graph ran during a recording, and what to change."""
    if LAZINESS.on and config.bound == "auto":
        return (
            "under torpor.enable(), models run eagerly at first, and as long as recording them "
            "does not pay (torpor.explain() says which); to record them anyway, set "
            'torpor.config.bound = "off" before torpor.enable()'
        )
    if LAZINESS.on:  # a model that has gone back to eager mode stays there until `enable` is called
        return (
            "no model with parameters was called, or it ran eagerly already when "
            'torpor.config.bound was set to "off"; set that before torpor.enable()'
        )
    return (
        'nothing was computed on lazy tensors; set torpor.config.bound = "off" and call '
        'torpor.enable(), or move the model to the device "lazy"'
    )


def _lines(graph: Graph) -> dict[str, Any]:
    """The distinct user lines, and for every node the index of its line."""
    numbers: dict[str, int] = {}
    places = [
        None if node.site is None else numbers.setdefault(str(node.site), len(numbers))
        for node in graph.nodes
    ]
    return {"lines": list(numbers), "nodes": places}


def settings() -> dict[str, Any]:
    """Settings of torch that affect results."""
    return {
        "default_dtype": str(torch.get_default_dtype()).removeprefix("torch."),
        "matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "threads": torch.get_num_threads(),
    }


def versions() -> dict[str, str]:
    """Versions of everything that may affect results."""
    found = {
        "torpor": __version__,
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "machine": platform.machine(),
    }
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
        found["gpu"] = torch.cuda.get_device_name()
    return found
