"""Every way torch makes a tensor makes a lazy one."""

from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor, nn

import torpor
from tests.comparison import Put, agree, assert_same, plain
from torpor.backends.equality import same_bits

FACTORIES: dict[str, Callable[..., Tensor]] = {
    "zeros": lambda **k: torch.zeros(2, 3, **k),
    "zeros_of_nothing": lambda **k: torch.zeros(0, 3, **k),
    "zeros_scalar": lambda **k: torch.zeros((), **k),
    "ones": lambda **k: torch.ones(2, 3, **k),
    "full": lambda **k: torch.full((2, 3), 1.5, **k),
    "full_int": lambda **k: torch.full((2, 3), 7, **k),
    "full_bool": lambda **k: torch.full((2,), True, **k),
    "eye": lambda **k: torch.eye(3, 4, **k),
    "arange": lambda **k: torch.arange(5, **k),
    "arange_float": lambda **k: torch.arange(0.0, 1.0, 0.25, **k),
    "arange_down": lambda **k: torch.arange(5, 1, -2, **k),
    "range": lambda **k: torch.arange(1, 4, 0.5, **k),
    "linspace": lambda **k: torch.linspace(-1, 1, 7, **k),
    "logspace": lambda **k: torch.logspace(0, 2, 5, **k),
    "tensor_list": lambda **k: torch.tensor([[1.0, 2.0], [3.0, 4.0]], **k),
    "tensor_int": lambda **k: torch.tensor(3, **k),
    "tensor_bool": lambda **k: torch.tensor([True, False], **k),
    "tensor_complex": lambda **k: torch.tensor([1 + 2j], **k),
    "tensor_empty": lambda **k: torch.tensor([], **k),
    "tensor_numpy": lambda **k: torch.tensor(numpy.arange(4.0), **k),
    "as_tensor": lambda **k: torch.as_tensor([1, 2, 3], **k),
    "as_tensor_numpy": lambda **k: torch.as_tensor(numpy.arange(3), **k),
    "asarray": lambda **k: torch.asarray([1.0, 2.0], **k),
    "scalar_tensor": lambda **k: torch.scalar_tensor(2.5, **k),
    "rand": lambda **k: torch.rand(2, 3, **k),
    "randn": lambda **k: torch.randn(2, 3, **k),
    "randint": lambda **k: torch.randint(0, 9, (2, 3), **k),
    "randperm": lambda **k: torch.randperm(6, **k),
    "normal": lambda **k: torch.normal(1.0, 2.0, (3,), **k),
    "tril_indices": lambda **k: torch.tril_indices(3, 3, **k),
    "triu_indices": lambda **k: torch.triu_indices(3, 4, **k),
    "hann_window": lambda **k: torch.hann_window(6, **k),
    "hamming_window": lambda **k: torch.hamming_window(6, **k),
    "blackman_window": lambda **k: torch.blackman_window(6, **k),
    "bartlett_window": lambda **k: torch.bartlett_window(6, **k),
    "kaiser_window": lambda **k: torch.kaiser_window(6, **k),
    "fftfreq": lambda **k: torch.fft.fftfreq(5, **k),
    "rfftfreq": lambda **k: torch.fft.rfftfreq(5, **k),
    "zeros_strided": lambda **k: torch.empty_strided((2, 3), (1, 2), **k).zero_(),
    "empty_permuted": lambda **k: torch.empty_permuted((2, 3, 4), (2, 0, 1), **k).zero_(),
    "vander": lambda **k: torch.vander(torch.tensor([1.0, 2.0], **k), 3),
    "cauchy_window": lambda **k: torch.signal.windows.gaussian(5, **k),
}
EMPTY: dict[str, Callable[..., Tensor]] = {
    "empty": lambda **k: torch.empty(2, 3, **k),
    "empty_channels_last": lambda **k: torch.empty(
        2, 3, 4, 5, memory_format=torch.channels_last, **k
    ),
    "empty_strided": lambda **k: torch.empty_strided((2, 3), (1, 2), **k),
}
# torch's device context does not reach `torch.normal`: on any device, it stays on the CPU.
FOLLOW_THE_DEFAULT = sorted(set(FACTORIES) - {"normal"})
DTYPES = [
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int8,
    torch.int16,
    torch.int32,
    torch.int64,
    torch.uint8,
    torch.bool,
    torch.complex64,
    torch.complex128,
]


