"""Causes that drawn programs have shown, each as the smallest program that shows it."""

from typing import Any

import pytest
import torch

import torpor
from tests.comparison import Put, agree

X = torch.arange(12.0).view(3, 4)


def _lists(one: Any, other: Any) -> Any:
    torch._foreach_add_([one, other], [other, one])
    return one, other


def _lists_of_views(one: Any, other: Any) -> Any:
    torch._foreach_mul_([one[0], other], [other[0], one])
    return one, other


def _lists_and_others(one: Any, other: Any) -> Any:
    torch._foreach_add_([one, other], [one, other])
    return one, other


@pytest.mark.parametrize("program", [_lists, _lists_of_views, _lists_and_others])
def test_lists_that_share_tensors_are_gone_through_item_by_item(put: Put, program: Any) -> None:
    agree(put, program, X, X + 1)


def _grown(column: Any, x: Any) -> Any:
    return torch.add(column, x, out=column)


I64 = torch.int64


def _first(like: Any, count: int) -> Any:
    return torch.zeros(count, dtype=I64, device=like.device)


def _put(x: Any, values: Any) -> Any:
    return x.clone().index_put_((_first(x, 2),), values, accumulate=True)


def _by_itself(index: Any) -> Any:
    return index.scatter_(0, index, 1)


REFUSED = {
    "max_pool1d_of_integers": lambda x: torch.nn.functional.max_pool1d(x[None].short(), 2),
    "out_grows_while_it_is_read": lambda x: _grown(x[:, :1].clone(), x),
    "where_out_grows": lambda x: torch.where(x[0, 0] > 0, x[0, 0], x, out=x[0, 0]),
    "max_of_nothing": lambda x: x[:0].max(0),
    "argmax_of_nothing": lambda x: x[:0].argmax(),
    "set_to_another_dtype": lambda x: x.set_(x.double()),
    "put_into_a_number": lambda x: _put(x[0, 0], x[:1, :1]),
    "put_another_dtype": lambda x: _put(x[0], x[0, :2].double()),
    "put_another_size": lambda x: _put(x[0] > 1, x[:1, :3].expand(2, 1, 3) > 1),
    "put_apart_another_dtype": lambda x: x.index_put((_first(x, 2),), x[0].double()),
    "put_apart_another_size": lambda x: x.index_put((_first(x, 2),), x[0, :3]),
    "set_another_size": lambda x: x.__setitem__(_first(x, 2), x[0, :3]),
    "add_itself": lambda x: x.index_add_(0, _first(x, 3), x),
    "add_itself_by_another_name": lambda x: x.index_add_(0, _first(x, 3), x.type_as(x)),
    "copy_itself": lambda x: x.index_copy_(0, _first(x, 3), x),
    "scatter_itself": lambda x: x[0].scatter_(0, _first(x, 4), x[0]),
    "scatter_by_itself": lambda x: _by_itself(_first(x, 4)),
    "put_itself": lambda x: x.index_put_((_first(x, 3),), x),
    "gather_into_itself": lambda x: torch.gather(x, 0, torch.zeros_like(x, dtype=I64), out=x),
    "select_into_itself": lambda x: torch.index_select(x, 0, _first(x, 3), out=x),
    "index_of_nothing": lambda x: x[:0][[0, -1]],
    "select_of_nothing": lambda x: x[:0].index_select(0, _first(x, 1)),
    "gather_of_nothing": lambda x: x[:0].gather(0, _first(x, 1)[None]),
    "embedding_of_nothing": lambda x: torch.nn.functional.embedding(_first(x, 1), x[:0]),
    "scatter_to_nothing": lambda x: x[:0].scatter_add(0, _first(x, 1)[None], x),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_eager_refuses_is_refused_at_its_line(put: Put, name: str) -> None:
    with pytest.raises(Exception) as eager:  # whichever: it is compared
        REFUSED[name](X.clone())
    with pytest.raises(eager.type):
        REFUSED[name](put(X))


def test_a_transform_of_no_rows_is_eagers(put: Put) -> None:
    """Eager's own library may refuse it."""
    try:
        expected = torch.fft.fft(X[:0])
    except RuntimeError:
        with pytest.raises(RuntimeError):
            torch.fft.fft(put(X)[:0])
    else:
        assert torch.fft.fft(put(X)[:0]).shape == expected.shape


def _masked(x: Any) -> Any:
    windows = x.unfold(0, 2, 1)
    windows[windows > 4] *= 2
    return x, windows


def _copied_onto_itself(x: Any) -> Any:
    repeated = x[:, -1:].expand(3, 4)
    return repeated.view_as(repeated).copy_(repeated[:]), x


ACCEPTED = {
    "masked_windows": _masked,
    "copied_onto_itself": _copied_onto_itself,
    "none_of_nothing": lambda x: (x[:0][_first(x, 0)], x[:0].index_select(0, _first(x, 0))),
    "nothing_added_to_nothing": lambda x: x[:0].index_add(0, _first(x, 0), x[:0]),
    "divided_by_itself": lambda x: (x + 1).remainder_(x + 1),
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_eager_takes_is_taken(put: Put, name: str) -> None:
    agree(put, ACCEPTED[name], X)


LAYOUTS = {
    "rows": lambda x: x,
    "columns": lambda x: x.t().contiguous().t(),
    "column": lambda x: x[:1].adjoint(),
    "batch": lambda x: x.expand(2, 3, 4).contiguous(),
}
ELEMENTWISE = {
    "copysign": torch.copysign,
    "add": torch.add,
    "mul": torch.mul,
    "maximum": torch.maximum,
    "atan2": torch.atan2,
    "gt": torch.gt,
    "masked_fill": lambda a, b: a.masked_fill(b > 2, 2),
    "fmod": torch.fmod,
    "hypot": torch.hypot,
    "where": lambda a, b: torch.where(a > 2, a, b),
    "true_divide": torch.true_divide,
}


@pytest.mark.parametrize("name", ELEMENTWISE)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int16, torch.bool])
def test_strides_of_operands_of_two_dtypes_are_eagers(
    virtual: Put, name: str, layout: str, dtype: torch.dtype
) -> None:
    call = ELEMENTWISE[name]
    for other in LAYOUTS.values():
        one, two = LAYOUTS[layout](X), other(X.to(dtype))
        try:
            expected = call(one, two)
        except RuntimeError:
            continue
        lazily = call(LAYOUTS[layout](virtual(X)), other(virtual(X.to(dtype))))
        assert lazily.dtype == expected.dtype
        assert lazily.stride() == expected.stride(), f"{one.stride()} {two.stride()}"


