"""`torpor.pad`: sizes that change, padded to those of few graphs."""

from __future__ import annotations

from collections.abc import Sequence

import torch

import torpor
from torpor.backend import registry
from torpor.backends.reference import ReferenceBackend


class Eights(ReferenceBackend):
    def bucket_sizes(self, sizes: Sequence[int]) -> list[int]:
        return [-(-size // 8) * 8 for size in sizes]


def test_dimensions_are_padded_to_powers_of_two() -> None:
    x = torch.arange(15.0).view(3, 5).to("lazy")
    padded = torpor.pad(x, 0, -1, value=7)
    assert padded.shape == (4, 8)
    assert torch.equal(padded[:3, :5].cpu(), torch.arange(15.0).view(3, 5))
    assert padded[3].tolist() == [7.0] * 8
    assert torpor.pad(x).shape == (3, 5)


def test_the_backend_says_which_sizes_there_are() -> None:
    registry.activate(Eights())
    sizes = {tuple(torpor.pad(torch.ones(2, n).to("lazy"), 1).shape) for n in range(1, 17)}
    torpor.use("reference")
    assert sizes == {(2, 8), (2, 16)}


def test_plain_tensors_are_padded_alike() -> None:
    assert torpor.pad(torch.ones(3), 0).tolist() == [1.0, 1.0, 1.0, 0.0]
