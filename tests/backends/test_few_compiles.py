"""Numbers that change from step to step cost one more graph, not one for each step."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import torpor
from torpor.backends.inductor.compile import COMPILE_AFTER
from torpor.backends.inductor.runtime import unavailable

STEPS, WARM_UP = 200, 20


def _rate(step: int) -> float:
    if step < WARM_UP:
        return (step + 1) / WARM_UP
    return 0.5 * (1 + math.cos(math.pi * (step - WARM_UP) / (STEPS - WARM_UP)))


def _train(place: Callable[[Any], Any], device: str) -> list[float]:
    """Warm-up, cosine, clipping, and a loss scale that grows; the losses."""
    torch.manual_seed(0)
    model = place(nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.1), nn.Linear(32, 8)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, _rate)
    scaler = torch.amp.GradScaler(device, init_scale=1024.0, growth_interval=30)
    losses = []
    for _ in range(STEPS):
        x, target = place(torch.randn(4, 16)), place(torch.randint(8, (4,)))
        loss = nn.functional.cross_entropy(model(x), target)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [loss.item() for loss in losses]


def _as_it_is(thing: Any) -> Any:
    return thing


@pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
@pytest.mark.parametrize("where", ["lazy", "mode"])
def test_schedule_clipping_and_loss_scaling_need_two_compiles(
    where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", COMPILE_AFTER)  # as in a long training
    expected = _train(_as_it_is, "cpu")
    mode: AbstractContextManager[None] = torpor.mode() if where == "mode" else nullcontext()
    place = _as_it_is if where == "mode" else lambda thing: thing.to("lazy")
    with torpor.using("inductor"):
        torpor.metrics.reset()
        with mode:
            actual = _train(place, "cpu" if where == "mode" else "lazy")
        counters = torpor.metrics.counters()
    assert counters["UncachedCompile"] <= 2
    assert counters["Sync::_local_scalar_dense"] <= 2 * STEPS  # the scaler's, and ours
    assert actual == pytest.approx(expected, rel=1e-4)
