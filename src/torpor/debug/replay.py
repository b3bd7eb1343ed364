"""`torpor.replay(path)`: runs the contents of a record file on any backend, and compares."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from torpor import _torch
from torpor.backend import registry
from torpor.backend.interface import Backend
from torpor.backends.equality import TOLERANCES, same_bits
from torpor.compiling.compilation import device_of
from torpor.debug.bisect import Fault, bisect, drawing
from torpor.debug.judge import Judge, run_graph
from torpor.debug.load import Record, RecordedOutput, RecordedRun
from torpor.debug.record import settings, versions
from torpor.debug.tensors import DTYPES, checksum, probes, statistics, wide
from torpor.errors import BackendError, RecordFileError, StepError
from torpor.ir.graph import Graph
from torpor.ir.types import TensorType
from torpor.observe.memory import free_bytes, predict
from torpor.text import torch_parser as ir_text

SAME, CLOSE, DIFFERENT, UNKNOWN = "same bits", "close", "different", "not compared"
Advance = Callable[[str], None]

MOST_BYTES: Final = 1 << 36
"""The memory limit of a run if the free memory is unknown."""

_OF_THE_BITS: Final = ("torch", "machine", "platform", "gpu")
"""Versions that must be equal for eager's kernels to be bit-identical."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """How one result compares with the expected one."""

    kind: str
    detail: str = ""


@dataclass(slots=True)
class Replayed:
    """One replayed run."""

    number: int
    graph: Graph
    verdicts: list[Verdict]
    results: list[torch.Tensor]
    seconds: float
    against: str  # the baseline of the comparison

    @property
    def kind(self) -> str:
        """The worst verdict on its results."""
        order = (DIFFERENT, CLOSE, SAME, UNKNOWN)
        kinds = {verdict.kind for verdict in self.verdicts}
        return next((kind for kind in order if kind in kinds), UNKNOWN)

    def __str__(self) -> str:
        text = f"run {self.number}: {len(self.graph)} nodes, {len(self.results)} results: "
        text += f"{self.kind} ({self.against})"
        wrong = (
            f"\n  result {i}: {verdict.detail}"
            for i, verdict in enumerate(self.verdicts)
            if verdict.kind == DIFFERENT
        )
        return text + "".join(wrong)

    def to_json(self) -> dict[str, Any]:
        """The run as data for programs."""
        return {
            "run": self.number,
            "nodes": len(self.graph),
            "results": [{"verdict": v.kind, "detail": v.detail} for v in self.verdicts],
            "verdict": self.kind,
            "against": self.against,
            "seconds": self.seconds,
        }


@dataclass(slots=True)
class Replay:
    """A replayed record file."""

    path: str
    backend: str
    versions: dict[str, str]
    notes: list[str] = field(default_factory=list)
    runs: list[Replayed] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether no result differs from the expected one."""
        return all(run.kind != DIFFERENT for run in self.runs)

    def __str__(self) -> str:
        head = f"{self.path} on {self.backend}"
        return "\n".join([head, *(f"  {note}" for note in self.notes), *map(str, self.runs)])

    def to_json(self) -> dict[str, Any]:
        """The replay as data for programs."""
        return {
            "file": self.path,
            "backend": self.backend,
            "recorded_with": self.versions,
            "notes": self.notes,
            "runs": [run.to_json() for run in self.runs],
            "ok": self.ok,
        }


# -- backends and graphs by name ---------------------------------------------------------------


def backend_named(name: str) -> Backend:
    """A backend by name or as `package.module:factory`; the name must not come from a file."""
    module, colon, factory = name.partition(":")
    known = registry.backends()
    if colon and name not in known and f"{module}:NAME" not in known:
        try:
            registry.register(name, getattr(importlib.import_module(module), factory))
        except (ImportError, AttributeError) as error:
            raise BackendError(f"no backend {name!r}: {error}") from error
    return registry.make(name)


def run_text(text: str, arguments: Sequence[Any], backend: str) -> list[torch.Tensor]:
    """Run a graph in text form on a backend; called by reproduction scripts."""
    with _torch.without_modes():
        return run_graph(ir_text.parse(text), arguments, backend_named(backend))


def recorded_backend(runs: Sequence[RecordedRun], notes: list[str]) -> str:
    """The backend that made the file, if installed here; else the active one."""
    if not runs:
        return "reference"
    run = runs[0]
    family, colon, _ = run.backend.partition(":")
    if (f"{family}:NAME" if colon else run.backend) in registry.backends():
        return run.backend
    active = registry.get_backend().name
    notes.append(f"recorded on {run.backend!r}, which is not here; replayed on {active!r}")
    return active


# -- replaying ---------------------------------------------------------------------------------


def replay_record(
    record: Record,
    backend: str | None,
    runs: Sequence[RecordedRun],
    data: bool = True,
    advance: Advance | None = None,
) -> Replay:
    """Replay some runs of an open record file; `advance` is called after each."""
    notes: list[str] = []
    name = backend or recorded_backend(runs, notes)
    report = Replay(str(record.reader.path), name, record.versions, notes)
    notes += notes_on(record, runs, data)
    made = backend_named(name)
    for run in runs:
        with as_recorded(record):
            report.runs.append(_replayed(record, run, made, data))
        if advance is not None:
            advance(f"run {run.number}")
    return report


@contextmanager
def as_recorded(record: Record) -> Iterator[None]:
    """Restore torch's recorded settings in the body, without modes, and with forked generators."""
    before, there = settings(), record.settings
    gpus = range(torch.cuda.device_count()) if torch.cuda.is_initialized() else ()
    with _torch.without_modes(), torch.random.fork_rng(gpus):
        _set({**there, "threads": min(there["threads"], os.cpu_count() or 1)})
        try:
            yield
        finally:
            _set(before)


