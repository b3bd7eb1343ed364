"""The program that is measured: one training step of a small GPT, in plain PyTorch.

Nothing here knows which system records it. Attention is written out by default, so that every
system meets the same ops: `torch._lazy` has no fused attention, and leaks CPU tensors from `chunk`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "sgd": torch.optim.SGD,
}


@dataclass(frozen=True)
class Size:
    """How large the model and its batch are."""

    layers: int = 12
    width: int = 64
    heads: int = 4
    batch: int = 4
    length: int = 32
    vocabulary: int = 128
    fused_attention: bool = False


class Attention(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.heads, self.fused = size.heads, size.fused_attention
        self.query = nn.Linear(size.width, size.width)
        self.key = nn.Linear(size.width, size.width)
        self.value = nn.Linear(size.width, size.width)
        self.out = nn.Linear(size.width, size.width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        if self.fused:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
            y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    def __init__(self, size: Size) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(size.width), nn.LayerNorm(size.width)
        self.attention = Attention(size)
        self.up = nn.Linear(size.width, 4 * size.width)
        self.down = nn.Linear(4 * size.width, size.width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), future)
        mixed: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return mixed


class GPT(nn.Module):
    """Tokens in, scores for the next token out."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        self.token = nn.Embedding(size.vocabulary, size.width)
        self.position = nn.Parameter(torch.randn(size.length, size.width) * 0.02)
        self.blocks = nn.ModuleList(Block(size) for _ in range(size.layers))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, size.vocabulary)
        future = torch.ones(size.length, size.length, dtype=torch.bool).triu(1)
        self.register_buffer("future", future)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x, self.future)
        scores: Tensor = self.head(self.norm(x))
        return scores


class Training:
    """A model, one batch and an optimizer; `place` puts tensors and modules on their device."""

    def __init__(self, size: Size, optimizer: str, place: Callable[[Any], Any]) -> None:
        torch.manual_seed(0)
        self.model: GPT = place(GPT(size))
        shape = (size.batch, size.length)
        self.tokens: Tensor = place(torch.randint(size.vocabulary, shape))
        self.targets: Tensor = place(torch.randint(size.vocabulary, shape))
        self.optimizer = OPTIMIZERS[optimizer](self.model.parameters(), lr=1e-3)
        self.loss: Tensor | None = None

    def step(self) -> None:
        """Forward, backward, optimizer, zero_grad; nothing is read."""
        self.forward()
        self.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def forward(self) -> None:
        scores = self.model(self.tokens)
        self.loss = F.cross_entropy(scores.flatten(0, 1), self.targets.flatten())

    def backward(self) -> None:
        assert self.loss is not None, "forward comes first"
        self.loss.backward()
