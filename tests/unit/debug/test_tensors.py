"""Tensors go to bytes and back with every bit, stride and mark; statistics make ones alike."""

import math

import pytest
import torch

from torpor.backends.equality import same_bits
from torpor.debug.file_format import Reader, Writer
from torpor.debug.tensors import (
    DTYPES,
    checksum,
    from_bytes,
    layout,
    number_entry,
    probes,
    probes_type,
    read_layout,
    read_number,
    read_statistics,
    statistics,
    synthetic,
    to_bytes,
)
from torpor.errors import RecordFileError
from torpor.ir.types import TensorType


def back(tensor):
    return from_bytes(to_bytes(tensor), TensorType.of_tensor(tensor))


def bits(tensor):
    return to_bytes(tensor)


@pytest.fixture
def reader(tmp_path):
    Writer(tmp_path / "f").close({})
    with Reader(tmp_path / "f") as found:
        yield found


def can_be_made(dtype):
    return dtype.itemsize and not str(dtype).startswith(
        ("torch.bits", "torch.float4", "torch.int4")
    )


@pytest.mark.filterwarnings("ignore:ComplexHalf support is experimental")
@pytest.mark.parametrize("name", sorted(n for n, d in DTYPES.items() if can_be_made(d)))
def test_every_dtype(name):
    dtype = DTYPES[name]
    raw = torch.arange(64, dtype=torch.uint8)
    if dtype == torch.bool:
        raw = raw % 2
    tensor = raw.view(dtype).reshape(2, -1)
    copy = back(tensor)
    assert (copy.dtype, copy.shape) == (dtype, tensor.shape)
    assert bits(copy) == bits(tensor) == bytes(raw.tolist())


LAYOUTS = {
    "scalar": lambda: torch.tensor(3.5),
    "empty": lambda: torch.empty(2, 0, 3),
    "transposed": lambda: torch.randn(3, 4).t(),
    "channels_last": lambda: torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "expanded": lambda: torch.randn(3, 1).expand(3, 1000),
    "sliced": lambda: torch.randn(10, 10)[2:7, 3:9:2],
    "overlapping": lambda: torch.randn(12).as_strided((4, 3), (2, 1), 3),
    "conjugate": lambda: torch.randn(3, 4, dtype=torch.complex64).conj(),
    "negative": lambda: torch.randn(3, 4, dtype=torch.complex64).conj().imag,
    "odd_numbers": lambda: torch.tensor([0.0, -0.0, math.nan, math.inf, -math.inf, 1e-45]),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout(name):
    tensor = LAYOUTS[name]()
    copy = back(tensor)
    assert layout(copy) == layout(tensor)
    assert same_bits(copy, tensor)
    assert copy.untyped_storage().data_ptr() != tensor.untyped_storage().data_ptr() or not (
        tensor.numel()
    )


def test_an_expanded_tensor_takes_the_bytes_of_what_is_there():
    assert len(to_bytes(torch.randn(3, 1).expand(3, 1000))) == 12


def test_a_checksum_is_of_the_numbers_and_not_of_their_order_in_memory():
    tensor = torch.randn(4, 6)
    assert checksum(tensor.t().contiguous().t()) == checksum(tensor)
    assert checksum(tensor[1:]) == checksum(tensor[1:].clone())
    assert checksum(tensor) != checksum(-tensor)


@pytest.mark.parametrize("number", [0, -3, 2**70, 0.1, -0.0, math.inf, True, False, 1 - 2j])
def test_numbers_keep_type_and_bits(reader, number):
    found = read_number(reader, number_entry(number), "here")
    assert type(found) is type(number)
    assert repr(found) == repr(number)


@pytest.mark.parametrize(
    "entry", [None, 3, [], ["int"], ["int", 3], ["int", "x"], ["str", "x"], ["int", "9" * 10_000]]
)
def test_what_is_no_number_is_refused(reader, entry):
    with pytest.raises(RecordFileError, match="here"):
        read_number(reader, entry, "here")


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "float33"},
        {"dtype": 5},
        {"shape": [-1, 2]},
        {"shape": [1.5, 2]},
        {"shape": [2]},
        {"shape": [2**62, 2]},
        {"shape": [1] * 65},
        {"stride": None},
        {"offset": -1},
        {"conj": 1},
    ],
)
def test_a_hostile_layout_is_refused(reader, change):
    with pytest.raises(RecordFileError, match="input 1"):
        read_layout(reader, layout(torch.zeros(2, 3)) | change, "input 1")


def test_synthetic_data_have_the_statistics():
    tensor = torch.randn(100, 100) * 3 + 5
    tensor[0, 0] = math.nan
    made = synthetic(TensorType.of_tensor(tensor), facts(tensor), seed=1)
    found, wanted = statistics(made), statistics(tensor)
    assert found["nan"] == wanted["nan"] == 1
    assert float(found["mean"]) == pytest.approx(float(wanted["mean"]), rel=0.05)
    assert float(found["std"]) == pytest.approx(float(wanted["std"]), rel=0.05)
    assert float(wanted["min"]) <= float(found["min"])
    assert float(found["max"]) <= float(wanted["max"])
    assert same_bits(made, synthetic(TensorType.of_tensor(tensor), facts(tensor), seed=1))


@pytest.mark.parametrize(
    "tensor",
    [
        torch.randint(5, 9, (40,)),
        torch.rand(40) < 0.5,
        torch.randn(4, 5, dtype=torch.complex64).conj(),
        torch.randn(4, 1).expand(4, 7),
        torch.zeros(3, dtype=torch.float8_e4m3fn),
        torch.empty(0),
        torch.tensor(2),
    ],
    ids=["integers", "bools", "conjugates", "expanded", "float8", "empty", "number"],
)
def test_synthetic_data_of_any_type(tensor):
    made = synthetic(TensorType.of_tensor(tensor), facts(tensor), seed=0)
    assert (made.dtype, made.shape, made.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert made.is_conj() == tensor.is_conj()
    if not tensor.is_floating_point() and not tensor.is_complex() and tensor.numel():
        assert tensor.min() <= made.min()
        assert made.max() <= tensor.max()


def facts(tensor):
    found = statistics(tensor)
    return {name: float(found[name]) for name in ("nan", "inf", "min", "max", "mean", "std")}


@pytest.mark.parametrize("change", [{"min": "nan"}, {"max": "x"}, {"std": 3}, {"nan": -1}])
def test_hostile_statistics_are_refused(reader, change):
    with pytest.raises(RecordFileError, match="input 1"):
        read_statistics(reader, statistics(torch.ones(3)) | change, "input 1")


@pytest.mark.parametrize("count", [0, 1, 255, 256, 511, 512, 513, 1000])
def test_probes_are_few_and_miss_nothing(count):
    tensor = torch.randn(count, dtype=torch.complex64 if count == 255 else torch.float32)
    found = probes(tensor)
    assert TensorType.of_tensor(found) is probes_type(TensorType.of_tensor(tensor))
    assert found.numel() <= 256
    for place in {0, count // 2, count - 1} if count else ():
        other = tensor.clone()
        other[place] += 1
        assert (probes(other) - found).abs().max() > 0.1
