"""`set_` onto memory that others look at, and what addresses tell: eager's, wherever it is lazy."""

import copy
import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
from torch import nn

import torpor
from tests.comparison import Put, agree
from torpor.errors import UnsupportedError

Y = torch.arange(8.0)
X = torch.zeros(6)


def _written_behind(x: Any, y: Any) -> Any:
    x.set_(y.untyped_storage(), 0, (2,), (1,))
    y.zero_()
    y.add_(5)
    return x, y


def _written_before(x: Any, y: Any) -> Any:
    x.set_(y.untyped_storage(), 3, (2, 2), (2, 1))
    x.mul_(10)
    return x, y


def _through_a_view(x: Any, y: Any) -> Any:
    part = y[2:6]
    x.set_(part.untyped_storage(), part.storage_offset(), (2,), (2,))
    part.neg_()
    return x, y


def _all_of_it(x: Any, y: Any) -> Any:
    x.set_(y.untyped_storage())
    x.add_(1)
    return x, y


def _another_dtype(x: Any, y: Any) -> Any:
    words = torch.empty(0, dtype=torch.int32, device=x.device)
    words = torpor.lazy(words) if torpor.is_lazy(x) else words
    words.set_(y.untyped_storage(), 1, (3,), (2,))
    y.mul_(2)
    words.zero_()
    return words, y


def _of_a_tensor(x: Any, y: Any) -> Any:
    x.set_(y)
    x[0] = 100
    return x, y


def _window_of_a_tensor(x: Any, y: Any) -> Any:
    x.set_(y[1:], 2, (2,), (3,))
    x.fill_(-1)
    return x, y


def _larger(x: Any, y: Any) -> Any:
    x.set_(y.untyped_storage(), 4, (7,), (1,))
    x.fill_(3)
    return x, y, y.untyped_storage().nbytes()


def _older_views(x: Any, y: Any) -> Any:
    view = x.view(2, 3)[0]
    x.add_(1)
    x.set_(y.untyped_storage(), 0, (2,), (1,))
    x.add_(1)
    view.add_(10)
    return x, y, view


def _late(x: Any, y: Any) -> Any:
    memory = y.untyped_storage()
    y.add_(1)
    x.set_(memory, 0, (3,), (1,))
    y.add_(1)
    return x, y


def _chain(x: Any, y: Any) -> Any:
    z = x.clone()
    x.set_(y.untyped_storage(), 0, (4,), (2,))
    z.set_(x.untyped_storage(), 1, (2,), (1,))
    z.copy_(x[2:])
    return x, y, z


