"""Predicts the memory that a graph will need, before it runs.

A buffer lives from the node that makes it to the last reader of it or a view of it. Inputs live
throughout; a write is in place if nothing reads the old contents later. Kernels' workspaces are
not included.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch

from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.compiling.compilation import depth_of_user
from torpor.errors import TorporWarning
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.ops.spec import Mode, spec_of

SMALL = 64 << 20
"""Graphs whose values total less than this are not analysed."""

_SHOWN = 5


@dataclass(frozen=True, slots=True)
class Prediction:
    """The predicted memory use of a graph."""

    inputs: int  # bytes allocated before it runs
    peak: int  # bytes at the peak, besides the inputs
    node: Node | None  # the node running at the peak
    alive: tuple[tuple[Value, int], ...]  # buffers alive at the peak and their bytes, largest first

    def __str__(self) -> str:
        head = f"inputs {size_text(self.inputs)}, at most {size_text(self.peak)} more"
        if self.node is not None:
            head += f" at {self.node.op.name} ({self.node.site})"
        return "\n".join([head, *map(_row, self.alive[: 4 * _SHOWN])])


def _row(item: tuple[Value, int]) -> str:
    value, size = item
    return (
        f"{size_text(size):>12}  {value.type!r:<44} {value.node.op.name}  {value.node.site or ''}"
    )


def size_text(count: float) -> str:
    """A number of bytes with a unit."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if count < 1024 or unit == "TiB":
            break
        count /= 1024
    return f"{count:.1f} {unit}" if unit != "B" else f"{count:.0f} B"


def predict(graph: Graph, donated: Mapping[int, int] | None = None) -> Prediction:
    """The peak of a graph whose nodes run one by one, in its order."""
    return _Liveness(graph, donated or {}).run()


def lifetimes(
    graph: Graph, donated: Mapping[int, int] | None = None
) -> dict[Value, tuple[int, int, int]]:
    """For every buffer that a graph makes: bytes, the node that makes it, its last reader."""
    walk = _Liveness(graph, donated or {})
    walk.run()
    return walk.lives


class _Liveness:
    """Walks a graph once, tracking the buffers that are alive at each node."""

    def __init__(self, graph: Graph, donated: Mapping[int, int]) -> None:
        self.graph = graph
        self.written_over = {graph.outputs[result] for result in donated.values()}
        self.buffer: dict[Value, Value] = {}  # value -> the value whose memory it uses
        self.last: dict[Value, int] = {}  # buffer -> position of its last reader
        self.bytes: dict[Value, int] = {}  # of buffers that are alive
        self.lives: dict[Value, tuple[int, int, int]] = {}  # buffer -> bytes, first and last node
        self.total = 0

    def run(self) -> Prediction:
        graph = self.graph
        for value in graph.inputs:
            self.buffer[value] = value
        self._find_buffers()
        inputs = sum(_nbytes(value) for value in graph.inputs)
        peak, worst = 0, -1
        for position, node in enumerate(graph.nodes):
            self._make(node, position)
            if self.total > peak:
                peak, worst = self.total, position
            self._drop(node, position)
        copies = self._copies()
        if self.total + copies > peak:
            peak, worst = self.total + copies, len(graph.nodes) - 1
        for buffer in list(self.bytes):
            self._end(buffer, len(graph.nodes))
        at = graph.nodes[worst] if peak and graph.nodes else None
        return Prediction(inputs, peak, at, self._alive(worst))

    def _alive(self, position: int) -> tuple[tuple[Value, int], ...]:
        found = [
            (buffer, size)
            for buffer, (size, first, last) in self.lives.items()
            if first <= position <= last
        ]
        return tuple(sorted(found, key=lambda item: -item[1]))

    def _end(self, buffer: Value, position: int) -> None:
        """Free a buffer after the node at `position`."""
        size = self.bytes.pop(buffer)
        self.total -= size
        self.lives[buffer] = (size, self.lives[buffer][1], position)

    def _find_buffers(self) -> None:
        inputs = set(self.graph.inputs)
        for position, node in enumerate(self.graph.nodes):
            views = _viewed(node)
            for operand in node.operands:
                self.last[self.buffer[operand]] = position
            for output in node.outputs:
                if output not in inputs:
                    self.buffer[output] = output if views is None else self.buffer[views]
        for value in self.graph.outputs:
            self.last[self.buffer[value]] = len(self.graph.nodes)

    def _make(self, node: Node, position: int) -> None:
        reused = self._reused(node, position)
        for output in node.outputs:
            if self.buffer[output] is not output or output.type is None:
                continue
            size = 0 if output in self.written_over else _nbytes(output)
            if reused is not None and self.bytes.get(reused, -1) == size:
                self._end(reused, position - 1)
                reused = None
            self.bytes[output] = size
            self.lives[output] = (size, position, position)
            self.total += size

    def _reused(self, node: Node, position: int) -> Value | None:
        """The buffer that a node overwrites, because nothing reads it later."""
        spec = spec_of(node.op.target)
        for place in spec.mutated:
            written = node.args[place]
            if type(written) is Value:
                buffer = self.buffer[written]
                if buffer in self.bytes and self.last.get(buffer) == position:
                    return buffer
        return None

    def _drop(self, node: Node, position: int) -> None:
        for value in (*node.operands, *node.outputs):
            buffer = self.buffer[value]
            if buffer in self.bytes and self.last.get(buffer, position) <= position:
                self._end(buffer, position)

    def _copies(self) -> int:
        """The bytes of copies made for results that alias an input or each other."""
        taken = set(self.graph.inputs)
        size = 0
        for value in dict.fromkeys(self.graph.outputs):
            buffer = self.buffer[value]
            size += _nbytes(value) if buffer in taken else 0
            taken.add(buffer)
        return size