def _set(chosen: dict[str, Any]) -> None:
    if chosen == settings():
        return
    torch.set_default_dtype(DTYPES[chosen["default_dtype"]])
    torch.set_float32_matmul_precision(chosen["matmul_precision"])
    torch.use_deterministic_algorithms(chosen["deterministic"])
    torch.set_num_threads(chosen["threads"])


def chosen(record: Record, graph: int | None) -> list[RecordedRun]:
    """All runs of a file, or one of them; raises if there are none: nothing would be compared."""
    refuse_empty([record])
    if graph is None:
        return record.runs
    if not 0 <= graph < len(record.runs):
        raise IndexError(f"there is no run {graph}: the file has {len(record.runs)}")
    return [record.runs[graph]]


def refuse_empty(records: Sequence[Record]) -> None:
    """Raise if files hold no runs, all together."""
    if records and not any(record.runs for record in records):
        paths = ", ".join(str(record.reader.path) for record in records)
        raise RecordFileError(
            f"{paths}: no runs to replay; nothing ran through torpor while it was recorded"
        )


def notes_on(record: Record, runs: Sequence[RecordedRun], data: bool) -> list[str]:
    """Caveats about a replay."""
    notes = []
    here = versions()
    other = [
        f"{name} {record.versions.get(name, 'none')} there, {here.get(name, 'none')} here"
        for name in _OF_THE_BITS
        if record.versions.get(name) != here.get(name)
    ]
    if other:
        notes.append(f"recorded elsewhere: {'; '.join(other)}")
    if not (data and record.has_data):
        notes.append("numbers are made up from statistics; results are the reference's to judge")
    moved = {run.device for run in runs if run.device.startswith("cuda")}
    if moved and not torch.cuda.is_available():
        notes.append(f"recorded on {', '.join(sorted(moved))}; replayed on the CPU")
    return notes


def _replayed(record: Record, run: RecordedRun, backend: Backend, data: bool) -> Replayed:
    graph, arguments = prepared(record, run, data)
    outputs = record.outputs(run, graph) if data and record.has_data else []
    started = time.perf_counter()
    try:
        results = run_graph(graph, arguments, backend, f"graph{run.number}")
    except Exception as error:
        return failed(run, graph, outputs, error)
    seconds = time.perf_counter() - started
    against = "the recorded results"
    verdicts = compared(
        record, run, backend, results, [] if drawing(graph) is not None else outputs
    )
    if not verdicts or any(verdict.kind == CLOSE for verdict in verdicts):
        against = f"{against} and the reference" if verdicts else "the reference backend"
        judged = _judged(graph, arguments, results, backend)
        verdicts = [_worse(*pair) for pair in zip(verdicts or judged, judged, strict=True)]
    return Replayed(run.number, graph, verdicts, results, seconds, against)


def compared(
    record: Record,
    run: RecordedRun,
    backend: Backend,
    results: Sequence[torch.Tensor],
    outputs: Sequence[RecordedOutput],
) -> list[Verdict]:
    """How results compare with the recorded ones, if there are any."""
    exact = _bits_must_agree(record, run, backend)
    return [
        _compared(result, output, record.result(run, output, i), exact)
        for i, (result, output) in enumerate(zip(results, outputs, strict=False))
    ]


def failed(
    run: RecordedRun, graph: Graph, outputs: Sequence[RecordedOutput], error: Exception
) -> Replayed:
    """The report of a run that raised, compared with whether it did when recorded."""
    before = next((output.failed for output in outputs if output.type is None), "")
    text = f"{type(error).__name__}: {error}"
    verdict = Verdict(UNKNOWN if before else DIFFERENT, text)
    against = "it failed when it was recorded too" if before else "it did not fail when recorded"
    return Replayed(run.number, graph, [verdict], [], 0.0, against)


def _worse(recorded: Verdict, judged: Verdict) -> Verdict:
    return judged if recorded.kind == CLOSE and judged.kind == DIFFERENT else recorded