@pytest.mark.parametrize(
    "look",
    [torch.diagonal, lambda x: x[:, -1], lambda x: x.t(), lambda x: x[0].expand(2, 4)],
)
def test_a_view_that_leaves_the_device_keeps_its_strides(virtual: Put, look: Any) -> None:
    expected, lazily = look(X).cpu(), look(virtual(X)).cpu()
    assert not torpor.is_lazy(lazily)
    assert lazily.stride() == expected.stride()
    assert torch.equal(lazily, expected)


def _swapped(x: Any) -> Any:
    x = x.clone()
    x.swapaxes_(0, -1)
    return x.tril()


FREE = {
    "tril": torch.tril,
    "triu": torch.triu,
    "swapaxes_": _swapped,
    "masked_fill": lambda x: x.masked_fill(x > 1, 2),
    "sort": torch.sort,
    "flip": lambda x: x.flip(0),
    "frexp": torch.frexp,
    "renorm": lambda x: x.renorm(2, 0, 1.0),
    "abs": lambda x: x.cfloat().abs(),
    "angle": lambda x: x.cfloat().angle(),
    "diag_embed": torch.diag_embed,
    "index_put": lambda x: x.index_put((_first(x, 1),), x[:1]),
    "index_fill": lambda x: x.index_fill(0, _first(x, 1), 2),
    "prelu": lambda x: torch.nn.functional.prelu(x, x.flatten()[1]),
}
SMALL_ONES = {
    "log_softmax": lambda x: x.log_softmax(-1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[-1:]),
}


def _strided(result: Any) -> Any:
    results = result if isinstance(result, tuple) else (result,)
    return [(r.shape, r.stride()) for r in results]


@pytest.mark.parametrize("name", [*FREE, *SMALL_ONES])
def test_strides_of_dimensions_of_size_1_are_eagers(put: Put, name: str) -> None:
    call = {**FREE, **SMALL_ONES}[name]
    lengths = (4, 5000) if name in FREE and name != "diag_embed" else (4,)
    for length in lengths:
        x = torch.arange(float(length))
        for one in (x.view(1, -1).t(), x.view(-1, 1).t(), x.view(-1, 1, 2).transpose(0, 1)):
            lazy = put(x).as_strided(one.shape, one.stride())
            assert _strided(call(lazy)) == _strided(call(one))