def _typed(x: Any, y: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        x.set_(y.storage(), 1, (3,))
    y.add_(1)
    return x, y


def _shallow_copy(x: Any, y: Any) -> Any:
    torch.ops.aten.shallow_copy_data_(x, y)
    y.add_(3)
    x[0] = 9
    return x, y


SHARING = {
    f.__name__.strip("_"): f
    for f in (
        _written_behind, _written_before, _through_a_view, _all_of_it, _another_dtype,
        _of_a_tensor, _window_of_a_tensor, _larger, _older_views, _late, _chain, _typed,
    )
}  # fmt: skip
if hasattr(torch.ops.aten, "shallow_copy_data_"):  # from torch 2.15 on: compiled `x.data = y`
    SHARING["shallow_copy"] = _shallow_copy


@pytest.mark.parametrize("name", SHARING)
def test_a_tensor_set_to_a_storage_shares_its_memory(put: Put, name: str) -> None:
    agree(put, SHARING[name], X, Y)


@pytest.mark.parametrize("name", SHARING)
def test_memory_stays_shared_across_cuts(put: Put, name: str) -> None:
    def program(x: Any, y: Any) -> Any:
        given = SHARING[name](x, y)
        torpor.sync()
        y.add_(7)
        given[0].mul_(2)
        torpor.sync()
        return given

    agree(put, program, X, Y)


@pytest.mark.parametrize(
    ("offset", "size", "stride"), [(-1, (2,), (1,)), (0, (2,), (-1,)), (0, (2, 2), (1,))]
)
def test_what_eager_refuses_is_refused(put: Put, offset: int, size: Any, stride: Any) -> None:
    for x, y in ((X.clone(), Y.clone()), (put(X), put(Y))):
        with pytest.raises(RuntimeError):
            x.set_(y.untyped_storage(), offset, size, stride)


def test_another_dtype_of_a_tensor_is_refused(put: Put) -> None:
    with pytest.raises(RuntimeError, match="Could not set tensor of type double to a tensor of"):
        put(X).set_(put(Y.double()))


def test_memory_of_no_tensor_is_taken_as_it_is_and_shared_among_lazy_tensors(
    concrete: Put,
) -> None:
    memory = Y.clone().untyped_storage()
    one = concrete(X).set_(memory, 0, (4,), (1,))
    other = concrete(X).set_(memory, 2, (4,), (1,))
    one.zero_()
    assert other.tolist() == [0.0, 0.0, 4.0, 5.0]
    assert torch.equal(torch.empty(0).set_(memory), Y)


ONTO_PLAIN = {
    "storage": lambda x, plain: x.set_(plain.untyped_storage(), 0, (2,), (1,)),
    "all_of_it": lambda x, plain: x.set_(source=plain.untyped_storage()),
    "tensor": lambda x, plain: x.set_(plain),
    "window": lambda x, plain: x.set_(plain, 1, (2,), (1,)),
    "view": lambda x, plain: x.set_(plain[2:].untyped_storage()),
}


@pytest.mark.parametrize("name", ONTO_PLAIN)
def test_memory_of_a_plain_tensor_is_refused(concrete: Put, name: str) -> None:
    x, plain = concrete(X), Y.clone()
    with pytest.raises(UnsupportedError, match=r"torpor\.lazy\(plain\)"):
        ONTO_PLAIN[name](x, plain)
    assert torch.equal(torpor.eager(x), X)


def test_memory_of_a_plain_tensor_that_was_made_lazy_is_shared(concrete: Put) -> None:
    y = concrete(Y)
    x = concrete(X).set_(y.untyped_storage(), 0, (2,), (1,))
    y.add_(1)
    assert x.tolist() == [1.0, 2.0]


def test_memory_of_another_device_is_refused(virtual: Put) -> None:
    with pytest.raises(RuntimeError, match="different device"):
        virtual(X).set_(Y.untyped_storage())


def test_a_plain_tensor_does_not_get_the_memory_of_a_lazy_one(concrete: Put) -> None:
    with pytest.raises((UnsupportedError, RuntimeError)):
        X.clone().set_(concrete(Y))


def test_addresses_are_equal_where_memory_is_shared(put: Put) -> None:
    y = put(Y)
    z = put(X).set_(y.untyped_storage(), 2, (2,), (1,))
    assert y.untyped_storage().data_ptr() == z.untyped_storage().data_ptr()
    assert y.untyped_storage()._cdata == z.untyped_storage()._cdata
    assert y[2:].data_ptr() == z.data_ptr()
    assert y.untyped_storage().nbytes() == 32


def test_addresses_differ_where_memory_is_not_shared(put: Put) -> None:
    y = put(Y)
    twin = copy.deepcopy(y)
    layers = put(
        nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16), 2, enable_nested_tensor=False)
    )
    tensors = [y, twin, *layers.parameters()]
    assert len({t.untyped_storage().data_ptr() for t in tensors}) == len(tensors)
    assert len({t.data_ptr() for t in tensors}) == len(tensors)
    y.untyped_storage()
    twin.add_(1)
    assert torch.equal(torpor.eager(y).cpu(), Y)


def test_who_asks_for_memory_keeps_nothing_alive(put: Put) -> None:
    y = put(Y) + 1
    y.untyped_storage()
    seen = weakref.ref(y._lazy_storage)
    del y
    gc.collect()
    assert seen() is None


def test_memory_lives_as_long_as_its_storage_object(put: Put) -> None:
    y = put(Y)
    memory = y.untyped_storage()
    y.add_(1)
    del y
    torpor.sync()
    assert put(X).set_(memory, 0, (2,), (1,)).tolist() == [1.0, 2.0]
