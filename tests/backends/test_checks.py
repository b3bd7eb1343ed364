"""Numbers that eager refuses are refused by compiled code too, with eager's exception type."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import torpor
from torpor.backends.inductor import runtime as inductor_runtime

pytestmark = pytest.mark.skipif(
    inductor_runtime.unavailable() is not None, reason=str(inductor_runtime.unavailable())
)


@pytest.fixture(autouse=True)
def on_inductor() -> Iterator[None]:
    with torpor.using("inductor", compile_after=0):
        yield


Place = Callable[[Any], Tensor]
NAN = float("nan")
PICTURE, TABLE, ROW = [[0.0, 1, 2], [3, 4, 5]], [[0.0, 1], [2, 3], [4, 5]], [0.0, 1, 2, 3]
TWO, COLUMN = [0, 5], [[0], [5]]
SINGULAR = [[0.0, 0], [0, 0]]

CASES: dict[str, Callable[[Place], Any]] = {
    "one_hot of a class too high": lambda p: F.one_hot(p([0, 50]), 5),
    "one_hot of a negative class": lambda p: F.one_hot(p([0, -1]), 5),
    "binary_cross_entropy above 1": lambda p: F.binary_cross_entropy(p([0.5, 7.0]), p([1.0, 1.0])),
    "binary_cross_entropy below 0": lambda p: F.binary_cross_entropy(p([0.5, -1.0]), p([1.0, 1.0])),
    "binary_cross_entropy of NaN": lambda p: F.binary_cross_entropy(p([0.5, NAN]), p([1.0, 1.0])),
    "binary_cross_entropy of a target": lambda p: F.binary_cross_entropy(
        p([0.5, 0.1]), p([1.0, 3.0])
    ),
    "repeat_interleave with a wrong size": lambda p: (
        torch.repeat_interleave(p(PICTURE), p([1, 2]), 0, output_size=9) + 1
    ),
    "repeat_interleave by a negative number": lambda p: (
        torch.repeat_interleave(p(PICTURE), p([-1, 2]), 0, output_size=1) + 1
    ),
    "nll_loss": lambda p: F.nll_loss(p(PICTURE), p([0, 3])),
    "nll_loss of a negative class": lambda p: F.nll_loss(p(PICTURE), p([0, -1])),
    "cross_entropy": lambda p: F.cross_entropy(p(PICTURE), p([0, 9])),
    "cross_entropy with smoothing": lambda p: F.cross_entropy(
        p(PICTURE), p([0, 9]), label_smoothing=0.1
    ),
    "embedding": lambda p: F.embedding(p([1, 9]), p(TABLE)),
    "embedding_bag": lambda p: F.embedding_bag(p([1, 9]), p(TABLE), p([0, 1])),
    "embedding_bag with offsets": lambda p: F.embedding_bag(p([1, 2]), p(TABLE), p([1, 2])),
    "gather": lambda p: p(PICTURE).gather(1, p(COLUMN)),
    "scatter": lambda p: p(PICTURE).scatter(1, p(COLUMN), 1.0),
    "scatter_add": lambda p: p(PICTURE).scatter_add(1, p(COLUMN), p([[1.0], [1.0]])),
    "scatter_reduce": lambda p: p(PICTURE).scatter_reduce(1, p(COLUMN), p([[1.0], [1.0]]), "amax"),
    "index_select": lambda p: p(PICTURE).index_select(1, p(TWO)),
    "index": lambda p: p(PICTURE)[:, p(TWO)],
    "index_put": lambda p: p(PICTURE).index_put((p(TWO),), p(1.0)),
    "take": lambda p: p(PICTURE).take(p([0, 9])),
    "put_": lambda p: p(PICTURE).put_(p([0, 9]), p([1.0, 2.0])),
    "index_fill": lambda p: p(PICTURE).index_fill(1, p(TWO), 1.0),
    "index_copy": lambda p: p(PICTURE).index_copy(1, p(TWO), p([[1.0, 1], [1, 1]])),
    "index_add": lambda p: p(PICTURE).index_add(1, p(TWO), p([[1.0, 1], [1, 1]])),
    "index_reduce": lambda p: p(PICTURE).index_reduce(1, p(TWO), p([[1.0, 1], [1, 1]]), "amax"),
    "bincount": lambda p: torch.bincount(p([1, -1])),
    "multinomial": lambda p: torch.multinomial(p([1.0, -1.0]), 1),
    "bernoulli": lambda p: torch.bernoulli(p([0.0, 2.0])),
    "max_unpool2d": lambda p: F.max_unpool2d(p([[[[0.0]]]]), p([[[[99]]]]), 2),
    "cholesky": lambda p: torch.linalg.cholesky(p([[-1.0, 0], [0, -1]])),
    "inv": lambda p: torch.linalg.inv(p(SINGULAR)),
    "solve": lambda p: torch.linalg.solve(p(SINGULAR), p([[1.0], [1]])),
    "floor_divide": lambda p: p([4, 2]) // p([1, 0]),
    "div that rounds": lambda p: torch.div(p([4, 2]), p([1, 0]), rounding_mode="trunc"),
    "remainder": lambda p: p([4, 2]) % p([1, 0]),
    "fmod": lambda p: torch.fmod(p([4, 2]), p([1, 0])),
    "pow": lambda p: torch.pow(p([4, 2]), p([1, -1])),
    "_assert_async": lambda p: (torch._assert_async((p([1.0]) > 5).all()), p(1))[1],
    "histc": lambda p: torch.histc(p([1.0, NAN])),
    "searchsorted": lambda p: torch.searchsorted(p(ROW), p(ROW), sorter=p([0, 1, 2, 9])),
    "multi_margin_loss": lambda p: F.multi_margin_loss(p(PICTURE), p([0, 9])),
    "segment_reduce": lambda p: torch.segment_reduce(p(ROW), "sum", lengths=p([1, 9])),
    "masked_scatter": lambda p: p(ROW).masked_scatter(p([True] * 4), p([1.0, 2.0])),
}


def _outcome(case: Callable[[Place], Any], place: Place) -> type[BaseException] | None:
    try:
        torch.as_tensor(case(place)).cpu()
    except Exception as error:
        return type(error)
    return None


ON_ONE_THREAD = {"repeat_interleave by a negative number"}
"""On several, eager's own kernel writes outside its memory before it refuses (torch 2.13)."""


