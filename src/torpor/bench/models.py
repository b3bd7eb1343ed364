"""Networks to measure that come from no library: plain PyTorch, specific to no runner.

Attention is spelled out, so that every runner gets the same ops: `torch._lazy` has no fused one.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Attention(nn.Module):
    """Causal multi-head attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part(x).view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in (self.query, self.key, self.value)
        )
        scores = (q @ k.transpose(-2, -1)) * (width // self.heads) ** -0.5
        y = scores.masked_fill(future, float("-inf")).softmax(-1) @ v
        mixed: Tensor = self.out(y.transpose(1, 2).reshape(batch, length, width))
        return mixed


class Block(nn.Module):
    """One layer of a GPT."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor, future: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), future)
        mixed: Tensor = x + self.down(F.gelu(self.up(self.norm_2(x))))
        return mixed


class GPT(nn.Module):
    """Takes tokens, returns logits for the next token."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)
        self.register_buffer("future", torch.ones(length, length, dtype=torch.bool).triu(1))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.token(tokens) + self.position
        for block in self.blocks:
            x = block(x, self.future)
        scores: Tensor = self.head(self.norm(x))
        return scores


class ConvNet(nn.Sequential):
    """Convolutions with batch norm; each stage halves the size and doubles the channels."""

    def __init__(self, stages: int, channels: int, classes: int) -> None:
        layers: list[nn.Module] = []
        inside = 3
        for stage in range(stages):
            outside = channels << stage
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU()]
            layers += [nn.Conv2d(outside, outside, 3, padding=1), nn.BatchNorm2d(outside)]
            layers += [nn.ReLU(), nn.MaxPool2d(2)]
            inside = outside
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(inside, classes))


class MLP(nn.Sequential):
    """Linear layers of equal width with ReLU between them."""

    def __init__(self, layers: int, width: int) -> None:
        parts: list[nn.Module] = []
        for _ in range(layers):
            parts += [nn.Linear(width, width), nn.ReLU()]
        super().__init__(*parts[:-1])
