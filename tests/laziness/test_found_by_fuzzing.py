"""Programs that random ones were reduced to: each once differed from eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torpor
from tests.comparison import Put, agree, raised_by

pytestmark = [
    pytest.mark.filterwarnings("ignore:An output with one or more elements was resized"),
]


def refused_alike(put: Put, program: Callable[..., Any], *inputs: Tensor) -> None:
    """Eager refuses the program, and so does recording it, before anything is read."""
    expected = raised_by(lambda: program(*[one.clone() for one in inputs]))
    with pytest.raises(type(expected)):
        program(*[put(one) for one in inputs])


# --- memory that grows ---------------------------------------------------------------------------


def test_who_looks_at_no_elements_does_not_see_memory_grow(put: Put) -> None:
    def program(x: Tensor) -> Any:
        y = x.detach()
        y.resize_(1, 2).fill_(3.0)
        return x, y, x + 1

    agree(put, program, torch.zeros(2, 0, 2))


def test_memory_that_has_grown_is_still_shared(put: Put) -> None:
    def program(x: Tensor) -> Any:
        y, z = x.detach(), x.view(0, 1)
        y.resize_(4).fill_(2.0)
        torpor.sync()
        z.resize_(3).add_(1)
        x.as_strided((2,), (1,), 2).add_(10)
        return x, y, z

    agree(put, program, torch.zeros(0))


def test_memory_grows_for_another_dtype(put: Put) -> None:
    def program(x: Tensor) -> Any:
        y = x.view(torch.int16)
        y.resize_(8).fill_(1)
        x.resize_(3)
        return x, y, x + 1

    agree(put, program, torch.zeros(0, 4))


def test_what_was_there_stays_when_memory_grows_for_another_dtype(put: Put) -> None:
    """Twenty bytes are no whole number of doubles."""

    def program(x: Tensor) -> Any:
        y = x[:4].view(torch.float64)
        y.resize_(3)[2:].fill_(0.0)
        return x[:4], y[:2], x.view(torch.int32)[4:] * 0, x[4:].isfinite()

    agree(put, program, torch.arange(5.0))
    x = put(torch.arange(5.0))
    held = x.detach()
    x[:4].view(torch.float64).resize_(3)
    assert torch.equal(held.detach().cpu(), torch.arange(5.0))


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32, torch.float64, torch.complex64])
def test_a_view_of_another_dtype_is_resized(dtype: torch.dtype, put: Put) -> None:
    def program(x: Tensor) -> Any:
        y, z = x.view(dtype), x.view(dtype)
        y.resize_(5, 2).fill_(1)
        torch.sum(torch.ones(3, 9, dtype=dtype, device=x.device), 0, out=z)
        return y, z, x

    agree(put, program, torch.zeros(2, 4))


def test_a_conjugate_is_resized(put: Put) -> None:
    agree(put, lambda x: x.conj().resize_(2), torch.randn(3, dtype=torch.complex64))


def test_windows_that_keep_their_bits(put: Put) -> None:
    def program(x: Tensor) -> Any:
        y = x.conj().imag
        z = y.as_strided((2,), (1,), 1)
        z.add_(5)
        return x, y, z

    agree(put, program, torch.randn(3, dtype=torch.complex64))


def test_out_at_an_offset_of_no_memory(put: Put) -> None:
    def program(x: Tensor, new: Tensor) -> Any:
        y = x.as_strided((0,), (1,), 2)
        torch.add(new, 1, out=y)
        return x, y

    agree(put, program, torch.zeros(0), torch.arange(3.0))


@pytest.mark.parametrize("shape", [(0,), (0, 3), (3,)])
def test_a_window_of_no_elements_anywhere(shape: tuple[int, ...], put: Put) -> None:
    def program(x: Tensor) -> Any:
        y = x.as_strided((0, 2), (1, 1), 5)
        y.fill_(1)
        return x, y + 1

    agree(put, program, torch.zeros(shape))


def test_negative_strides_are_refused(put: Put) -> None:
    refused_alike(put, lambda x: x.as_strided((2, 2), (-1, 1), 1), torch.zeros(3))


# --- writes through views ------------------------------------------------------------------------


def test_a_view_of_a_view_that_was_looked_at_in_between(put: Put) -> None:
    """The memory holds what it held before; the view in the middle last showed something else."""

    def program(x: Tensor, a: Tensor, b: Tensor) -> Any:
        x.copy_(a)
        middle = x[:6]
        inner = middle[1:3]
        x.copy_(b)
        seen = middle + 0
        x.copy_(a)
        inner.add_(1000)
        return x, middle, inner, seen

    agree(put, program, torch.zeros(8), torch.arange(8.0), torch.arange(8.0) + 100)


def test_writes_through_a_view_of_a_view_reach_all(put: Put) -> None:
    def program(x: Tensor) -> Any:
        middle = x[:6]
        inner = middle[1:3]
        inner.add_(1)
        inner.mul_(3)
        seen = middle.clone()
        middle.add_(1)
        inner.add_(1)
        x.add_(1)
        inner.add_(5)
        return x, middle, inner, seen

    agree(put, program, torch.arange(8.0))


def test_out_is_a_view_whose_memory_was_written_to(put: Put) -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        part = x[:2]
        x.add_(1)
        torch.cumsum(y, 0, out=part)
        return x, part

    torpor.metrics.reset()
    agree(put, program, torch.zeros(3, 3), torch.arange(6.0).view(2, 3))
    assert not torpor.metrics.counters().get("Fallback")


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.view(16)[1:].copy_(x.view(16)[:-1]),
        lambda x: x[:3].copy_(x[1:]),
        lambda x: x.copy_(x.t()),
        lambda x: x.copy_(x[0]),
        lambda x: x.view(torch.int32)[:2].copy_(x[1:3]),
        lambda x: x.__setitem__(slice(1, None), x[:-1]),
    ],
    ids=("shift", "rows", "transposed", "one row", "dtype", "assigned"),
)
def test_copies_within_one_memory_are_refused(copy: Callable[[Tensor], Any], put: Put) -> None:
    refused_alike(put, copy, torch.randn(4, 4))


@pytest.mark.parametrize(
    "copy",
    [
        lambda x: x.copy_(x),
        lambda x: x[:].copy_(x),
        lambda x: x[:2].copy_(x[2:]),
        lambda x: x[0].copy_(x[:, 3]),
        lambda x: x[:, :2].copy_(x[:, 2:]),
        lambda x: x[:0].copy_(x[1:1]),
    ],
    ids=("itself", "all", "halves", "column", "columns", "none"),
)
def test_copies_within_one_memory(copy: Callable[[Tensor], Any], put: Put) -> None:
    def program(x: Tensor) -> Tensor:
        copy(x)
        return x

    agree(put, program, torch.randn(4, 4))


# --- what eager refuses for its types ------------------------------------------------------------


@pytest.mark.parametrize(
    "call",
    [
        torch.sort,
        torch.argsort,
        lambda x: x.topk(2),
        lambda x: x.kthvalue(1),
        torch.median,
        torch.nanmedian,
        torch.mode,
        lambda x: x.cummax(0),
        torch.max,
        torch.argmax,
        lambda x: x.amax(0),
        torch.aminmax,
        torch.nansum,
        torch.nn.functional.hardswish,
        lambda x: torch.histc(x),
    ],
)
def test_complex_numbers_where_eager_takes_none(call: Callable[[Tensor], Any], put: Put) -> None:
    refused_alike(put, call, torch.randn(4, 4, dtype=torch.complex64))
    refused_alike(put, call, torch.randn(80, 80, dtype=torch.complex64))


def test_complex_numbers_in_a_window_of_several(put: Put) -> None:
    """Here the kernel has to be tried on the very sizes: one element is too few for it."""
    pool = torch.nn.AvgPool2d(2)
    refused_alike(put, pool, torch.randn(1, 4, 4, dtype=torch.complex64))


@pytest.mark.parametrize("call", [torch.std, torch.var, lambda x: torch.logcumsumexp(x, 0)])
def test_integers_where_eager_takes_none(call: Callable[[Tensor], Any], put: Put) -> None:
    refused_alike(put, call, torch.ones(4, 4, dtype=torch.int64))


@pytest.mark.parametrize("shape", [(0,), (3,), (5, 2)])
@pytest.mark.parametrize(
    "call",
    [
        lambda x, out: torch.clamp(x, 0, 1, out=out),
        lambda x, out: torch.index_select(x, 0, x.long(), out=out),
        lambda x, out: torch.arange(3.5, out=out, device=out.device),
    ],
    ids=("clamp", "index_select", "arange"),
)
def test_out_of_a_dtype_that_eager_refuses(
    call: Callable[..., Any], shape: tuple[int, ...], put: Put
) -> None:
    refused_alike(put, call, torch.ones(4), torch.zeros(shape, dtype=torch.complex64))


def test_out_with_many_elements_in_one_place(put: Put) -> None:
    def program(x: Tensor, y: Tensor) -> Any:
        return torch.add(y, 1, out=x.expand(2, 9, 8))

    refused_alike(put, program, torch.zeros(9, 8), torch.ones(10))
    refused_alike(put, program, torch.zeros(9, 8), torch.ones(2, 9, 8))


def test_a_view_that_no_strides_express(put: Put) -> None:
    refused_alike(put, lambda x: x.expand(8, 1, 3).view(2, 12), torch.zeros(1, 3))


@pytest.mark.parametrize("fill", ["index_fill", "index_fill_"])
def test_an_index_into_nothing(fill: str, put: Put) -> None:
    def program(x: Tensor, index: Tensor) -> Any:
        return getattr(x, fill)(0, index, 1.0)

    refused_alike(put, program, torch.zeros(0), torch.tensor([0]))
    agree(put, program, torch.zeros(0), torch.zeros(0, dtype=torch.int64))


def test_a_conjugate_that_is_needed_again_after_a_read(put: Put) -> None:
    """It is a view: what is kept for later is the memory it looks at."""

    def parts(real: Tensor, imaginary: Tensor) -> list[Tensor]:
        c = torch.complex(real, imaginary)
        return [c.conj(), c.conj().imag, c.conj().t() * 2, (-c.conj().imag).exp()]

    one, other = torch.randn(4, 6), torch.randn(4, 6)
    expected = parts(one, other)
    for actual, wanted in zip(parts(put(one), put(other)), expected, strict=True):
        assert torch.equal(actual.cpu().resolve_conj(), wanted.resolve_conj())


def test_an_op_that_returns_several_lists_runs_eagerly() -> None:
    def call(move: Callable[[Tensor], Tensor]) -> Any:
        ones, zeros = (lambda: [move(torch.ones(3))]), (lambda: [move(torch.zeros(3))])
        return torch.ops.aten._fused_adam.default(
            ones(), ones(), zeros(), zeros(), [], [move(torch.ones(()))], lr=0.1, beta1=0.9,
            beta2=0.99, weight_decay=0.0, eps=1e-8, amsgrad=False, maximize=False,
        )  # fmt: skip

    for wanted, found in zip(call(lambda x: x), call(lambda x: x.to("lazy")), strict=True):
        assert [torch.equal(f.cpu(), w) for f, w in zip(found, wanted, strict=True)] == [
            True
        ] * len(wanted)