def _eager(make: Callable[..., Tensor], **keywords: object) -> Tensor:
    torch.manual_seed(0)
    return make(**keywords)


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_makes_a_lazy_tensor(name: str) -> None:
    expected = _eager(FACTORIES[name])
    torch.manual_seed(0)
    got = FACTORIES[name](device="lazy")
    assert got.device == torch.device("lazy:0")
    assert torpor.is_lazy(got)
    assert_same(got, expected)


@pytest.mark.parametrize("name", FOLLOW_THE_DEFAULT)
def test_a_factory_follows_the_default_device(name: str) -> None:
    expected = _eager(FACTORIES[name])
    torch.manual_seed(0)
    torch.set_default_device("lazy")
    got = FACTORIES[name]()
    torch.set_default_device(None)
    assert got.device == torch.device("lazy:0")
    assert_same(got, expected)


@pytest.mark.parametrize("name", FOLLOW_THE_DEFAULT)
def test_a_factory_follows_a_device_context(name: str) -> None:
    expected = _eager(FACTORIES[name])
    torch.manual_seed(0)
    with torch.device("lazy"):
        got = FACTORIES[name]()
    assert got.device == torch.device("lazy:0")
    assert_same(got, expected)


PLAIN_IN_THE_MODE = ("zeros_of_nothing", "tensor_empty", "as_tensor_numpy")
"""Without elements, or on memory of somebody else."""


@pytest.mark.parametrize("name", FACTORIES)
def test_a_factory_makes_a_lazy_tensor_inside_the_mode(name: str) -> None:
    expected = _eager(FACTORIES[name])
    torch.manual_seed(0)
    with torpor.mode():
        got = FACTORIES[name]()
    assert torpor.is_lazy(got) is (name not in PLAIN_IN_THE_MODE)
    assert got.device == torch.device("cpu")
    assert_same(got, expected)


@pytest.mark.parametrize("name", EMPTY)
def test_an_empty_tensor_has_eagers_shape_and_strides(name: str) -> None:
    expected, got = EMPTY[name](), EMPTY[name](device="lazy")
    assert (got.shape, got.stride(), got.dtype) == (
        expected.shape,
        expected.stride(),
        expected.dtype,
    )
    assert_same(got.fill_(2), expected.fill_(2))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", ["zeros", "ones", "full_int", "tensor_int", "arange"])
def test_a_factory_takes_a_dtype(name: str, dtype: torch.dtype) -> None:
    if name == "arange" and dtype in (torch.bool, torch.complex64, torch.complex128):
        expected = pytest.raises(RuntimeError)
        with expected:
            FACTORIES[name](dtype=dtype)
        with pytest.raises(RuntimeError):
            FACTORIES[name](dtype=dtype, device="lazy")
        return
    assert_same(FACTORIES[name](dtype=dtype, device="lazy"), FACTORIES[name](dtype=dtype))


@pytest.mark.parametrize("name", ["zeros", "rand", "tensor_list", "full"])
def test_a_factory_takes_requires_grad(name: str) -> None:
    x = FACTORIES[name](device="lazy", requires_grad=True)
    assert x.requires_grad
    assert x.is_leaf
    (x * 2).sum().backward()
    assert_same(x.grad, torch.full_like(plain(x), 2.0))


def test_a_factory_takes_a_numbered_device() -> None:
    assert torch.ones(2, device="lazy:1").device == torch.device("lazy:1")
    assert torch.ones(2, device=torch.device("lazy", 0)).device == torch.device("lazy:0")


def test_a_factory_runs_nothing_before_it_is_read() -> None:
    assert torpor.is_pending(torch.ones(2, device="lazy") + 1)


