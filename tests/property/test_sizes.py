"""Random sizes, step after step, through ten networks: eager's bits, and few graphs.

Fifty patterns of sizes in all. Each step trains, so that forward, backward and the optimizer see
every size.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F

import torpor
from tests.backend_under_test import DEFAULTS
from torpor.execute.sync import PLANS
from torpor.symbols.leaves import SIZES
from torpor.testing.comparison import difference

Sizes = tuple[int, int]  # batch, length


@dataclass
class Case:
    """A network, and what it takes for a batch of some length."""

    build: Callable[[], nn.Module]
    draw: Callable[[Sizes, torch.Generator], Tensor]


def words(sizes: Sizes, draw: torch.Generator) -> Tensor:
    return torch.randint(0, 20, sizes, generator=draw)


def vectors(sizes: Sizes, draw: torch.Generator) -> Tensor:
    return torch.randn(*sizes, 8, generator=draw)


def pictures(sizes: Sizes, draw: torch.Generator) -> Tensor:
    return torch.randn(sizes[0], 3, sizes[1] + 4, sizes[1] + 6, generator=draw)


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.mix, self.out = nn.Embedding(20, 8), nn.Linear(8, 24), nn.Linear(8, 5)

    def forward(self, words: Tensor) -> Tensor:
        batch, length = words.shape
        x = self.words(words) * torch.arange(1, length + 1, device=words.device)[:, None]
        q, k, v = (p.view(batch, length, 2, 4).transpose(1, 2) for p in self.mix(x).chunk(3, -1))
        future = torch.ones(length, length, dtype=torch.bool, device=words.device).triu(1)
        scores = (q @ k.transpose(-1, -2)).masked_fill(future, -1e9).softmax(-1)
        mixed: Tensor = self.out((scores @ v).transpose(1, 2).reshape(batch, length, 8))
        return mixed


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.words, self.body = nn.Embedding(20, 8), kind(8, 6, batch_first=True)

    def forward(self, words: Tensor) -> Tensor:
        hidden: Tensor = self.body(self.words(words))[0]
        return hidden.mean(1)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.layer(x)
        return y


class Pyramid(nn.Module):
    """Down by half, up again to the size it came with, added."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Conv2d(4, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        small = self.down(x).relu()
        large: Tensor = F.interpolate(self.up(small), size=x.shape[-2:])
        return large + x


class Pooled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.out = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Linear(16, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.max_pool2d(self.norm(self.conv(x)).relu(), 2)
        out: Tensor = self.out(F.adaptive_avg_pool2d(x, 2).flatten(1))
        return out


class Shifted(nn.Module):
    """The next vector from the last two."""

    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        before = F.pad(x, (0, 0, 1, 0))[:, :-1]
        error: Tensor = self.out(torch.cat([x, before], -1)) - x.roll(-1, 1)
        return error


class Bag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.out = nn.Embedding(20, 8), nn.Linear(8, 3)

    def forward(self, words: Tensor) -> Tensor:
        seen = (words > 3).unsqueeze(-1).float()
        mean = (self.words(words) * seen).sum(1) / seen.sum(1).clamp(min=1)
        out: Tensor = self.out(mean)
        return out


CASES = {
    "mlp": Case(lambda: nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)), vectors),
    "attention": Case(Attention, words),
    "lstm": Case(lambda: Recurrent(nn.LSTM), words),
    "gru": Case(lambda: Recurrent(nn.GRU), words),
    "encoder": Case(Encoder, vectors),
    "pyramid": Case(Pyramid, pictures),
    "pooled": Case(Pooled, pictures),
    "shifted": Case(Shifted, vectors),
    "bag": Case(Bag, words),
    "normed": Case(lambda: nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 8), nn.Softmax(1)), vectors),
}


def train(model: nn.Module, batches: list[Tensor], put: Callable[[Tensor], Tensor]) -> list[Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for batch in batches:
        loss = model(put(batch)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return [*losses, *(p.detach() for p in model.parameters())]


def lazy(tensor: Tensor) -> Tensor:
    return tensor.to("lazy")


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=5, deadline=None, suppress_health_check=list(HealthCheck), derandomize=True)
@given(st.lists(st.tuples(st.integers(1, 6), st.integers(1, 12)), min_size=4, max_size=12))
def test_random_sizes(name: str, sizes: list[Sizes]) -> None:
    torpor.sync(wait=True)
    PLANS.clear()
    SIZES.clear()
    torch.manual_seed(0)
    case = CASES[name]
    model = case.build()
    draw = torch.Generator().manual_seed(1)
    batches = [case.draw(size, draw) for size in sizes]
    expected = train(copy.deepcopy(model), batches, torch.clone)
    torpor.metrics.reset()
    actual = train(copy.deepcopy(model).to("lazy"), batches, lazy)
    for one, other in zip(expected, actual, strict=True):
        assert difference(other.cpu(), one, exact=not DEFAULTS) is None
    assert torpor.metrics.counters().get("UncachedCompile", 0) <= len(set(sizes)) + 3


@pytest.mark.parametrize("name", sorted(CASES.keys() - {"lstm", "gru"}))
def test_sizes_settle(name: str) -> None:
    """After some steps no size makes a new graph; a recurrent net's loop follows its words."""
    torpor.sync(wait=True)
    PLANS.clear()
    SIZES.clear()
    torch.manual_seed(0)
    case = CASES[name]
    draw = torch.Generator().manual_seed(1)
    model = case.build().to("lazy")
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    made = []
    torpor.metrics.reset()
    for step in range(40):
        batch = int(torch.randint(2, 9, (), generator=draw))
        length = int(torch.randint(4, 40, (), generator=draw))
        loss = model(lazy(case.draw((batch, length), draw))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (19, 39):
            made.append(torpor.metrics.counters()["UncachedCompile"])
    assert made[1] - made[0] <= 1
    assert made[1] <= 12
