"""The reference backend: eager's kernels, bit for bit what eager computes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torpor import config
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.backends.reference.lowering import ReferenceLowering
from torpor.backends.reference.runtime import run


class ReferenceBackend(Backend):
    """Interprets graphs op by op; the baseline that other backends are compared with."""

    host_devices = config.cpu_devices

    exact = True
    dynamic = True

    def lowering_context(
        self, name: str, device: BackendDevice, post_order: Any = None, emitted: Any = None
    ) -> ReferenceLowering:
        return ReferenceLowering(name, device, post_order, emitted)

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        """Do nothing: lowering has already made the program."""
        return list(computations)

    def execute(
        self, computation: Computation, arguments: Sequence[Any], device: BackendDevice
    ) -> list[BackendData]:
        return run(computation.program, arguments, computation.result_types_for(arguments), device)
