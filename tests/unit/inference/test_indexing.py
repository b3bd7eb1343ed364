"""Sizes of what indices find, as eager finds it."""

from itertools import product

import pytest
import torch

from torpor.inference.indexing import indexed_shape

SHAPE = (2, 3, 4, 5)


@pytest.mark.parametrize("given", list(product((None, (), (6,), (7, 1)), repeat=3)))
def test_sizes_of_what_is_found_are_eagers(given: tuple[tuple[int, ...] | None, ...]) -> None:
    if given.count(None) == 3:
        assert indexed_shape(SHAPE, list(given)) is None
        return
    indices = [None if size is None else torch.zeros(size, dtype=torch.int64) for size in given]
    found = torch.ops.aten.index.Tensor(torch.zeros(SHAPE), indices)
    assert indexed_shape(SHAPE, list(given)) == tuple(found.shape)


def test_too_many_indices_and_sizes_that_do_not_fit_find_nothing() -> None:
    assert indexed_shape((2,), [(1,), (1,)]) is None
    assert indexed_shape((2, 2), [(2,), (3,)]) is None
