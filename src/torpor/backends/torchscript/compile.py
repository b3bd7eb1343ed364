"""The TorchScript backend: graphs run as built by TorchScript's executor."""

from __future__ import annotations

import functools
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torpor import _torch, metrics
from torpor.backend.builder import IrBuilder
from torpor.backend.data import BackendData, number_dtype
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backend.lowering import Computation
from torpor.backend.registry import activate, make
from torpor.backends.blocks.block_backend import BlockBackend
from torpor.backends.blocks.program import Piece, Program, ProgramRun
from torpor.backends.blocks.registers import Registers
from torpor.backends.torchscript.lowering import MAX_OPS, ScriptCode, remember_check, why_not
from torpor.backends.torchscript.runtime import COUNTERS, TSData, run_alone
from torpor.errors import BackendError
from torpor.ir.graph import Block
from torpor.ir.node import Node
from torpor.ir.types import TensorType


@dataclass(frozen=True, slots=True)
class TSBackendDeviceType(BackendDeviceType):
    """The kinds of devices that TorchScript graphs run on: "cpu" and "cuda"."""

    def __post_init__(self) -> None:
        if self.name not in ("cpu", "cuda"):
            raise BackendError(f"the TorchScript backend runs on cpu and cuda, not {self.name!r}")


class TorchScriptIrBuilder(IrBuilder):
    """Builds nodes for the devices of a TorchScript backend."""

    def __init__(self, backend: TSBackend) -> None:
        super().__init__(lambda device: backend.backend_device(device).torch_device)


class TSBackend(BlockBackend):
    """Builds TorchScript graphs and has TorchScript run them, on the CPU or on CUDA."""

    exact = True
    max_nodes = MAX_OPS
    scalars_as_data = True

    def __init__(self, cuda: bool | None = None) -> None:
        super().__init__()
        if cuda is None:
            cuda = os.environ.get("LTC_TS_CUDA", "0") not in ("", "0")
        if cuda and not torch.cuda.is_available():
            raise BackendError(
                "CUDA was asked for (cuda=True or LTC_TS_CUDA=1) and torch finds no CUDA device"
            )
        self.default_device_type = "cuda" if cuda else "cpu"

    # -- devices -------------------------------------------------------------------------------

    @property
    def default_device_type(self) -> BackendDeviceType:
        """The kind of device behind `lazy`."""
        return self._default_type

    @default_device_type.setter
    def default_device_type(self, type_: BackendDeviceType | str) -> None:
        self._default_type = TSBackendDeviceType(str(type_))

    def backend_device(self, device: torch.device) -> BackendDevice:
        found = super().backend_device(device)
        return BackendDevice(TSBackendDeviceType(found.type.name), found.ordinal)

    # -- data ----------------------------------------------------------------------------------

    def data_from_tensor(
        self, tensor: torch.Tensor, type_: TensorType, device: BackendDevice
    ) -> TSData:
        return TSData(device, type_, tensor.to(device.torch_device))

    def data_from_scalar(self, scalar: Any, device: BackendDevice) -> TSData:
        type_ = TensorType.of((), (), number_dtype(scalar), device.torch_device)
        return TSData(device, type_, scalar=scalar)

    def tensor_from_data(
        self, data: BackendData, logical_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        if isinstance(data, TSData) and data.tensor is None and data.scalar is not None:
            data.tensor = torch.tensor(
                data.scalar, dtype=data.type.dtype, device=data.device.torch_device
            )
        return super().tensor_from_data(data, logical_dtype)

    def placeholder(self, device: BackendDevice, type_: TensorType) -> TSData:
        return TSData(device, type_)

    # -- graphs --------------------------------------------------------------------------------

    def ir_builder(self) -> TorchScriptIrBuilder:
        return TorchScriptIrBuilder(self)

    def why_not(self, node: Node) -> str | None:
        return why_not(node)

    def compile_block(self, block: Block, registers: Registers, program: Program) -> list[Piece]:
        piece = registers.piece(block)
        code = ScriptCode(f"{program.name}_{block.stage}", piece)
        piece.run, piece.text = code, code.text
        return [piece]

    def complete(self, program: Program) -> None:
        """Make an executor for every graph."""
        super().complete(program)
        program.run_alone = run_alone
        for code in _codes(program):
            code.load()
            metrics.count("TorchScriptGraph")

    # -- running -------------------------------------------------------------------------------

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        given = list(arguments)
        for place in computation.program.paths.numbers:
            if isinstance(given[place], TSData):
                given[place] = given[place].scalar
        with _torch.script_as_drawn():
            return super().execute(computation, given, device)

    def run_again(self, call: ProgramRun, error: Exception) -> list[BackendData]:
        """Run a program by the reference, and memoize its checks."""
        metrics.count("TorchScriptRerun")
        results = super().run_again(call, error)
        for instruction in call.program.reference[0]:
            remember_check(instruction)
        for code in _codes(call.program):
            if code.asked:
                code.function = None
        return results

    # -- metrics -------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Counts of compiled graphs, ops run by TorchScript, fallbacks, and reruns."""
        counted = metrics.counters()
        return {name: counted.get(name, 0) for name in COUNTERS}


def _codes(program: Program) -> Iterator[ScriptCode]:
    return (step.run for step in program.pieces if isinstance(step.run, ScriptCode))


@functools.cache
def get_ts_backend_impl() -> TSBackend:
    """The TorchScript backend of this process (`GetTSBackendImpl`)."""
    backend = make("torchscript")
    assert isinstance(backend, TSBackend), "the name is taken by this backend"
    return backend


def init_torchscript_backend() -> TSBackend:
    """Make the TorchScript backend the active one (`InitTorchScriptBackend`)."""
    backend = get_ts_backend_impl()
    activate(backend)
    return backend
