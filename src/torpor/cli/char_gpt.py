"""The demo's model and text: a small character GPT, and generated tales to train it on.

Plain PyTorch, independent of torpor.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

SLEEPERS = "dormouse hedgehog bat bear badger hummingbird swift marmot poorwill lemur".split()
MOODS = "slow quiet patient drowsy small old careful clever grey gentle".split()
PLACES = "hollow oak|warm burrow|deep cave|drift of leaves|high ledge|frozen bank".split("|")
TIMES = "when the first snow falls|until the thaw|all through the dark months|at dusk".split("|")
DEEDS = "sleeps|curls up|slows its heart|waits|dreams of berries|does nothing yet".split("|")
WAKINGS = "only what is needed is done|the work is done at once|it wakes and eats".split("|")


def make_text(sentences: int = 1200, seed: int = 0) -> str:
    """Generate a text, determined by the seed, so that no data need be shipped or downloaded."""
    rng = random.Random(seed)

    def sentence() -> str:
        sleeper, mood = rng.choice(SLEEPERS), rng.choice(MOODS)
        line = f"The {mood} {sleeper} {rng.choice(DEEDS)} in the {rng.choice(PLACES)}"
        return rng.choice(
            (f"{line}.", f"{line} {rng.choice(TIMES)}.", f"{line}; {rng.choice(WAKINGS)}.")
        )

    return "\n".join(sentence() for _ in range(sentences)) + "\n"


@dataclass(frozen=True)
class Text:
    """A text as integers, one per character."""

    characters: str
    tokens: Tensor

    @classmethod
    def encode(cls, text: str) -> Text:
        characters = "".join(sorted(set(text)))
        number = {c: i for i, c in enumerate(characters)}
        return cls(characters, torch.tensor([number[c] for c in text]))

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.characters[i] for i in tokens)

    def batch(self, size: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        """Random windows of the text, and the same windows shifted by one character."""
        starts = torch.randint(len(self.tokens) - length - 1, (size, 1), generator=generator)
        windows = self.tokens[starts + torch.arange(length + 1)]
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()


@dataclass(frozen=True)
class Shape:
    """The sizes of a ``CharGPT``."""

    vocabulary: int
    layers: int = 4
    heads: int = 4
    width: int = 128
    length: int = 64
    dropout: float = 0.1


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads, self.dropout = shape.heads, shape.dropout
        self.qkv = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.out = nn.Linear(shape.width, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, width // self.heads).transpose(1, 2)
            for part in self.qkv(x).chunk(3, dim=-1)
        )
        dropout = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        y = y.transpose(1, 2).reshape(batch, length, width)
        return F.dropout(self.out(y), self.dropout, self.training)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
            nn.Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        mixed: Tensor = x + self.mlp(self.norm_2(x))
        return mixed


class CharGPT(nn.Module):
    """Takes characters, returns logits for the next character."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.token = nn.Embedding(shape.vocabulary, shape.width)
        self.position = nn.Embedding(shape.length, shape.width)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.layers)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        self.head.weight = self.token.weight
        self.apply(self._initialise)

    @staticmethod
    def _initialise(module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)

    def forward(self, tokens: Tensor) -> Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = F.dropout(
            self.token(tokens) + self.position(positions), self.shape.dropout, self.training
        )
        scores: Tensor = self.head(self.norm(self.blocks(x)))
        return scores

    def loss(self, tokens: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(self(tokens).flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def continue_text(self, tokens: Tensor, count: int) -> list[int]:
        """The ``count`` next characters by greedy decoding.

        The window has a fixed length, so that every step has the same shapes.
        """
        self.eval()
        chosen = []
        for _ in range(count):
            best = self(tokens)[:, -1].argmax(-1, keepdim=True)
            tokens = torch.cat((tokens[:, 1:], best), dim=1)
            chosen.append(int(best.item()))
        self.train()
        return chosen


def learning_rate_scale(step: int, warm_up: int, steps: int) -> float:
    """Linear warm-up, then cosine decay to a tenth."""
    if step < warm_up:
        return (step + 1) / warm_up
    done = (step - warm_up) / max(1, steps - warm_up)
    return 0.1 + 0.45 * (1.0 + math.cos(math.pi * done))