def _viewed(node: Node) -> Value | None:
    """The value of which the outputs of a node are views."""
    if node.op.target is None or spec_of(node.op.target).mode is not Mode.VIEW:
        return None
    first = node.operands[0] if node.operands else None
    return first if first is not None and isinstance(first.type, TensorType) else None


def _nbytes(value: Value) -> int:
    type_ = value.type
    return type_.span * type_.dtype.itemsize if isinstance(type_, TensorType) else 0


# -- available memory --------------------------------------------------------------------------


def free_bytes(backend: Backend, device: BackendDevice) -> int | None:
    """The memory available on a device; None if unknown."""
    info = backend.memory_info(device)
    if info.used is not None and info.total is not None:
        return info.total - info.used + _cached(device)
    return _free_on_host() if device.type.physical == "cpu" else None


def _cached(device: BackendDevice) -> int:
    """GPU memory that torch's allocator has cached and does not use."""
    if device.type.physical != "cuda" or not torch.cuda.is_initialized():
        return 0
    index = device.ordinal
    return torch.cuda.memory_reserved(index) - torch.cuda.memory_allocated(index)


def _free_on_host() -> int | None:
    found = [number for number in (_meminfo(), _control_group()) if number is not None]
    return min(found, default=None)


def _meminfo() -> int | None:
    for line in _lines("/proc/meminfo"):
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None


def _control_group() -> int | None:
    """The remainder of a container's memory limit."""
    limit, used = _lines("/sys/fs/cgroup/memory.max"), _lines("/sys/fs/cgroup/memory.current")
    if not limit or not used or not limit[0].isdecimal():
        return None
    cache = (line.split()[1] for line in _lines("/sys/fs/cgroup/memory.stat")
             if line.startswith("inactive_file "))  # fmt: skip
    return max(0, int(limit[0]) - int(used[0]) + int(next(cache, "0")))


def _lines(path: str) -> list[str]:
    try:
        return Path(path).read_text(encoding="ascii").splitlines()
    except (OSError, UnicodeDecodeError):  # not Linux
        return []


# -- the warning -------------------------------------------------------------------------------


def warn_if_too_large(
    graph: Graph, backend: Backend, device: BackendDevice, donated: Mapping[int, int]
) -> None:
    """Warn before a graph runs that will not fit, naming the largest buffers; once per graph."""
    bound = _all_values(graph)
    free = free_bytes(backend, device) if bound >= SMALL else None
    if free is None or bound <= free:
        return
    needed = predict(graph, donated)
    if needed.peak > free:
        warnings.warn(_warning(needed, free, device), TorporWarning, stacklevel=depth_of_user())


def _all_values(graph: Graph) -> int:
    """An upper bound of the peak: the size of all values together."""
    return sum(
        type_.numel * type_.dtype.itemsize
        for node in graph.nodes
        for value in node.outputs
        if isinstance(type_ := value.type, TensorType)
    )


def _warning(needed: Prediction, free: int, device: BackendDevice) -> str:
    lines = [
        f"a graph needs about {size_text(needed.peak)} on {device}, where {size_text(free)} are "
        "free; the largest at the worst moment:",
        *map(_row, needed.alive[:_SHOWN]),
    ]
    return "\n".join(lines)