def prepared(record: Record, run: RecordedRun, data: bool) -> tuple[Graph, list[Any]]:
    """The graph of a run and its arguments; raises if they would not fit in memory."""
    graph = record.graph(run)
    backend = registry.make("reference")
    free = free_bytes(backend, device_of(graph, backend))
    prediction = predict(graph)
    expanded = sum(_expanded(value.type) for value in graph.inputs)
    needed = prediction.peak + max(prediction.inputs, expanded)
    if needed > (MOST_BYTES if free is None else free):
        free = MOST_BYTES if free is None else free
        raise StepError(
            f"{run.where} needs about {needed / 2**30:.1f} GiB, and {free / 2**30:.1f} are free"
        )
    return graph, record.arguments(run, graph, made_up=not data)


def _expanded(type_: Any) -> int:
    """The bytes of an input when expanded, as comparing it may do."""
    return type_.numel * type_.dtype.itemsize if isinstance(type_, TensorType) else 0


def _bits_must_agree(record: Record, run: RecordedRun, backend: Backend) -> bool:
    """Whether both runs used eager's kernels, of the same torch on the same kind of machine."""
    here = versions()
    alike = all(record.versions.get(name) == here.get(name) for name in _OF_THE_BITS)
    return alike and backend.exact and (run.interpreted or run.exact)


# -- comparing ---------------------------------------------------------------------------------


def _compared(
    got: torch.Tensor, output: RecordedOutput, recorded: torch.Tensor | None, exact: bool
) -> Verdict:
    if output.type is None:
        return Verdict(UNKNOWN, f"the recorded run failed: {output.failed}")
    if checksum(got) == output.checksum or (recorded is not None and same_bits(got, recorded)):
        return Verdict(SAME)
    if exact:
        return Verdict(DIFFERENT, f"other bits than recorded; {_statistics_text(got, output)}")
    off = _far(got, output, recorded)
    return Verdict(DIFFERENT, off) if off else Verdict(CLOSE)


def _far(got: torch.Tensor, output: RecordedOutput, recorded: torch.Tensor | None) -> str:
    """How a result differs from the recorded one beyond the tolerance; empty if it does not."""
    if got.dtype not in TOLERANCES:
        return f"{got.dtype} must be equal; {_statistics_text(got, output)}"
    relative, absolute = TOLERANCES[got.dtype]
    facts = output.statistics
    scale = max(1.0, abs(facts["min"]), abs(facts["max"]))
    if recorded is not None:
        one, other = wide(got), wide(recorded)
    else:
        one = probes(got)
        other = one if output.probes is None else output.probes
    close = torch.isclose(one, other, relative, absolute * scale, equal_nan=True)
    if not bool(close.all()):
        place = int((~close.reshape(-1)).nonzero()[0].item())
        pair = one.reshape(-1)[place].item(), other.reshape(-1)[place].item()
        return f"{pair[0]:.8g} in the place of {pair[1]:.8g}; {_statistics_text(got, output)}"
    return _other_statistics(got, output, relative, absolute * scale)


def _other_statistics(
    got: torch.Tensor, output: RecordedOutput, relative: float, absolute: float
) -> str:
    found = statistics(got)
    for name, recorded in output.statistics.items():
        here = float(found[name])
        allowed = 0.0 if name in ("nan", "inf") else absolute + relative * abs(recorded)
        if abs(here - recorded) > allowed:
            return f"{name} is {here:.8g}, {recorded:.8g} was recorded"
    return ""


def _statistics_text(got: torch.Tensor, output: RecordedOutput) -> str:
    found, recorded = statistics(got), output.statistics
    pairs = (f"{n} {float(found[n]):.6g} ({recorded[n]:.6g})" for n in ("min", "max", "mean"))
    return f"here (recorded): {', '.join(pairs)}"


def _judged(
    graph: Graph, arguments: list[Any], results: list[torch.Tensor], backend: Backend
) -> list[Verdict]:
    """Compare results with the reference's, as none were recorded for these inputs."""
    node = drawing(graph)
    if node is not None:
        return [Verdict(UNKNOWN, f"{node.op.name} draws random numbers")] * len(results)
    judge = Judge(graph, arguments, registry.make("reference"))
    expected = judge.expected(graph.outputs, exact=backend.exact)
    verdicts = []
    for value, result in zip(graph.outputs, results, strict=True):
        gap = expected[value].gap(result)
        if gap is not None:
            verdicts.append(Verdict(DIFFERENT, str(gap)))
        else:
            same = same_bits(result, expected[value].trusted)
            verdicts.append(Verdict(SAME if same else CLOSE))
    return verdicts


# -- bisecting ---------------------------------------------------------------------------------


def bisect_record(
    record: Record, trusted: str, suspect: str, graph: int | None = None, data: bool = True
) -> Iterator[tuple[RecordedRun, Fault | None]]:
    """For each run of a file the first node at which `suspect` differs from `trusted`."""
    first, second = backend_named(trusted), backend_named(suspect)
    for run in chosen(record, graph):
        with as_recorded(record):
            whole, arguments = prepared(record, run, data)
            found = bisect(whole, arguments, first, second)
        yield run, found
