"""Steps that write tensors from one another, compiled: torch.compile gets many of these wrong."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import torpor
from torpor.backends.blocks.program import Program
from torpor.backends.inductor import InductorBackend
from torpor.backends.inductor import runtime as inductor_runtime

needs_compiler = pytest.mark.skipif(
    inductor_runtime.unavailable() is not None, reason=str(inductor_runtime.unavailable())
)
Tensors = list[Tensor]


def _swap(t: Tensors, i: int, j: int, k: int) -> None:
    old = t[i].clone()
    t[i].copy_(t[j])
    t[j].copy_(old)


def _bind(t: Tensors, i: int, j: int, k: int) -> None:
    t[i] = t[j].clone()


def _next(i: int) -> int:
    return (i + 1) % 4


STATEMENTS: list[Callable[[Tensors, int, int, int], Any]] = [
    lambda t, i, j, k: t[i].copy_(t[j]),
    lambda t, i, j, k: t[i].add_(t[j], alpha=0.5),
    lambda t, i, j, k: t[i].copy_(t[j].clone() + 0),
    lambda t, i, j, k: t[i].mul_(0.5).add_(1),
    lambda t, i, j, k: t[i].copy_(t[j].view(4, 4).t().reshape(16)),
    lambda t, i, j, k: t[i][2:9].copy_(t[_next(i)][3:10]),
    lambda t, i, j, k: t[i].copy_(torch.where(t[j] > 0, t[j], t[k])),
    lambda t, i, j, k: t[i].copy_(t[j].double().float()),
    lambda t, i, j, k: t[i].fill_(2.0),
    _bind,
    _swap,
    lambda t, i, j, k: torch._foreach_add_([t[i], t[_next(i)]], [t[j].clone(), t[k].clone()]),
    lambda t, i, j, k: torch._foreach_copy_([t[i], t[_next(i)]], [t[j].clone(), t[k] * 1]),
    lambda t, i, j, k: t[i].copy_(t[j].roll(3)),
    lambda t, i, j, k: t[i].copy_(torch.cat([t[j][1:], t[k][:1]])),
    lambda t, i, j, k: t[i].div_(t[i].square().sum().sqrt() + 1),
    lambda t, i, j, k: t[i].view(4, 4).sub_(t[i].view(4, 4).mean(0)),
    lambda t, i, j, k: t[i].view(4, 4)[1].copy_(t[j][4:8]),
    lambda t, i, j, k: t[i].__setitem__(torch.tensor([1, 3, 5]), t[j][torch.tensor([2, 3, 4])]),
    lambda t, i, j, k: t[i].index_add_(0, torch.tensor([0, 7]), t[j][:2] * 2),
    lambda t, i, j, k: t[i].masked_fill_(t[j] > t[k], 0.25),
    lambda t, i, j, k: t[i].view(4, 4).diagonal().add_(t[k][:4]),
    lambda t, i, j, k: t[i].scatter_(0, torch.tensor([9, 2]), t[j][3:5] + 1),
]
Statement = tuple[int, int, int, int]
FOUND: list[list[Statement]] = [
    [(4, 0, 0, 0)],
    [(13, 0, 0, 0)],
    [(14, 0, 0, 1)],
    [(0, 1, 0, 0), (3, 0, 0, 0)],
    [(9, 1, 0, 0), (3, 0, 0, 0)],
    [(11, 0, 1, 0)],
    [(16, 0, 0, 0)],
    [(11, 3, 2, 1), (7, 0, 3, 3)],
    [(10, 3, 1, 0), (8, 3, 0, 2), (10, 1, 0, 3), (5, 0, 0, 3)],
    [(12, 0, 1, 2), (10, 3, 0, 2), (0, 2, 3, 0), (9, 0, 1, 2), (2, 2, 3, 0), (10, 0, 2, 3)],
    [(8, 2, 3, 3), (12, 2, 1, 0), (9, 0, 0, 1), (2, 1, 0, 0), (8, 0, 1, 2), (1, 3, 1, 0)],
    [(2, 1, 2, 3), (10, 1, 2, 3), (7, 2, 0, 2), (6, 2, 3, 0), (11, 3, 2, 2), (8, 1, 0, 0)],
    [(1, 3, 0, 1), (4, 0, 0, 3), (6, 3, 2, 1), (11, 2, 1, 0)],
]


def _drawn(seed: int) -> list[Statement]:
    draw = random.Random(seed)
    return [
        (draw.randrange(len(STATEMENTS)), draw.randrange(4), draw.randrange(4), draw.randrange(4))
        for _ in range(draw.randrange(3, 9))
    ]


def _check(program: list[Statement]) -> None:
    generator = torch.Generator().manual_seed(len(program))
    eager = [torch.randn(16, generator=generator) for _ in range(4)]
    lazy = [torpor.lazy(tensor.clone()) for tensor in eager]
    with torpor.using("inductor", compile_after=0):
        for _ in range(2):
            sums = []
            for tensors in (eager, lazy):
                sums.append(
                    sum((t.double() * (n + 1)).sum() for n, t in enumerate(tensors))
                )  # reads all
                for statement, *places in program:
                    STATEMENTS[statement](tensors, *places)
            torpor.sync()
            for one, other in zip([*lazy, sums[1]], [*eager, sums[0]], strict=True):
                torch.testing.assert_close(torpor.eager(one), other, rtol=1e-5, atol=1e-6)


@needs_compiler
@pytest.mark.parametrize("number", range(len(FOUND)))
def test_what_was_found(number: int) -> None:
    _check(FOUND[number])


@needs_compiler
@pytest.mark.parametrize("seed", range(10))
def test_drawn_programs(seed: int) -> None:
    _check(_drawn(1000 + seed))


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("seed", range(200))
def test_many_drawn_programs(seed: int) -> None:
    _check(_drawn(2000 + seed))


@needs_compiler
@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_training_step_writes_over_all_its_parameters(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[Program] = []
    model = torpor.lazy(
        nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.LayerNorm(288),
            nn.Linear(288, 4),
        )
    )  # fmt: skip
    options = {"momentum": 0.9} if name == "SGD" else {}
    optimizer = getattr(torch.optim, name)(model.parameters(), lr=0.01, **options)
    original = InductorBackend.compile_program

    def noted(self: Any, program: Program) -> None:
        original(self, program)
        programs.append(program)

    monkeypatch.setattr(InductorBackend, "compile_program", noted)
    with torpor.using("inductor", compile_after=0):
        for _ in range(5):
            model(torpor.lazy(torch.ones(2, 3, 8, 8))).square().mean().backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        torpor.wait()
    last = programs[-1]
    assert len(last.donated) >= 10
    # Batch norm computes its running mean and variance while the step may still fail: copied last.
    assert len(last.copied) == 2
