"""A mistake is reported when the op is recorded: eager's exception type, the user's line."""

import re
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import torpor
from tests.comparison import Put, agree, assert_same, line_below, message, raised_by
from tests.instrumented_ops import counted, runs

X = torch.arange(24.0).view(4, 6)

MISTAKES: dict[str, Callable[[Tensor], object]] = {
    "view": lambda x: x.view(5, 5),
    "view_of_a_transpose": lambda x: x.t().view(-1),
    "reshape": lambda x: x.reshape(5, 5),
    "view_dtype": lambda x: x[:, :3].view(torch.complex64),
    "broadcast": lambda x: x + x[:3],
    "matmul": lambda x: x @ x,
    "mm_of_vector": lambda x: x.mm(x[0]),
    "bmm": lambda x: x.bmm(x),
    "matmul_dtype": lambda x: x @ x.t().double(),
    "linear": lambda x: F.linear(x, x[:, :5]),
    "conv": lambda x: F.conv2d(x[None, None], x[None, :, :, None]),
    "cat": lambda x: torch.cat([x, x[:, :2]]),
    "cat_empty_list": lambda x: torch.cat([]) if x.dim() else x,
    "stack": lambda x: torch.stack([x, x[0]]),
    "dim_out_of_range": lambda x: x.sum(5),
    "softmax_dim": lambda x: x.softmax(2),
    "select_out_of_range": lambda x: x[7],
    "select_dim": lambda x: x.select(3, 0),
    "too_many_indices": lambda x: x[0, 0, 0],
    "narrow": lambda x: x.narrow(0, 2, 9),
    "transpose_dim": lambda x: x.transpose(0, 4),
    "permute_repeats": lambda x: x.permute(0, 0),
    "squeeze_dim": lambda x: x.squeeze(3),
    "unflatten": lambda x: x.unflatten(1, (4, 2)),
    "expand": lambda x: x.expand(3, 7),
    "split_sizes": lambda x: x.split([1, 2]),
    "chunk_zero": lambda x: x.chunk(0),
    "gather_dtype": lambda x: x.gather(0, x),
    "index_dtype": lambda x: x[x],
    "embedding_dtype": lambda x: F.embedding(x, x),
    "cross_entropy": lambda x: F.cross_entropy(x, x[0, :3].long()),
    "bitwise_of_float": lambda x: x & x,
    "in_place_dtype": lambda x: x.long().add_(0.5),
    "in_place_broadcast": lambda x: x[0].add_(x),
    "in_place_expand": lambda x: x[:1].expand(3, 6).add_(1),
    "copy_shape": lambda x: x.copy_(x[:3]),
    "setitem_shape": lambda x: x.__setitem__(0, torch.ones_like(x[0, :4])),
    "masked_fill_mask": lambda x: x.masked_fill(x, 1.0),
    "mask_shape": lambda x: x[torch.ones_like(x[:2], dtype=torch.bool)],
    "where_shape": lambda x: torch.where(x > 0, x, x[:3]),
    "item_of_many": lambda x: x.item(),
    "bool_of_many": lambda x: bool(x),
    "int_of_many": lambda x: int(x),
    "iterate_scalar": lambda x: list(x.sum()),
    "len_of_scalar": lambda x: len(x.sum()),
    "backward_of_many": lambda x: x.requires_grad_().exp().backward(),
    "grad_of_int": lambda x: x.long().requires_grad_(),
    "cholesky_shape": lambda x: torch.linalg.cholesky(x),
    "einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "pad": lambda x: F.pad(x, (1, 1, 1, 1, 1, 1)),
    "pool": lambda x: F.max_pool2d(x[None, None], 9),
    "interpolate": lambda x: F.interpolate(x, size=3),
    "layer_norm": lambda x: F.layer_norm(x, (5,)),
    "group_norm": lambda x: F.group_norm(x, 4),
    "batch_norm": lambda x: F.batch_norm(x[:1], None, None, training=True),
    "dropout_p": lambda x: F.dropout(x, 1.5),
    "one_hot_dtype": lambda x: F.one_hot(x),
    "topk": lambda x: x.topk(9),
    "kthvalue": lambda x: x.kthvalue(9),
    "unknown_keyword": lambda x: x.sum(nonsense=1),
    "wrong_type": lambda x: torch.add(x, "one"),
    "missing_argument": lambda x: torch.matmul(x),
    "negative_size": lambda x: x.new_zeros(-1),
    "repeat": lambda x: x.repeat(2),
    "movedim": lambda x: x.movedim(0, 5),
    "as_strided_out_of_memory": lambda x: x.as_strided((10, 10), (10, 1)),
    "out_dtype": lambda x: torch.add(x, 1, out=torch.empty_like(x, dtype=torch.int64)),
    "out_of_max_dtype": lambda x: torch.argmax(x, 1, out=torch.empty_like(x[:, 0])),
    "norm_of_int": lambda x: x.long().norm(),
    "mean_of_int": lambda x: x.long().mean(),
    "complex_compare": lambda x: torch.complex(x, x) > 0,
    "scatter_dims": lambda x: x.scatter(0, x[0].long(), 1.0),
    "lstm": lambda x: torch.lstm_cell(x, (x, x), x, x),
    "attention": lambda x: F.scaled_dot_product_attention(x, x[:, :3], x),
    "svd_of_vector": lambda x: torch.linalg.svd(x[0]),
    "solve": lambda x: torch.linalg.solve(x, x),
    "cross": lambda x: torch.linalg.cross(x, x),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_raises_eagers_exception_when_it_is_recorded(put: Put, name: str) -> None:
    expected = raised_by(lambda: MISTAKES[name](X.clone()))
    x = put(X)
    got = raised_by(lambda: MISTAKES[name](x))
    assert type(got) is type(expected), message(got)


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_told_with_eagers_numbers(put: Put, name: str) -> None:
    expected = raised_by(lambda: MISTAKES[name](X.clone()))
    x = put(X)
    got = message(raised_by(lambda: MISTAKES[name](x)))
    numbers = set(re.findall(r"\d+", str(expected).partition("\n")[0]))
    assert numbers <= set(re.findall(r"\d+", got)), f"{got}\nbut eager says\n{expected}"


@pytest.mark.parametrize("name", MISTAKES)
def test_tensors_are_as_they_were_after_a_mistake(put: Put, name: str) -> None:
    x = put(X)
    raised_by(lambda: MISTAKES[name](x))
    assert_same(x.detach(), X)
    assert_same(x.detach() + 1, X + 1)


def test_a_wrong_shape_names_the_users_line(put: Put) -> None:
    x = put(X)
    with pytest.raises(RuntimeError) as caught:
        line = line_below()
        x.view(5, 5)
    assert line in message(caught.value)


def test_a_wrong_shape_names_the_op(put: Put) -> None:
    x = put(X)
    with pytest.raises(RuntimeError) as caught:
        x.view(5, 5)
    assert "view" in message(caught.value)
    assert "24" in message(caught.value)


def test_a_wrong_shape_inside_torch_names_the_users_line_not_torchs(put: Put) -> None:
    model, x = put(nn.Linear(5, 2)), put(X)
    with pytest.raises(RuntimeError) as caught:
        line = line_below()
        model(x)
    assert line in message(caught.value)
    assert "torch/nn" not in message(caught.value).partition("recorded at")[2]


def test_a_mistake_inside_a_users_function_names_its_line(put: Put) -> None:
    def inner(t: Tensor) -> Tensor:
        inner.line = line_below()
        return t @ t

    x = put(X)
    error = raised_by(lambda: inner(x))
    assert inner.line in message(error)


def test_a_wrong_dtype_names_the_users_line(put: Put) -> None:
    x, y = put(X), put(X.t().double())
    with pytest.raises(RuntimeError) as caught:
        line = line_below()
        x @ y
    assert line in message(caught.value)


def test_a_mistake_in_an_in_place_op_names_the_users_line(put: Put) -> None:
    x = put(X)
    with pytest.raises(RuntimeError) as caught:
        line = line_below()
        x.add_(torch.ones_like(x)[:3])
    assert line in message(caught.value)


def test_a_mistake_runs_nothing(put: Put) -> None:
    pending = counted(put(X))
    raised_by(lambda: pending @ pending)
    assert torpor.is_pending(pending)
    assert runs() == 0


def test_a_cached_mistake_is_a_mistake_each_time(put: Put) -> None:
    x = put(X)
    for _ in range(3):
        assert type(raised_by(lambda: x.view(5, 5))) is RuntimeError


# --- devices ---------------------------------------------------------------------------------


def test_mixing_the_lazy_device_with_a_plain_tensor_is_refused(virtual: Put) -> None:
    x = virtual(X)
    with pytest.raises(RuntimeError, match="device") as caught:
        line = line_below()
        x + X
    assert line in message(caught.value)
    with pytest.raises(RuntimeError, match="device"):
        X @ x.t()


def test_a_plain_scalar_tensor_mixes_with_the_lazy_device(virtual: Put) -> None:
    scalar = torch.tensor(2.0)
    assert_same(virtual(X) * scalar, X * scalar)
    assert_same(scalar - virtual(X), scalar - X)


def test_mixing_two_lazy_devices_is_refused() -> None:
    x, y = X.to("lazy:0"), X.to("lazy:1")
    with pytest.raises(RuntimeError, match="device"):
        x + y


def test_a_model_and_its_input_on_different_devices_are_refused(virtual: Put) -> None:
    model = virtual(nn.Linear(6, 2))
    with pytest.raises(RuntimeError, match="device"):
        model(X)


def test_plain_and_concrete_lazy_tensors_mix(concrete: Put) -> None:
    lazy = concrete(X)
    result = lazy + X
    assert torpor.is_lazy(result)
    assert_same(result, X + X)
    assert_same(X @ lazy.t(), X @ X.t())
    assert_same(torch.cat([X, lazy]), torch.cat([X, X]))


def test_a_plain_tensor_written_with_lazy_values_has_them(concrete: Put) -> None:
    target = X.clone()
    target[0] = concrete(X)[1] * 2
    target.add_(concrete(X))
    expected = X.clone()
    expected[0] = X[1] * 2
    expected.add_(X)
    assert target.tolist() == expected.tolist()


def test_a_lazy_device_that_does_not_exist_is_refused() -> None:
    error = raised_by(lambda: torch.ones(2, device="lazy:999"))
    assert isinstance(error, (RuntimeError, IndexError))
    assert "lazy" in message(error)


def test_autocast_on_the_virtual_device_is_refused_clearly(virtual: Put) -> None:
    error = raised_by(lambda: torch.autocast("lazy").__enter__())
    assert isinstance(error, RuntimeError)


# --- Python's own mistakes -------------------------------------------------------------------


def test_an_unknown_attribute_is_an_attribute_error(put: Put) -> None:
    assert type(raised_by(lambda: put(X).no_such_thing)) is AttributeError


def test_a_users_own_exception_passes_through(put: Put) -> None:
    x = put(X)

    class Own(Exception):
        pass

    def hook(grad: Tensor) -> None:
        raise Own("from a hook")

    y = x.requires_grad_() * 2
    y.register_hook(hook)
    assert type(raised_by(lambda: y.sum().backward())) is Own
    agree(put, lambda t: t * 2, X)


def test_errors_are_exported() -> None:
    assert issubclass(torpor.errors.TorporError, Exception)
