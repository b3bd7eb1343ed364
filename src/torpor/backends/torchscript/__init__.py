"""The TorchScript backend: TorchScript graphs, run as built by TorchScript's executor."""

from torpor.backends.torchscript.compile import (
    TorchScriptIrBuilder,
    TSBackend,
    TSBackendDeviceType,
    get_ts_backend_impl,
    init_torchscript_backend,
)
from torpor.backends.torchscript.lowering import TSLoweringContext
from torpor.backends.torchscript.runtime import TSData

__all__ = [
    "TSBackend",
    "TSBackendDeviceType",
    "TSData",
    "TSLoweringContext",
    "TorchScriptIrBuilder",
    "get_ts_backend_impl",
    "init_torchscript_backend",
]
