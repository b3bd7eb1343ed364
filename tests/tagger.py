"""A network whose batches and sentences are of any length, and its training."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from tests.comparison import Put

Shape = tuple[int, int]  # sentences, words


class Tagger(nn.Module):
    """Words in, tags out: an embedding with positions, attention, dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(50, 16)
        self.places = nn.Embedding(64, 16)
        self.norm = nn.LayerNorm(16)
        self.mix = nn.Linear(16, 48)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(16, 7)

    def forward(self, words: Tensor) -> Tensor:
        batch, length = words.shape
        x = self.words(words) + self.places(torch.arange(length, device=words.device))
        q, k, v = (
            part.view(batch, length, 2, 8).transpose(1, 2)
            for part in self.mix(self.norm(x)).split(16, dim=2)
        )
        scores = (q @ k.transpose(-2, -1)) / math.sqrt(8)
        mixed = (self.drop(scores.softmax(-1)) @ v).transpose(1, 2).reshape(batch, length, 16)
        tags: Tensor = self.out(x + self.drop(mixed))
        return tags


def random_shapes(steps: int, fewest: int = 1, seed: int = 2) -> list[Shape]:
    """A shape for each step, of `fewest` to 8 sentences."""
    draw = torch.Generator().manual_seed(seed)
    batches = torch.randint(fewest, 9, (steps,), generator=draw).tolist()
    lengths = torch.randint(4, 60, (steps,), generator=draw).tolist()
    return list(zip(batches, lengths, strict=True))


def train(put: Put | None, steps: int, shapes: list[Shape]) -> list[float]:
    """The losses of training steps on batches of these shapes, in turn; without `put`, eager's."""
    torch.manual_seed(0)
    model = Tagger() if put is None else put.module(Tagger())
    draw = torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) / 5, 0.5 * (1 + math.cos(math.pi * s / steps)))
    )
    losses = []
    for step in range(steps):
        shape = shapes[step % len(shapes)]
        words, tags = (torch.randint(0, top, shape, generator=draw) for top in (50, 7))
        if put is not None:
            words, tags = put(words), put(tags)
        loss = F.cross_entropy(model(words).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss)
    return [loss.item() for loss in losses]
