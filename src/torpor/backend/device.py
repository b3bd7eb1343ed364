"""Devices as a backend names them."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class BackendDeviceType:
    """A kind of device a backend can use: named as torch names it ("cpu", "cuda"), or as its own.

    `torch_type` is the torch device behind a name of its own: where tensors are that become data,
    where ops fall back to, and which kernels eager would choose.
    """

    name: str
    torch_type: str = ""  # the name itself

    @property
    def physical(self) -> str:
        """The type of the torch device behind it."""
        return self.torch_type or self.name

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class BackendDevice:
    """One device of a backend: its kind and its number."""

    type: BackendDeviceType
    ordinal: int

    @property
    def torch_device(self) -> torch.device:
        """The physical torch device; the CPU has no number."""
        if self.type.physical == "cpu":
            return torch.device("cpu")
        return torch.device(self.type.physical, self.ordinal)

    def __hash__(self) -> int:  # part of the key of every graph, and there are few devices
        return self.ordinal

    def __str__(self) -> str:
        return f"{self.type}:{self.ordinal}"


def cores() -> int:
    """How many cores of the CPU this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
