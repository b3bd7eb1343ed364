"""The `Backend` class: two methods to implement, `compile` and `execute`; the rest has defaults."""

from __future__ import annotations

import abc
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch

from torpor import _torch
from torpor.backend.builder import IrBuilder
from torpor.backend.data import BackendData, number_dtype
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backend.lowering import Computation, LoweringContext
from torpor.backend.native_library import NATIVE
from torpor.errors import BackendError
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.passes import Pass
from torpor.symbols.expressions import Symbol

_SOLE_REFERENCES = 3  # the handle, a local in `is_shared`, the argument of `getrefcount`


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of a device in bytes; None if unknown."""

    used: int | None
    total: int | None


def draw_seed() -> int:
    """A seed for one run of a graph, drawn from torch's generator."""
    with _torch.without_modes():
        return int(torch.randint(1 << 62, (), device="cpu"))


class Backend(abc.ABC):
    """A compiler and a runtime for graphs of torch ops."""

    name: str = "unnamed"

    scalars_as_data: bool = False
    """Run-time numbers are passed to `execute` as data (`data_from_scalar`), not as numbers."""

    compile_after: int = 0
    """How often a graph runs on the reference backend before it is compiled: compiling a graph that
    runs only once rarely pays."""

    @property
    def weighs_compiles(self) -> bool:
        """Compiling takes seconds: after those runs, a graph is compiled once the time its runs
        have taken justifies it, and in another process if a core is free for that."""
        return False

    draws: bool = False
    """Random ops are recorded as nodes, and the backend draws when a graph runs: not eager's
    numbers. Otherwise they are drawn when they are recorded, and enter graphs as data."""

    draws_from_seed: bool = False
    """With `draws`: `execute` gets a seed as the last argument of a graph with random nodes. It is
    drawn from torch's generator when the step is cut, anew for every run. The offsets of the
    random nodes are `Computation.offsets`."""

    exact: bool = False
    """Runs eager's own kernels: results are bitwise equal to eager's."""

    options: Mapping[str, Any] = MappingProxyType({})
    """The options it was made with (`torpor.use(name, **options)`)."""

    dynamic: bool = False
    """Supports dynamic shapes: graphs may have symbolic sizes. `Graph.symbols` are inputs after all
    others, and arguments of nodes contain expressions of them
    (`torpor.symbols.expressions.Expr`)."""

    compiles_in_background: bool = True
    """`compile` may run on a background thread while the program goes on (`config.compile_async`):
    it draws no random numbers and does not modify shared state."""

    cuts_at_zero_grad: bool = False
    """Gradients that die at `zero_grad` are not step outputs: the cut after an optimizer's step is
    delayed until `zero_grad`, the next module call or a read. The step starts only then."""

    host_devices: int = 1
    """How many devices to offer where torch does not count them: `lazy:0`, `lazy:1`, ..."""

    takes_donations: bool = False
    """Can write results into donated parameters (`Computation.aliases`); the core donates some."""

    def __init__(self) -> None:
        self._default_type = BackendDeviceType("cuda" if torch.cuda.is_available() else "cpu")
        self._default_ordinal = 0

    # -- lifecycle -----------------------------------------------------------------------------

    def initialize(self) -> None:
        """Called once, before the first use."""

    def prepare_to_exit(self) -> None:
        """Called once at exit, when all queues are empty."""

    def set_rng_seed(self, seed: int) -> None:
        """Seed the generators that the backend draws from."""
        torch.manual_seed(seed)

    # -- data ----------------------------------------------------------------------------------

    def data_from_tensor(
        self, tensor: torch.Tensor, type_: TensorType, device: BackendDevice
    ) -> BackendData:
        """Data with the contents of `tensor`. The backend may keep it: nobody writes to it."""
        return BackendData(device, type_, tensor.to(device.torch_device))

    def data_from_scalar(self, scalar: Any, device: BackendDevice) -> BackendData:
        """Data with one number, as a 0-dim tensor that represents it exactly (floats as float64).

        In type promotion it still counts as a Python number: it does not widen other dtypes.
        """
        tensor = torch.tensor(scalar, dtype=number_dtype(scalar), device=device.torch_device)
        return self.data_from_tensor(tensor, TensorType.of_tensor(tensor), device)

    def placeholder(self, device: BackendDevice, type_: TensorType) -> BackendData:
        """A handle for data that do not exist yet."""
        return BackendData(device, type_)

    def data_of(self, node: Node) -> BackendData | None:
        """The data of a leaf that carries its own; torpor's leaves are slots of the trace."""
        return None

    def tensor_from_data(
        self, data: BackendData, logical_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A torch tensor with the contents of `data`, which are computed, and its type's strides.

        It may share the buffer: never write to it.
        """
        tensor = data.tensor
        if tensor is None:
            raise BackendError(f"{self.name}: {data!r} has no value yet")
        return tensor if logical_dtype is None else tensor.to(logical_dtype)

    def copy_data(self, data: BackendData) -> BackendData:
        """A copy of `data`, which are computed, in a new buffer on the same device."""
        tensor = self.tensor_from_data(data).clone()
        return self.data_from_tensor(tensor, data.type, data.device)

    def is_shared(self, data: BackendData) -> bool:
        """Whether others reference its buffer or part of it, so that it must not be overwritten.

        Called for donated arguments; references to `data` itself are counted by the core.
        """
        tensor = data.tensor
        return tensor is not None and (
            sys.getrefcount(tensor) > _SOLE_REFERENCES or _torch.shares_memory(tensor)
        )

    # -- graphs --------------------------------------------------------------------------------

    def ir_builder(self) -> IrBuilder:
        """Makes the nodes that the core itself needs."""
        return IrBuilder(lambda device: self.backend_device(device).torch_device)

    functional: bool = False
    """Graphs contain functional ops only: in-place ops become their functional variants (`add_`
    becomes `add`), ops on lists (`_foreach_add`) one op per tensor. Views stay views."""

    def decompositions(self) -> Mapping[str, Callable[..., Any]]:
        """Decompositions to apply before the backend sees a graph, by op ("aten.gelu.default").

        Each is a function on tensors with the op's arguments and defaults that computes the op from
        other ops; it may return NotImplemented. `torpor.backends.decompositions.core` has torch's.
        """
        return MappingProxyType({})

    def passes(self, device: BackendDevice) -> tuple[Pass, ...]:
        """The passes that `compile` applies to a graph for `device` before code generation.

        The pass `expand` runs before them, for every backend.
        """
        return ()

    def lowering_context(
        self,
        name: str,
        device: BackendDevice,
        post_order: Sequence[Node] | None = None,
        emitted: dict[Value, Any] | None = None,
    ) -> LoweringContext:
        """A context that lowers a graph for `device`."""
        return LoweringContext(name, device, post_order, emitted)

    @abc.abstractmethod
    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        """Compile lowered graphs; returns as many, in the same order."""

    @abc.abstractmethod
    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        """Run a compiled graph. Arguments are data, or numbers for run-time scalars.

        An output that could not be computed is data with `error` set; raising loses all outputs.
        A failed step must not have written anything: if this raises, or returns data with errors,
        all arguments, donated ones too, hold what they held before. If that is impossible, the
        exception has the attribute `inputs_written = True`, and the old contents of donated
        arguments are lost.
        """

    def expect(self, device: BackendDevice) -> None:
        """Hint that a graph will soon be compiled for `device`, if it runs again: warm up."""

    def function(
        self, computation: Computation, device: BackendDevice
    ) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """A compiled graph without run-time numbers, as a function of plain tensors.

        The function takes ownership of the list of tensors and may clear it. Results have the
        promised strides, but may have gaps between rows.
        """
        types, seeded = computation.parameter_types, self.draws_from_seed and computation.offsets

        def run(tensors: list[torch.Tensor]) -> list[torch.Tensor]:
            pairs = zip(types, tensors, strict=True)
            data: list[Any] = [self.data_from_tensor(t, type_, device) for type_, t in pairs]
            if seeded:
                data.append(draw_seed())
            results = self.execute(computation, data, device)
            return [self.tensor_from_data(result.wait()) for result in results]

        return run

    def computation_text(self, computation: Computation) -> str:
        """The backend's compiled form of a graph, as text for humans."""
        return computation.text()

    def runs_here(self, computation: Computation, in_turn: bool) -> bool:
        """Whether `computation` must run on the submitting thread, before that thread goes on.

        `in_turn`: it has ops that draw in program order (`overrides.draws`) from the program's
        generator, which nothing else may draw from meanwhile.
        """
        return in_turn

    def runs_on_one_core(self, computation: Computation) -> bool:
        """Whether `computation` uses one core and no GIL, so that the program can go on meanwhile.

        Results may depend on the number of cores, so the answer must be the same for every run.
        """
        return False

    def accepts_sizes(self, computation: Computation, sizes: Mapping[Symbol, int]) -> bool:
        """Whether a compiled graph with symbols can run with these sizes; else it is recompiled."""
        return True

    # -- graphs kept on disk -------------------------------------------------------------------

    def cache_key(self) -> str | None:
        """Everything besides the graph that affects what `compile` produces: options, compiler
        versions, the machine. Part of the disk cache's key; None: nothing is cached on disk."""
        return None

    def dump(self, computation: Computation) -> bytes | None:
        """A compiled graph as bytes, for `load` in another process; None if it has no such form.

        It includes what `accepts_sizes` needs. In the other process symbols have other names, but
        the same positions in `Graph.symbols`.
        """
        return None

    def load(self, computation: Computation, saved: bytes) -> Computation:
        """Make a compiled graph from a lowered one and the bytes from `dump`. If this raises, the
        bytes are unusable, and the graph is compiled."""
        raise NotImplementedError(f"backend {self.name!r} keeps no compiled graphs")

    # -- devices -------------------------------------------------------------------------------

    @property
    def default_device_type(self) -> BackendDeviceType:
        """The type of the devices behind `lazy`."""
        return self._default_type

    @default_device_type.setter
    def default_device_type(self, type_: BackendDeviceType | str) -> None:
        if not isinstance(type_, BackendDeviceType):
            type_ = BackendDeviceType(type_)
        self._default_type = type_
        NATIVE.forget_choices()

    @property
    def default_device_ordinal(self) -> int:
        """The index of `lazy` without an index."""
        return self._default_ordinal

    @default_device_ordinal.setter
    def default_device_ordinal(self, ordinal: int) -> None:
        self._default_ordinal = int(ordinal)

    def devices(self) -> list[BackendDevice]:
        """Every device of the default type."""
        kind = self.default_device_type
        return [BackendDevice(kind, i) for i in range(self.device_count())]

    def device_count(self) -> int:
        """How many devices of the default type there are."""
        is_cuda = self.default_device_type.name == "cuda"
        return torch.cuda.device_count() if is_cuda else self.host_devices

    def backend_device(self, device: torch.device) -> BackendDevice:
        """The backend's device for a torch device, which may be physical."""
        if device.type == "lazy":
            ordinal = self.default_device_ordinal if device.index is None else device.index
            if not 0 <= ordinal < self.device_count():
                known = ", ".join(map(str, self.devices())) or "none"
                raise RuntimeError(
                    f"no device lazy:{ordinal}: the devices of backend {self.name!r} are {known}"
                )
            return BackendDevice(self.default_device_type, ordinal)
        kind = self.default_device_type
        if kind.physical != device.type:
            kind = BackendDeviceType(device.type)
        return BackendDevice(kind, device.index or 0)

    def eager_fallback_device_type(self) -> str:
        """The torch device type on which fallbacks run."""
        return self.default_device_type.physical

    def compilation_devices(self, device: str, devices: Sequence[str]) -> list[str]:
        """Which of `devices` can run a graph that was compiled for `device`.

        If there are several, it is compiled once; `execute` gets the same computation for each.
        """
        return [device]

    def bucket_sizes(self, sizes: Sequence[int]) -> list[int]:
        """The sizes to which `torpor.pad` pads dimensions of `sizes`: few, because each is a graph
        of its own where graphs have no symbols. By default, the next powers of two."""
        return [1 << max(size - 1, 0).bit_length() for size in sizes]

    # -- metrics -------------------------------------------------------------------------------

    def metric_report(self) -> str:
        """The backend's own metrics as text."""
        return "\n".join(f"{name} {value}" for name, value in sorted(self.metrics().items()))

    def metrics(self) -> dict[str, float]:
        """The backend's own metrics by name."""
        return {}

    def memory_info(self, device: BackendDevice) -> MemoryInfo:
        """Used and total memory of `device`."""
        if device.type.physical == "cuda":
            free, total = torch.cuda.mem_get_info(device.ordinal)
            return MemoryInfo(total - free, total)
        return MemoryInfo(None, None)
