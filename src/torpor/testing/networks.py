"""The small networks that the kit trains, each with a batch and a loss."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Optimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


@dataclass(frozen=True)
class Network:
    """How to make and train a network."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], tuple[Tensor, Tensor]]
    optimizer: Optimizer


class Recurrent(nn.Module):
    """An LSTM that classifies a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(5, 8, num_layers=2, batch_first=True)
        self.head = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        return self.head(states[:, -1])  # type: ignore[no-any-return]  # a module


class Attentive(nn.Module):
    """Two transformer layers with dropout, over a sequence of tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 16)
        layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.2, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        hidden = F.dropout(self.embed(tokens), 0.1, self.training)
        return self.head(self.layers(hidden).mean(1))  # type: ignore[no-any-return]  # a module


def _perceptron() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 4)
    )


def _convolution() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, stride=2), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8, 4),
    )  # fmt: skip


def _batch(shape: tuple[int, ...], tokens: int = 0) -> Callable[[int], tuple[Tensor, Tensor]]:
    def make(step: int) -> tuple[Tensor, Tensor]:
        generator = torch.Generator().manual_seed(step)
        labels = torch.randint(4, (shape[0],), generator=generator)
        if tokens:
            return torch.randint(tokens, shape, generator=generator), labels
        return torch.randn(shape, generator=generator), labels

    return make


def _adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2)


def _sgd(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=5e-2, momentum=0.9)


NETWORKS = {
    "perceptron_adamw": Network(_perceptron, _batch((8, 6)), _adamw),
    "convolution_batch_norm": Network(_convolution, _batch((4, 3, 8, 8)), _sgd),
    "lstm": Network(Recurrent, _batch((4, 6, 5)), _adamw),
    "transformer_dropout": Network(Attentive, _batch((3, 7), tokens=11), _adamw),
}
