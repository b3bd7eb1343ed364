"""A graph that is met once is not worth compiling: the reference backend runs it first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
import torch

import torpor
from tests.comparison import Put, assert_same
from torpor.backend import Computation, register
from torpor.backends.reference import ReferenceBackend


class Slow(ReferenceBackend):
    """Counts what it compiles."""

    compile_after = 2
    compiled = 0

    def compile(self, computations: Sequence[Computation]) -> list[Computation]:
        Slow.compiled += len(computations)
        return super().compile(computations)


register("slow", Slow)


@pytest.fixture(autouse=True)
def slow(on_the_reference_backend: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torpor.config, "compile_after", -1)
    with torpor.using("slow"):
        Slow.compiled = 0
        torpor.metrics.reset()
        yield


def _step(put: Put, size: int) -> None:
    x = put(torch.ones(size))
    assert_same(x * 2 + 1, torch.full((size,), 3.0))
    torpor.sync(wait=True)


def test_a_graph_is_compiled_when_it_was_met_often_enough(put: Put) -> None:
    compiled = []
    for _ in range(5):
        _step(put, 3)
        compiled.append(Slow.compiled)
    assert compiled[0] == compiled[1] == 0
    assert compiled[2] > 0
    assert compiled[2] == compiled[4]


def test_ever_new_graphs_are_never_compiled(put: Put) -> None:
    for size in range(1, 6):
        _step(put, size)
    assert Slow.compiled == 0
    assert torpor.metrics.counters()["InterpretedGraph"] >= 5
    assert "UncachedCompile" not in torpor.metrics.counters()


def test_the_switch_overrides_the_backend(put: Put, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torpor.config, "compile_after", 0)
    _step(put, 3)
    assert Slow.compiled > 0


def test_numbers_that_change_are_numbers_for_the_reference_too(
    put: Put, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchscript takes run-time numbers as data; the reference, which runs first, does not."""
    monkeypatch.setattr(torpor.config, "compile_after", 3)
    with torpor.using("torchscript"):
        x = put(torch.ones(3))
        for step in range(6):
            tensors = [x.clone(), x.clone()]
            torch._foreach_mul_(tensors, 0.1 + step)
            assert_same(tensors[0], torch.ones(3) * (0.1 + step))
            torpor.sync(wait=True)
    assert torpor.metrics.counters()["ScalarsPromoted"] >= 1