@pytest.fixture
def as_many_threads_as_eager_can_take(name: str) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1 if name in ON_ONE_THREAD else before)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("as_many_threads_as_eager_can_take")
def test_compiled_code_refuses_what_eager_refuses(name: str) -> None:
    expected = _outcome(CASES[name], torch.tensor)
    found = _outcome(CASES[name], lambda data: torch.tensor(data).to("lazy"))
    assert found is expected
    if found is not None:
        with contextlib.suppress(found):  # what nobody was told of
            torpor.sync(wait=True)


def test_good_numbers_pass_the_checks() -> None:
    torch.manual_seed(0)
    x = torch.rand(4)
    for place in (lambda t: t, lambda t: t.to("lazy")):
        loss = F.binary_cross_entropy(place(x), place(x.round()))
        assert F.one_hot(place(torch.tensor([0, 4])), 5).cpu().tolist() == [
            [1, 0, 0, 0, 0], [0, 0, 0, 0, 1],
        ]  # fmt: skip
    torch.testing.assert_close(loss.cpu(), F.binary_cross_entropy(x, x.round()))


def test_a_window_that_leaves_its_memory_is_refused() -> None:
    x = torch.arange(4.0)
    with pytest.raises(RuntimeError):
        (x.as_strided((9,), (1,)) + 1).tolist()
    with pytest.raises(RuntimeError):
        (x.to("lazy").as_strided((9,), (1,)) + 1).tolist()
