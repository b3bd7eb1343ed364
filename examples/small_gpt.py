"""A small GPT, its data and its training loop: what the examples in this folder train."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torpor

VOCABULARY, LENGTH = 96, 32


class Attention(nn.Module):
    """Causal attention; how many heads it has follows from the size of its projections.

    With its projections split over ranks by columns, each rank has some of the heads.
    """

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.query = nn.Linear(width, width)
        self.key = nn.Linear(width, width)
        self.value = nn.Linear(width, width)
        self.out = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.query(x), self.key(x), self.value(x))
        q, k, v = (p.unflatten(-1, (-1, self.head)).transpose(1, 2) for p in parts)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.before_attention = nn.LayerNorm(width)
        self.attention = Attention(width, heads)
        self.before_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class GPT(nn.Module):
    def __init__(self, layers: int = 6, width: int = 64, heads: int = 4) -> None:
        super().__init__()
        self.tokens = nn.Embedding(VOCABULARY, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        return self.head(self.norm(self.blocks(self.tokens(tokens) + self.positions(places))))


def batches(steps: int, size: int, rank: int = 0, world: int = 1) -> Iterable[torch.Tensor]:
    """Tokens that follow a rule, to be learned; rank `rank` of `world` gets its part of each."""
    generator = torch.Generator().manual_seed(7)
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (size, 1), generator=generator)
        stride = torch.randint(1, 5, (size, 1), generator=generator)
        tokens = (start + stride * torch.arange(LENGTH + 1)) % VOCABULARY
        yield tokens.chunk(world)[rank]


def train(model: nn.Module, optimizer: Any, data: Iterable[torch.Tensor]) -> list[float]:
    """Train; the loss of each step, the mean over ranks."""
    losses = []
    for tokens in data:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(mean.item())
    return losses


def start(description: str) -> argparse.Namespace:
    """Read the command line, and meet the other ranks that `torchrun` has started."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--eager", action="store_true", help="without torpor, to compare")
    parser.add_argument("--backend", help="what compiles the steps: see torpor.backends()")
    options = parser.parse_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    if options.backend:
        torpor.use(options.backend)
    torch.manual_seed(0)  # the same parameters on every rank
    return options


def report(losses: list[float]) -> None:
    """Print the losses on rank 0, and how many graphs there were, then part from the others."""
    if dist.get_rank() == 0:
        counters = torpor.metrics.counters()
        made, compiled, interpreted = (
            counters.get(name, 0)
            for name in ("UncachedCompile", "CachedCompile", "InterpretedGraph")
        )
        print("losses:", " ".join(f"{loss:.6f}" for loss in losses))
        print(f"graphs: {made} made, {compiled} run compiled, {interpreted} by eager's kernels")
    dist.barrier()
    dist.destroy_process_group()
