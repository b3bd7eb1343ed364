"""Reads record files: graphs of private nodes, tensors, and the recorded facts of runs.

Reading executes nothing. Ops with effects other than computing tensors from tensors are refused,
and so are ops that this torch lacks. A graph is checked before it is run (`torpor.debug.trust`).
Text from a file is shown without control characters.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from torpor.debug.file_format import Reader
from torpor.debug.plain_text import one_line, printable
from torpor.debug.record import FORMAT, VERSION
from torpor.debug.subgraph import moved
from torpor.debug.tensors import (
    byte_length,
    from_bytes,
    probes_type,
    read_layout,
    read_number,
    read_statistics,
    statistics,
    synthetic,
)
from torpor.debug.trust import check_graph
from torpor.errors import GraphError
from torpor.ir.graph import Graph
from torpor.ir.node import Node
from torpor.ir.types import ScalarType, TensorType
from torpor.ops.keys import private_node
from torpor.ops.spec import Mode, OpSpec
from torpor.text import torch_parser as ir_text

NAMESPACES: Final = frozenset({"aten", "torpor"})
"""Namespaces of ops that are always allowed in files; others must be allowed explicitly."""

_EFFECTFUL: Final = frozenset({"from_file"})  # opens or creates a file
_MODES: Final = (Mode.RECORD, Mode.VIEW, Mode.RANDOM)
_MOST_INPUTS: Final = 1_000_000


def available_device(device: torch.device) -> torch.device:
    """`device` if this machine has it, else the closest equivalent."""
    if device.type in ("cpu", "lazy"):
        return device
    if device.type == "cuda" and torch.cuda.is_available():
        index = device.index or 0
        return torch.device("cuda", index if index < torch.cuda.device_count() else 0)
    return torch.device("cpu")


@dataclass(slots=True)
class RecordedOutput:
    """What a file contains about one result."""

    type: TensorType | None  # None: the run failed
    failed: str = ""
    checksum: str = ""
    statistics: dict[str, float] = field(default_factory=dict)
    probes: torch.Tensor | None = None
    blob: Any = None


@dataclass(slots=True)
class RecordedRun:
    """One run of one graph, from the manifest; tensors are read on demand."""

    number: int
    graph: int
    backend: str
    options: dict[str, str]
    device: str
    interpreted: bool
    exact: bool  # whether it ran on a backend with eager's kernels
    entry: dict[str, Any]

    @property
    def where(self) -> str:
        return f"run {self.number}"


class Record:
    """An open record file."""

    def __init__(
        self, path: str | os.PathLike[str], allow: Collection[str] = (), trust: bool = False
    ) -> None:
        self.reader = Reader(path)
        self.trust = trust
        try:
            self.allowed = NAMESPACES.union(allow)
            self._read()
        except BaseException:
            self.reader.close()
            raise

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.reader.close()

    def _read(self) -> None:
        reader = self.reader
        if reader.field("format", str) != FORMAT:
            reader.fail("the manifest is not that of a record")
        if reader.field("version", int) != VERSION:
            reader.fail(f"version {reader.manifest['version']}; this torpor reads {VERSION}")
        self.has_data: bool = reader.field("data", bool)
        self.versions = self._words("versions", reader.manifest, "manifest")
        self.settings = self._settings()
        self._graphs = reader.list_of("graphs")
        self._read_graphs: dict[int, tuple[Graph, list[str | None]]] = {}
        self.runs = [self._run(entry, i) for i, entry in enumerate(reader.list_of("runs"))]
        self.generators = reader.field("generators", dict)
        self.rank, self.groups = self._ranks()

    def _ranks(self) -> tuple[int | None, dict[str, tuple[int, ...]]]:
        """The rank that wrote it, if one of several, and the members of its groups."""
        reader, where = self.reader, "ranks"
        if where not in reader.manifest:
            return None, {}
        found = reader.field(where, dict)
        groups = reader.field("groups", dict, found, where)
        rank = reader.integer(found.get("rank"), where)
        members = {one_line(n[:200]): reader.integers(r, where, 100_000) for n, r in groups.items()}
        if any(rank not in of or len(set(of)) < len(of) for of in members.values()):
            reader.fail(f"{where}: rank {rank} is not once in each of its groups")
        return rank, members

    def _settings(self) -> dict[str, Any]:
        """Settings of torch, checked to be valid."""
        reader, where = self.reader, "settings"
        found = reader.field("settings", dict)
        choices = {
            "default_dtype": ("float16", "bfloat16", "float32", "float64"),
            "matmul_precision": ("highest", "high", "medium"),
            "deterministic": (False, True),
            "threads": range(1, 100_000),
        }
        for name, known in choices.items():
            kind = type(known[0])
            if reader.field(name, kind, found, where) not in known:
                reader.fail(f"{where}: {name} cannot be {str(found[name])[:60]!r}")
        return {name: found[name] for name in choices}

    def _words(self, name: str, within: Any, where: str) -> dict[str, str]:
        words = self.reader.field(name, dict, within, where)
        return {one_line(key): one_line(str(value)[:1000]) for key, value in words.items()}

    def _run(self, entry: Any, number: int) -> RecordedRun:
        reader, where = self.reader, f"run {number}"
        found = RecordedRun(
            number,
            reader.index(reader.field("graph", int, entry, where), self._graphs, where),
            one_line(reader.field("backend", str, entry, where)[:200]),
            self._words("options", entry, where),
            one_line(reader.field("device", str, entry, where)[:200]),
            reader.field("interpreted", bool, entry, where),
            reader.field("exact", bool, entry, where),
            entry,
        )
        for name in ("inputs", "outputs"):
            if len(reader.list_of(name, entry, where)) > _MOST_INPUTS:
                reader.fail(f"{where}: too many {name}")
        return found

    # -- graphs --------------------------------------------------------------------------------

    def graph(self, run: RecordedRun) -> Graph:
        """The graph of a run, on devices of this machine, with its source lines."""
        graph, sites = self._graph(run.graph)
        try:
            check_graph(graph, self.trust)
        except GraphError as error:
            self.reader.fail(f"graph {run.graph}: {error}")
        return moved(graph, available_device, sites)

    def graphs(self) -> list[Graph]:
        """Every graph in the file as recorded, for tools that run nothing."""
        found = [self._graph(number) for number in range(len(self._graphs))]
        for graph, sites in found:
            for node, site in zip(graph.nodes, sites, strict=True):
                node.site = site  # nodes from a file are not shared
        return [graph for graph, _ in found]

    def _graph(self, number: int) -> tuple[Graph, list[str | None]]:
        found = self._read_graphs.get(number)
        if found is None:
            where = f"graph {number}"
            entry = self._graphs[number]
            text = self.reader.text(self.reader.field("text", int, entry, where), where)
            graph = self._parsed(text, where)
            found = graph, self._sites(entry, graph, where)
            self._read_graphs[number] = found
        return found

    def _parsed(self, text: str, where: str) -> Graph:
        try:
            graph = ir_text.parse(text, self._node)
        except GraphError as error:
            self.reader.fail(f"{where}: {error}")
        except (ValueError, TypeError, OverflowError, RuntimeError) as error:
            self.reader.fail(f"{where}: {type(error).__name__}: {error}")
        for value in (*graph.outputs, *(v for node in graph.nodes for v in node.operands)):
            if value.type is None:
                self.reader.fail(f"{where}: an undefined tensor is used")
        devices = {v.type.device.type for v in graph.inputs if isinstance(v.type, TensorType)}
        if "meta" in devices:
            self.reader.fail(f"{where}: a tensor on the device meta has no numbers")
        return graph

    def _node(self, spec: OpSpec, bound: list[Any], types: Any) -> Node:
        """A node of a graph in a file, if its op is one that may be run."""
        name, namespace = spec.name, spec.target.namespace
        if namespace not in self.allowed:
            raise GraphError(f"{name} is not torch's own; allow={namespace!r} lets it run")
        makes_tensors = bool(spec.returns or spec.mutated)
        if spec.mode not in _MODES or spec.target._opname in _EFFECTFUL or not makes_tensors:
            raise GraphError(f"{name} does more than compute tensors; it is not run from a file")
        return private_node(spec, bound, types)

    def _sites(self, entry: Any, graph: Graph, where: str) -> list[str | None]:
        where = f"{where}: lines"
        reader = self.reader
        table = reader.json(reader.field("lines", int, entry, where), where)
        lines = [one_line(str(line)[:1000]) for line in reader.list_of("lines", table, where)]
        places = reader.list_of("nodes", table, where)
        if len(places) != len(graph.nodes):
            reader.fail(f"{where}: {len(places)} for {len(graph.nodes)} nodes")
        return [None if p is None else lines[reader.index(p, lines, where)] for p in places]

    # -- data ----------------------------------------------------------------------------------

    def arguments(self, run: RecordedRun, graph: Graph, made_up: bool = False) -> list[Any]:
        """The arguments of a run: CPU tensors and numbers, optionally `made_up` from statistics."""
        entries = run.entry["inputs"]
        if len(entries) != len(graph.inputs):
            self.reader.fail(
                f"{run.where}: {len(entries)} inputs for a graph of {len(graph.inputs)}"
            )
        return [
            self._argument(entry, value.type, f"{run.where}: input {i}", made_up, i)
            for i, (entry, value) in enumerate(zip(entries, graph.inputs, strict=True))
        ]

    def _argument(self, entry: Any, type_: Any, where: str, made_up: bool, seed: int) -> Any:
        if isinstance(type_, ScalarType):
            number = read_number(self.reader, entry, where)
            if type(number) is not type_.kind:
                self.reader.fail(f"{where}: {number!r} in the place of a {type_.kind.__name__}")
            return number
        if isinstance(entry, dict) and "failed" in entry:
            self.reader.fail(f"{where}: an earlier graph had failed: {str(entry['failed'])[:300]}")
        found = self._layout(entry, type_, where)
        if "blob" not in entry:
            return self._made_up(entry, found, where, seed)
        tensor = self._tensor(entry, found, where)
        return synthetic(found, _facts(tensor), seed) if made_up else tensor

    def _layout(self, entry: Any, type_: TensorType, where: str) -> TensorType:
        found = read_layout(self.reader, entry, where)
        strides = zip(type_.shape, type_.stride, found.stride, strict=False)
        same = found.shape == type_.shape and all(n < 2 or a == b for n, a, b in strides)
        if not same or found.dtype != type_.dtype:
            self.reader.fail(f"{where}: {found!r} where the graph has {type_!r}")
        return found

    def _tensor(self, entry: Any, type_: TensorType, where: str) -> torch.Tensor:
        contents = self.reader.blob(entry["blob"], where, byte_length(type_))
        try:
            return from_bytes(contents, type_)
        except (RuntimeError, OverflowError) as error:
            self.reader.fail(f"{where}: {error}")

    def _made_up(self, entry: Any, type_: TensorType, where: str, seed: int) -> torch.Tensor:
        facts = read_statistics(
            self.reader, self.reader.field("statistics", dict, entry, where), where
        )
        try:
            return synthetic(type_, facts, seed)
        except (RuntimeError, OverflowError, MemoryError) as error:
            self.reader.fail(f"{where}: no tensor of {type_!r} can be made: {error}")

    def outputs(self, run: RecordedRun, graph: Graph) -> list[RecordedOutput]:
        """What the file contains about the results of a run; empty if it never completed."""
        entries = run.entry["outputs"]
        if not entries:
            return []
        if len(entries) != len(graph.outputs):
            self.reader.fail(
                f"{run.where}: {len(entries)} results for a graph of {len(graph.outputs)}"
            )
        return [
            self._output(entry, value.type, f"{run.where}: result {i}")
            for i, (entry, value) in enumerate(zip(entries, graph.outputs, strict=True))
        ]

    def _output(self, entry: Any, type_: TensorType, where: str) -> RecordedOutput:
        if isinstance(entry, dict) and "failed" in entry:
            return RecordedOutput(None, failed=printable(str(entry["failed"])[:1000]))
        reader = self.reader
        facts = read_statistics(reader, reader.field("statistics", dict, entry, where), where)
        found = self._layout(entry, type_, where)
        noted = entry.get("probes")
        return RecordedOutput(
            found,
            checksum=reader.field("checksum", str, entry, where),
            statistics=facts,
            probes=None if noted is None else self._probes(noted, found, where),
            blob=entry.get("blob"),
        )

    def _probes(self, number: Any, type_: TensorType, where: str) -> torch.Tensor:
        made = probes_type(type_)
        return from_bytes(self.reader.blob(number, f"{where}: probes", byte_length(made)), made)

    def result(self, run: RecordedRun, output: RecordedOutput, number: int) -> torch.Tensor | None:
        """The recorded result itself, if the file contains it."""
        if output.blob is None or output.type is None:
            return None
        where = f"{run.where}: result {number}"
        return self._tensor({"blob": output.blob}, output.type, where)


def _facts(tensor: torch.Tensor) -> dict[str, float]:
    found = statistics(tensor)
    return {name: float(found[name]) for name in ("nan", "inf", "min", "max", "mean", "std")}


def open_record(
    path: str | os.PathLike[str], allow: Collection[str] = (), trust: bool = False
) -> Record:
    """Open a record file; raises `RecordFileError` if it is damaged.

    With `trust` its graphs may contain ops that do not validate their arguments.
    """
    return Record(path, allow, trust)
