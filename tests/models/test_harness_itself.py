"""The judgement on a backend with kernels of its own finds what it must find."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests import backend_under_test

from . import harness
from .zoo import ZOO


@pytest.fixture(autouse=True)
def _own_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backend_under_test, "BIT_EXACT", False)


@pytest.fixture
def run() -> harness.Run:
    return harness.train(ZOO["bert"], "eager")


def test_masks_of_lazy_and_eager_training_are_seen_and_equal(run: harness.Run) -> None:
    lazy = harness.train(ZOO["bert"], "lazy")
    masks = [mask for name, mask in lazy.drawn.items() if name.startswith("mask")]
    assert masks
    assert all((mask == 0).any() and (mask == 1).any() for mask in masks)
    assert harness.differences(run, lazy) == []


@pytest.mark.parametrize(("factor", "found"), [(1 + 1e-6, 0), (1 + 1e-3, 1), (float("nan"), 1)])
def test_a_loss_may_be_off_by_rounding_only(run: harness.Run, factor: float, found: int) -> None:
    losses = [run.losses[0] * factor, *run.losses[1:]]
    assert len(harness.differences(run, dataclasses.replace(run, losses=losses))) == found


def test_one_element_of_a_mask_counts(run: harness.Run) -> None:
    mask = run.drawn["mask 1"].clone()
    kept = (mask == 1).nonzero()[0]
    mask[tuple(kept)] = 0
    other = dataclasses.replace(run, drawn={**run.drawn, "mask 1": mask})
    assert harness.differences(run, other) == [f"mask 1: 1 of {mask.numel()} differ"]


def test_a_mask_too_few_and_another_state_of_the_generator_count(run: harness.Run) -> None:
    drawn = {**run.drawn, "generator": torch.zeros_like(run.drawn["generator"])}
    del drawn["mask 0"]
    found = harness.differences(run, dataclasses.replace(run, drawn=drawn))
    assert [text.partition(":")[0] for text in found] == ["draws", "generator"]
