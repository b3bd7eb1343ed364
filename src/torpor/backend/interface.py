"""What a backend is: two methods to write, `compile` and `execute`; the rest has defaults."""

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

_SOLE_REFERENCES = 3  # the handle, a name in `is_shared`, the count itself


@dataclass(frozen=True, slots=True)
class MemoryInfo:
    """Memory of a device in bytes; None where the device does not say."""

    used: int | None
    total: int | None


def draw_seed() -> int:
    """A seed for one run of a graph, from torch's generator."""
    with _torch.without_modes():
        return int(torch.randint(1 << 62, (), device="cpu"))


class Backend(abc.ABC):
    """A compiler and a runtime for graphs of torch ops."""

    name: str = "unnamed"

    scalars_as_data: bool = False
    """Run-time numbers are given to `execute` as data (`data_from_scalar`), not as numbers."""

    compile_after: int = 0
    """How often a graph runs on the reference backend before it is compiled: a graph that is met
    once is seldom worth a compiler's time."""

    @property
    def weighs_compiles(self) -> bool:
        """Its compiler takes seconds: after those runs a graph is compiled when that pays, by what
        its runs have taken, and in another process where there is a core for it."""
        return False

    draws: bool = False
    """Random ops are recorded as nodes and drawn when a graph runs, by the backend: not eager's
    numbers. Otherwise they are drawn when they are recorded, and enter graphs as data."""

    draws_from_seed: bool = False
    """With `draws`: a graph with random nodes is given a number after all other arguments, drawn
    from torch's generator when the step was cut: a seed of its own for every run. The offsets of
    its random nodes are `Computation.offsets`."""

    exact: bool = False
    """Runs eager's own kernels: its results are eager's to the last bit."""

    options: Mapping[str, Any] = MappingProxyType({})
    """What it was made with (`torpor.use(name, **options)`)."""

    dynamic: bool = False
    """Its graphs may have symbols in the place of sizes: `Graph.symbols` are inputs after all
    others, and the arguments of nodes hold expressions of them
    (`torpor.symbols.expressions.Expr`)."""

    compiles_in_background: bool = True
    """`compile` may run on a thread of its own while the program goes on (`config.compile_async`):
    it draws no random numbers and changes nothing that others see."""

    cuts_at_zero_grad: bool = False
    """Gradients that die at `zero_grad` are no results of a step: the cut after an optimizer's step
    waits for `zero_grad`, the next module call or a read. Until then the step has not begun."""

    host_devices: int = 1
    """How many devices there are where torch does not count them: `lazy:0`, `lazy:1`, ..."""

    takes_donations: bool = False
    """Writes results over donated parameters (`Computation.aliases`); the core gives it some."""

    def __init__(self) -> None:
        self._default_type = BackendDeviceType("cuda" if torch.cuda.is_available() else "cpu")
        self._default_ordinal = 0

    # -- life ----------------------------------------------------------------------------------

    def initialize(self) -> None:
        """Called once, before the first use."""

    def prepare_to_exit(self) -> None:
        """Called once at exit, when no work is left on any queue."""

    def set_rng_seed(self, seed: int) -> None:
        """Seed the generators the backend draws from."""
        torch.manual_seed(seed)

    # -- data ----------------------------------------------------------------------------------

    def data_from_tensor(
        self, tensor: torch.Tensor, type_: TensorType, device: BackendDevice
    ) -> BackendData:
        """Data with the contents of `tensor`, which the backend may keep: it is not written to."""
        return BackendData(device, type_, tensor.to(device.torch_device))

    def data_from_scalar(self, scalar: Any, device: BackendDevice) -> BackendData:
        """Data that hold one number, as a 0-dim tensor that holds all of it (a float in float64).

        In a node it is a number all the same: it does not widen the dtype of tensors it meets.
        """
        tensor = torch.tensor(scalar, dtype=number_dtype(scalar), device=device.torch_device)
        return self.data_from_tensor(tensor, TensorType.of_tensor(tensor), device)

    def placeholder(self, device: BackendDevice, type_: TensorType) -> BackendData:
        """A handle for data that do not exist yet."""
        return BackendData(device, type_)

    def data_of(self, node: Node) -> BackendData | None:
        """The data behind a leaf that carries its own; torpor's leaves are numbered slots."""
        return None

    def tensor_from_data(
        self, data: BackendData, logical_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        """A torch tensor with the contents of `data`, which are there, and the strides of its type.

        Never write to it: it may be on the buffer itself.
        """
        tensor = data.tensor
        if tensor is None:
            raise BackendError(f"{self.name}: {data!r} has no value yet")
        return tensor if logical_dtype is None else tensor.to(logical_dtype)

    def copy_data(self, data: BackendData) -> BackendData:
        """A copy of `data`, which are there, in a buffer of its own on the same device."""
        tensor = self.tensor_from_data(data).clone()
        return self.data_from_tensor(tensor, data.type, data.device)

    def is_shared(self, data: BackendData) -> bool:
        """Somebody besides `data` holds its buffer or a part of it: it must not be written over.

        Asked about donated arguments; others that hold `data` itself are counted by the core.
        """
        tensor = data.tensor
        return tensor is not None and (
            sys.getrefcount(tensor) > _SOLE_REFERENCES or _torch.shares_memory(tensor)
        )

    # -- graphs --------------------------------------------------------------------------------

    def ir_builder(self) -> IrBuilder:
        """Builds the nodes the core itself needs."""
        return IrBuilder(lambda device: self.backend_device(device).torch_device)

    functional: bool = False
    """Its graphs hold functional ops alone: ops that write become their functional twins (`add_`
    becomes `add`), ops on lists (`_foreach_add`) one op for each tensor. Views stay views."""

    def decompositions(self) -> Mapping[str, Callable[..., Any]]:
        """Ops that are taken apart before the backend sees them, by name ("aten.gelu.default").

        Each is a function on tensors with the op's own arguments and defaults, which does what the
        op does by other ops; it may return NotImplemented. `torpor.backends.decompositions.core`
        has torch's.
        """
        return MappingProxyType({})

    def passes(self, device: BackendDevice) -> tuple[Pass, ...]:
        """What `compile` does to a graph for `device` before there is code, in order.

        `expand` comes before them: it is run on the graphs of all backends.
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
        """Compile lowered graphs; same number, same order."""

    @abc.abstractmethod
    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        """Run a compiled graph. Arguments are data, or numbers for run-time scalars.

        An output that could not be computed is data with `error` set; raising loses all outputs.
        A step that fails has written nothing: if this raises, or returns data with errors, the
        arguments hold what they held before, donated ones too. Where that cannot be, what is raised
        has the attribute `inputs_written = True`, and the old contents of donated arguments are
        lost.
        """

    def expect(self, device: BackendDevice) -> None:
        """A graph will soon be compiled for `device`, if it comes back: get ready."""

    def function(
        self, computation: Computation, device: BackendDevice
    ) -> Callable[[list[torch.Tensor]], list[torch.Tensor]]:
        """A compiled graph as a function of plain tensors; for one that takes no numbers.

        The list of tensors is the function's, which may clear it. Results have the strides that are
        promised, but there may be gaps between their rows.
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
        """What the backend made of a graph, for people."""
        return computation.text()

    def runs_here(self, computation: Computation, in_turn: bool) -> bool:
        """`computation` has to run on the thread that asks for it, before it goes on.

        `in_turn`: ops of it draw in their turn (`overrides.draws`), from the generator of the
        program, which nobody else may draw from meanwhile.
        """
        return in_turn

    def runs_on_one_core(self, computation: Computation) -> bool:
        """`computation` runs on one core, without Python's lock, while the program goes on.

        Its results may depend on the number of cores: the answer has to be the same for every run.
        """
        return False

    def accepts_sizes(self, computation: Computation, sizes: Mapping[Symbol, int]) -> bool:
        """A compiled graph with symbols may run with these sizes; if not, it is compiled again."""
        return True

    # -- graphs kept on disk -------------------------------------------------------------------

    def cache_key(self) -> str | None:
        """All that changes what `compile` makes of a graph, but the graph: options, versions of
        compilers, the machine. Compiled graphs are kept under it; None: they are not kept."""
        return None

    def dump(self, computation: Computation) -> bytes | None:
        """A compiled graph as bytes, for `load` in another process; None if that cannot be.

        What `accepts_sizes` needs is part of it; symbols have other names there, and the same
        places in `Graph.symbols`.
        """
        return None

    def load(self, computation: Computation, saved: bytes) -> Computation:
        """A compiled graph from a lowered one and what `dump` made of its like. What is raised
        says that it cannot be used; the graph is then compiled."""
        raise NotImplementedError(f"backend {self.name!r} keeps no compiled graphs")

    # -- devices -------------------------------------------------------------------------------

    @property
    def default_device_type(self) -> BackendDeviceType:
        """The kind of device behind `lazy`."""
        return self._default_type

    @default_device_type.setter
    def default_device_type(self, type_: BackendDeviceType | str) -> None:
        if not isinstance(type_, BackendDeviceType):
            type_ = BackendDeviceType(type_)
        self._default_type = type_
        NATIVE.forget_choices()

    @property
    def default_device_ordinal(self) -> int:
        """The device behind `lazy` without a number."""
        return self._default_ordinal

    @default_device_ordinal.setter
    def default_device_ordinal(self, ordinal: int) -> None:
        self._default_ordinal = int(ordinal)

    def devices(self) -> list[BackendDevice]:
        """Every device of the default kind."""
        kind = self.default_device_type
        return [BackendDevice(kind, i) for i in range(self.device_count())]

    def device_count(self) -> int:
        """How many devices of the default kind there are."""
        is_cuda = self.default_device_type.name == "cuda"
        return torch.cuda.device_count() if is_cuda else self.host_devices

    def backend_device(self, device: torch.device) -> BackendDevice:
        """The device behind a torch device; a concrete device is itself."""
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
        """The torch device type on which a single op falls back to eager."""
        return self.default_device_type.physical

    def compilation_devices(self, device: str, devices: Sequence[str]) -> list[str]:
        """The devices among all `devices` that a graph compiled for `device` may run on.

        If these are several, it is compiled once: `execute` gets the same computation with each.
        """
        return [device]

    def bucket_sizes(self, sizes: Sequence[int]) -> list[int]:
        """The sizes that `torpor.pad` pads dimensions of `sizes` to: few, as each is a graph of its
        own where graphs have no symbols. The next powers of two, unless told."""
        return [1 << max(size - 1, 0).bit_length() for size in sizes]

    # -- insight -------------------------------------------------------------------------------

    def metric_report(self) -> str:
        """The backend's own metrics as text."""
        return "\n".join(f"{name} {value}" for name, value in sorted(self.metrics().items()))

    def metrics(self) -> dict[str, float]:
        """The backend's own metrics by name."""
        return {}

    def memory_info(self, device: BackendDevice) -> MemoryInfo:
        """Memory in use and in all on `device`."""
        if device.type.physical == "cuda":
            free, total = torch.cuda.mem_get_info(device.ordinal)
            return MemoryInfo(total - free, total)
        return MemoryInfo(None, None)
