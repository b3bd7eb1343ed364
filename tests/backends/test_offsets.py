"""Offsets of views that change, compiled: one graph, eager's numbers."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import torpor
from torpor.backends.inductor import runtime as inductor_runtime

OFFSETS = (7, 0, 31, 1, 18, 2, 36)
needs_inductor = pytest.mark.skipif(
    inductor_runtime.unavailable() is not None, reason="Inductor cannot compile here"
)


@pytest.fixture
def compiled() -> Iterator[None]:
    with torpor.using("inductor"):
        yield


def program(x: torch.Tensor, offset: int) -> list[torch.Tensor]:
    """Looks and writes at an offset; what was seen before and after."""
    before = x[offset : offset + 4].exp() + x[offset + 2]
    x[offset] = before[0]
    x[offset + 1 : offset + 3].mul_(0.5)
    after = torch.stack([x[(offset * k) % 40] for k in range(3)])
    torpor.sync()
    return [before, after]


@needs_inductor
def test_code_that_is_compiled_serves_all_offsets(compiled: None) -> None:
    eager = torch.linspace(-1, 1, 40 * 6).view(40, 6)
    lazy = eager.to("lazy")
    counted = []
    for offset in OFFSETS:
        for got, expected in zip(program(lazy, offset), program(eager, offset), strict=True):
            torch.testing.assert_close(got.cpu(), expected)
        counted.append(torpor.metrics.counters().get("UncachedCompile", 0))
    torch.testing.assert_close(lazy.cpu(), eager)
    assert counted[-1] == counted[3]
