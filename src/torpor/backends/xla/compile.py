"""The XLA backend: graphs as jax functions, compiled ahead of their first run."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jaxlib
import torch

from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backend.interface import Backend, MemoryInfo
from torpor.backend.lowering import Computation
from torpor.backends import decompositions, provenance
from torpor.backends.xla import saved
from torpor.backends.xla.lowering import XlaLowering, XlaPiece, structs_of
from torpor.backends.xla.lowerings import TABLE
from torpor.backends.xla.lowerings.random import DRAWS
from torpor.backends.xla.runtime import (
    XlaData,
    array_of,
    exact,
    jax_device,
    place_of,
    run,
    tensor_of,
)
from torpor.errors import BackendError
from torpor.ir.types import TensorType


class XlaBackend(Backend):
    """`jax.jit` on PJRT: the CPU, or a GPU if jax has one. Data are jax arrays."""

    takes_donations = True
    functional = True

    def __init__(self, *, rng: str = "exact") -> None:
        """`rng="fast"`: XLA draws random numbers itself, inside graphs; not eager's numbers."""
        super().__init__()
        if rng not in ("exact", "fast"):
            raise BackendError(f'rng is "exact" or "fast", not {rng!r}')
        self.draws = self.draws_from_seed = rng == "fast"
        kind = "cuda" if torch.cuda.is_available() and _has_gpu() else "cpu"
        self._default_type = BackendDeviceType(kind)

    # -- data ----------------------------------------------------------------------------------

    def placeholder(self, device: BackendDevice, type_: TensorType) -> XlaData:
        return XlaData(device, type_)

    def data_from_tensor(
        self, tensor: torch.Tensor, type_: TensorType, device: BackendDevice
    ) -> XlaData:
        with exact():
            return XlaData(device, type_, array_of(tensor, device))

    def tensor_from_data(
        self, data: BackendData, logical_dtype: torch.dtype | None = None
    ) -> torch.Tensor:
        assert isinstance(data, XlaData)
        with exact():
            place = place_of(data.type, data.device)
            tensor = tensor_of(data.ready(), data.type, place.torch_device)
        return tensor if logical_dtype is None else tensor.to(logical_dtype)

    def copy_data(self, data: BackendData) -> XlaData:
        assert isinstance(data, XlaData)
        held = data.ready()
        with exact():
            copy = held.clone() if isinstance(held, torch.Tensor) else held.copy()
        return XlaData(data.device, data.type, copy)

    def is_shared(self, data: BackendData) -> bool:
        assert isinstance(data, XlaData)
        return data.is_shared()

    # -- graphs --------------------------------------------------------------------------------

    def decompositions(self) -> Mapping[str, Callable[..., Any]]:
        return decompositions.core((*TABLE, *DRAWS))

    def lowering_context(self, *args: Any) -> XlaLowering:
        return XlaLowering(*args)

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        for computation in computations:
            for step in computation.program.steps:
                if isinstance(step, XlaPiece):
                    step.compiled = compiled(step, computation.device)
        return list(computations)

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        return run(computation, arguments, device, self.draws)

    # -- graphs kept on disk -------------------------------------------------------------------

    def cache_key(self) -> str | None:
        return "\n".join((
            f"jax {jax.__version__} {jaxlib.__version__} {os.environ.get('XLA_FLAGS', '')}",
            f"draws {self.draws}",
            provenance.software(),
            provenance.settings_of_torch(),
            provenance.processor(),
            provenance.graphics(),
        ))  # fmt: skip

    def dump(self, computation: Computation) -> bytes | None:
        return saved.dump(computation)

    def load(self, computation: Computation, kept: bytes) -> Computation:
        return saved.load(computation, kept)

    # -- insight -------------------------------------------------------------------------------

    def metrics(self) -> dict[str, float]:
        known = jax_device(self.backend_device(torch.device("lazy"))).memory_stats() or {}
        names = ("bytes_in_use", "peak_bytes_in_use", "num_allocs")
        return {name: known[name] for name in names if name in known}

    def memory_info(self, device: BackendDevice) -> MemoryInfo:
        place = jax_device(device)
        known = place.memory_stats()
        if known is None:  # the CPU does not say: what is alive
            used = sum(array.nbytes for array in jax.live_arrays() if array.device == place)
            return MemoryInfo(used, None)
        return MemoryInfo(known["bytes_in_use"], known.get("bytes_limit"))

    def computation_text(self, computation: Computation) -> str:
        texts = [
            f"// by eager's kernel: {step.node.op.name}"
            if not isinstance(step, XlaPiece)
            else step.compiled.as_text()
            for step in computation.program.steps
        ]
        return "\n\n".join(texts)


def compiled(piece: XlaPiece, device: BackendDevice) -> Any:
    """What XLA makes of a piece, for one device."""
    with exact(), jax.default_device(jax_device(device)), jax.default_matmul_precision("highest"):
        function = jax.jit(piece.function, donate_argnums=piece.donated, keep_unused=True)
        return function.lower(*structs_of(piece)).compile()


def _has_gpu() -> bool:
    return any(device.platform == "gpu" for device in jax.devices())
