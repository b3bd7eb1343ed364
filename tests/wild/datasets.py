"""Data sets that a worker imports by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data import Dataset


class Holds(Dataset[Any]):
    """Holds tensors."""

    def __init__(self) -> None:
        self.x = torch.arange(1.0, 9.0)

    def __len__(self) -> int:
        return 8

    def __getitem__(self, i: int) -> Any:
        return self.x[i]


class Makes(Holds):
    """Makes tensors in the worker, as torchvision's `ToTensor` does."""

    def __getitem__(self, i: int) -> Any:
        return torch.tensor([float(i + 1)])


class Numpy(Holds):
    def __getitem__(self, i: int) -> Any:
        return np.float32(i + 1)


class Calls(Holds):
    """Calls a module in the worker, as feature extraction does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(1, 1)
        nn.init.constant_(self.net.weight, 2.0)
        nn.init.constant_(self.net.bias, 1.0)

    @torch.no_grad()
    def __getitem__(self, i: int) -> Any:
        return self.net(torch.tensor([float(i)]))
