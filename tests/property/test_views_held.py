"""Chains of views that live across cuts while sizes, which are symbols, change places.

A view is one of its memory in numbers, whatever the symbols of its trace are in the next: random
chains, read and written through in random order, eager against lazy.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torpor
from tests.comparison import Put, plain

pytestmark = pytest.mark.filterwarnings("ignore:Tensor.mT is deprecated on 0-D tensors")

SHAPES = ((4, 6), (6, 4), (4, 4), (5, 3), (3, 5), (2, 6), (6, 6), (7, 2))
MADE: tuple[Callable[[Tensor], Tensor], ...] = (
    torch.clone,
    lambda t: t.t().contiguous().t(),
    lambda t: t.t().contiguous(),
    lambda t: (t + 1).t(),
    lambda t: t.flatten(),
)
VIEWS: tuple[Callable[[Tensor], Tensor], ...] = (
    lambda t: t[None],
    lambda t: t[0],
    lambda t: t[..., 0],
    lambda t: t.transpose(0, -1),
    lambda t: t.mT,
    lambda t: t.view_as(t),
    lambda t: t[: t.shape[-1]],
    lambda t: t[..., : t.shape[0]],
    lambda t: t.narrow(-1, 0, max(t.shape[-1] // 2, 1)),
    lambda t: t.flatten(),
    lambda t: t.view(t.shape[-1], -1),
    lambda t: t.unsqueeze(-1),
    lambda t: t.expand(2, *t.shape),
    lambda t: t.split(2)[0],
    lambda t: t.diagonal(),
)
TOUCHES: tuple[Callable[[Tensor], Any], ...] = (
    lambda t: t + 1,
    lambda t: t.clone(),
    lambda t: t.sum(0),
    lambda t: t.mT.clone(),
    lambda t: t.add_(1),
    lambda t: t.mul_(2),
    lambda t: t.view_as(t).neg_(),
    lambda t: t.tolist(),
)
REFUSED = (RuntimeError, IndexError, ValueError)


def _tried(call: Callable[[Tensor], Any], tensor: Tensor) -> Any:
    try:
        return call(tensor)
    except REFUSED as error:
        return type(error)


def _same(one: Any, other: Any) -> bool:
    if not isinstance(one, Tensor):
        return bool(one == other)
    sizes = one.shape == other.shape and one.stride() == other.stride()
    return sizes and torch.equal(one, plain(other))


class Held:
    """Tensors that live on, in eager and lazily."""

    def __init__(self, put: Put, seed: int) -> None:
        self.put, self.random = put, random.Random(seed)
        self.eager: list[Tensor] = []
        self.lazy: list[Tensor] = []
        self.reported: list[str] = []

    def keep(self, call: Callable[[Tensor], Any], one: Tensor, other: Tensor) -> bool:
        """Hold what `call` makes; False if both refuse."""
        made, also = _tried(call, one), _tried(call, other)
        assert isinstance(made, Tensor) == isinstance(also, Tensor), f"{made} and {also}"
        if isinstance(made, Tensor):
            self.eager.append(made)
            self.lazy.append(also)
        return isinstance(made, Tensor)

    def begin(self, shape: tuple[int, int]) -> None:
        """A new memory, and views of views of it."""
        data = torch.randn(shape, generator=torch.Generator().manual_seed(len(self.eager)))
        self.keep(self.random.choice(MADE), data.clone(), self.put(data))
        for _ in range(self.random.randint(1, 4)):
            self.keep(self.random.choice(VIEWS), self.eager[-1], self.lazy[-1])
        del self.eager[:-12], self.lazy[:-12]

    def touch(self) -> None:
        """Some of them, in any order."""
        for _ in range(self.random.randint(1, 4)):
            place = self.random.randrange(len(self.eager))
            call = self.random.choice(TOUCHES)
            one, other = (_tried(call, them[place]) for them in (self.eager, self.lazy))
            assert _same(one, other), f"{one} and {other}"

    def check(self) -> None:
        for one, other in zip(self.eager, self.lazy, strict=True):
            assert _same(one, other), f"{one} and {plain(other)}"


def play(seed: int, put: Put) -> None:
    """Let sizes become symbols, then let tensors live on while these are other numbers."""
    held = Held(put, seed)
    shapes = held.random.sample(SHAPES, 4)
    for shape in shapes[:3]:
        x = put(torch.randn(shape))
        torpor.sync()
        y = x.clone()
        torpor.sync()
        plain(y)
    for _ in range(6):
        held.begin(held.random.choice(shapes))
        if held.random.random() < 0.7:
            torpor.sync()
        held.touch()
        if held.random.random() < 0.3:
            held.check()
        if held.random.random() < 0.5:
            torpor.sync()
    held.check()


@pytest.mark.parametrize("seed", range(40))
def test_a_view_held_while_sizes_change_places_is_eagers(seed: int) -> None:
    play(seed, Put("lazy" if seed % 2 else "concrete"))
