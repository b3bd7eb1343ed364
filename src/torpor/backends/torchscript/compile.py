"""The TorchScript backend: graphs run as built by TorchScript's executor."""

from __future__ import annotations

import functools
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from torpor import config, metrics
from torpor.backend.builder import IrBuilder
from torpor.backend.data import BackendData, number_dtype
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.backend.registry import activate, make
from torpor.backends.torchscript.lowering import ScriptPiece, ScriptStep, TSLoweringContext, why_not
from torpor.backends.torchscript.runtime import COUNTERS, TSData, run
from torpor.errors import BackendError
from torpor.ir.types import TensorType
from torpor.text.printer import print_node


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


class TSBackend(Backend):
    """Builds TorchScript graphs and has TorchScript run them, on the CPU or on CUDA."""

    host_devices = config.cpu_devices

    exact = True
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

    def lowering_context(
        self, name: str, device: BackendDevice, post_order: Any = None, emitted: Any = None
    ) -> TSLoweringContext:
        return TSLoweringContext(name, device, post_order, emitted)

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        """Make an executor for every graph."""
        for computation in computations:
            for piece in computation.program.pieces:
                piece.load()
                metrics.count("TorchScriptGraph")
        return list(computations)

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        return run(
            computation.program,
            arguments,
            computation.parameter_types,
            computation.result_types,
            device,
        )

    def computation_text(self, computation: Computation) -> str:
        """The TorchScript graphs, interleaved with the ops that eager runs."""
        return "\n".join(_text(part) for part in computation.program.parts)

    # -- metrics -------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        """Counts of compiled graphs, ops run by TorchScript, fallbacks, and reruns."""
        counted = metrics.counters()
        return {name: counted.get(name, 0) for name in COUNTERS}


def _text(part: ScriptStep) -> str:
    if isinstance(part, ScriptPiece):
        return f"# {part.name}\n{part.draw().graph}"
    return f"# by eager: {why_not(part)}\n{print_node(part.node)}\n"


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
