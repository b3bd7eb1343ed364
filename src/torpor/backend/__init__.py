"""The backend interface: what a compiler has to implement to run PyTorch lazily."""

from torpor.backend.builder import IrBuilder
from torpor.backend.data import BackendData
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backend.interface import Backend, MemoryInfo
from torpor.backend.lowering import Computation, LoweringContext
from torpor.backend.registry import get_backend, has_backend, register

__all__ = [
    "Backend",
    "BackendData",
    "BackendDevice",
    "BackendDeviceType",
    "Computation",
    "IrBuilder",
    "LoweringContext",
    "MemoryInfo",
    "get_backend",
    "has_backend",
    "register",
]