LIKES: dict[str, Callable[[Tensor], Tensor]] = {
    "zeros_like": torch.zeros_like,
    "ones_like": torch.ones_like,
    "full_like": lambda x: torch.full_like(x, 4),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randint_like": lambda x: torch.randint_like(x, 3, 9),
    "zeros_like_dtype": lambda x: torch.zeros_like(x, dtype=torch.int64),
    "ones_like_contiguous": lambda x: torch.ones_like(x, memory_format=torch.contiguous_format),
    "empty_like_filled": lambda x: torch.empty_like(x).fill_(1),
    "new_zeros": lambda x: x.new_zeros(3, 2),
    "new_ones": lambda x: x.new_ones((3, 2), dtype=torch.int32),
    "new_full": lambda x: x.new_full((2,), 3),
    "new_tensor": lambda x: x.new_tensor([1, 2, 3]),
    "new_empty_filled": lambda x: x.new_empty(2, 3).fill_(5),
    "new_empty_strided_filled": lambda x: x.new_empty_strided((2, 3), (1, 2)).fill_(5),
}


@pytest.mark.parametrize("layout", ["contiguous", "transposed"])
@pytest.mark.parametrize("name", LIKES)
def test_a_tensor_made_like_another_is_lazy_like_it(put: Put, name: str, layout: str) -> None:
    def program(x: Tensor) -> object:
        return LIKES[name](x.t() if layout == "transposed" else x)

    got = agree(put, program, torch.ones(2, 3))
    assert got.device == put(torch.ones(1)).device
    # `new_tensor` takes Python's numbers to a device; on the concrete one they may stay plain.
    assert torpor.is_lazy(got) or (name, put.name) == ("new_tensor", "concrete")


def test_a_tensor_made_like_a_plain_one_can_be_lazy() -> None:
    assert_same(torch.zeros_like(torch.ones(2), device="lazy"), torch.zeros(2))


def test_a_tensor_made_like_a_lazy_one_can_be_plain(virtual: Put) -> None:
    made = torch.zeros_like(virtual(torch.ones(2)), device="cpu")
    assert type(made) is Tensor
    assert_same(made, torch.zeros(2))


def test_torch_tensor_of_a_lazy_tensor_copies_it(put: Put) -> None:
    original = put(torch.arange(3.0))
    with pytest.warns(UserWarning, match="copy construct"):
        twin = torch.tensor(original, device=original.device)
    original.zero_()
    assert plain(twin).tolist() == [0.0, 1.0, 2.0]


def test_as_tensor_of_a_lazy_tensor_is_the_tensor(put: Put) -> None:
    original = put(torch.arange(3.0))
    assert torch.as_tensor(original) is original


def test_torch_tensor_of_a_list_of_lazy_scalars_reads_them(put: Put) -> None:
    x = put(torch.arange(3.0))
    made = torch.tensor([x[0], x[2]])
    assert made.tolist() == [0.0, 2.0]


LAYERS: dict[str, Callable[..., nn.Module]] = {
    "Linear": lambda **k: nn.Linear(3, 2, **k),
    "Conv2d": lambda **k: nn.Conv2d(2, 3, 3, **k),
    "Embedding": lambda **k: nn.Embedding(5, 3, padding_idx=1, **k),
    "LayerNorm": lambda **k: nn.LayerNorm(4, **k),
    "BatchNorm1d": lambda **k: nn.BatchNorm1d(3, **k),
    "LSTM": lambda **k: nn.LSTM(2, 3, **k),
    "MultiheadAttention": lambda **k: nn.MultiheadAttention(4, 2, **k),
    "TransformerEncoderLayer": lambda **k: nn.TransformerEncoderLayer(4, 2, 8, **k),
}


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_made_on_the_device_has_eagers_weights(name: str) -> None:
    torch.manual_seed(0)
    expected = LAYERS[name]()
    torch.manual_seed(0)
    got = LAYERS[name](device="lazy")
    assert_same(dict(got.state_dict()), dict(expected.state_dict()))
    assert all(isinstance(p, nn.Parameter) for p in got.parameters())


@pytest.mark.parametrize("name", LAYERS)
def test_a_layer_made_inside_the_mode_has_eagers_weights(name: str) -> None:
    torch.manual_seed(0)
    expected = LAYERS[name]()
    torch.manual_seed(0)
    with torpor.mode():
        got = LAYERS[name]()
    for key, value in got.state_dict().items():
        assert torpor.is_lazy(value)
        assert same_bits(plain(value), expected.state_dict()[key])
