"""Devices of a backend."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BackendDeviceType:
    """A kind of device of a backend: a torch device type ("cpu", "cuda"), or a name of its own.

    For a name of its own, `torch_type` is the torch device type that backs it: it holds tensors
    before they become data, runs fallbacks, and determines which kernels eager would choose.
    """

    name: str
    torch_type: str = ""  # "": the same as `name`

    @property
    def physical(self) -> str:
        """The type of the torch device that backs it."""
        return self.torch_type or self.name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class BackendDevice:
    """One device of a backend: its type and index."""

    type: BackendDeviceType
    ordinal: int

    @property
    def torch_device(self) -> torch.device:
        """The torch device that backs it; the CPU has no index."""
        if self.type.physical == "cpu":
            return torch.device("cpu")
        return torch.device(self.type.physical, self.ordinal)

    def __hash__(self) -> int:  # fast: it is part of every plan's key, and there are few devices
        return self.ordinal

    def __str__(self) -> str:
        return f"{self.type}:{self.ordinal}"


def cores() -> int:
    """How many CPU cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
