"""Training steps for the tools of this folder to record."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.unit.debug.planted import MARK


class Deep(nn.Module):
    """Many small layers, and near the end one tanh of a shape that no other has."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(layers))
        self.odd = nn.Linear(8, MARK[1])
        self.head = nn.Linear(MARK[1], 4)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * 0.1
        return self.head(torch.tanh(self.odd(x) * 1.5))  # the marked line


def training_step(layers: int, device: str = "lazy") -> Callable[[], Tensor]:
    """A step of AdamW on a deep network; its first call makes the optimizer's state."""
    torch.manual_seed(0)
    model = Deep(layers).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    x = torch.randn(MARK[0], 8).to(device)
    y = torch.randint(4, (MARK[0],)).to(device)

    def step() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step
