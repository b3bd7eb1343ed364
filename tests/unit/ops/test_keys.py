"""Keys tell apart what Python calls equal, and find again what Python calls different."""

import math
import struct
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torpor.ir.node import leaf
from torpor.ir.types import TensorType
from torpor.ops.keys import argument_key, key_of, number_key, tensor_key
from torpor.ops.spec import ArgKind, spec_of

aten = torch.ops.aten
TYPE = TensorType.contiguous((2,), torch.float32, torch.device("cpu"))

ONES = [1, 1.0, True, 1 + 0j]
ZEROS = [0, 0.0, -0.0, False, 0j, complex(0.0, -0.0), complex(-0.0, 0.0), complex(-0.0, -0.0)]
NANS = [math.nan, complex(math.nan, 0), complex(0, math.nan), complex(math.nan, math.nan)]
INFINITIES = [math.inf, -math.inf, complex(math.inf, 0)]
DIFFERENT = [*ONES, *ZEROS, *NANS, *INFINITIES, 2**53, 2**53 + 1, float(2**53), -1, -2]

numbers = (
    st.sampled_from(DIFFERENT) | st.integers() | st.floats() | st.booleans() | st.complex_numbers()
)


def bits(number: Any) -> object:
    """A number as its type and bits, every NaN being the same NaN."""
    if isinstance(number, complex):
        return complex, bits(number.real), bits(number.imag)
    if isinstance(number, float):
        return float, "nan" if math.isnan(number) else struct.pack("d", number)
    return type(number), number


def test_numbers_that_differ_have_different_keys() -> None:
    assert len({number_key(number) for number in DIFFERENT}) == len(DIFFERENT)


@given(numbers, numbers)
def test_numbers_have_one_key_if_and_only_if_they_have_the_same_type_and_bits(
    a: complex, b: complex
) -> None:
    assert (number_key(a) == number_key(b)) == (bits(a) == bits(b))


@given(numbers)
def test_equal_keys_hash_alike(number: Any) -> None:
    again = type(number)(number)
    assert number_key(again) == number_key(number)
    assert hash(number_key(again)) == hash(number_key(number))


def test_a_new_nan_finds_the_old_one() -> None:
    table = {number_key(float("nan")): "float", number_key(complex("nan+nanj")): "complex"}
    assert table[number_key(-float("nan"))] == "float"
    assert table[number_key(complex(math.nan, math.nan))] == "complex"


def test_a_value_and_none_stand_for_themselves() -> None:
    x = leaf(0, TYPE)
    assert tensor_key(x) is x
    assert number_key(x) is x
    assert tensor_key(None) is None
    assert number_key(None) is None


def test_a_number_in_the_place_of_a_tensor_keeps_its_type() -> None:
    assert len({tensor_key(number) for number in (*ONES, *ZEROS)}) == 12


@pytest.mark.parametrize("kind", [ArgKind.FLOATS, ArgKind.SCALARS])
def test_numbers_in_lists_are_told_apart(kind: ArgKind) -> None:
    keys = {argument_key(kind, [number, 2]) for number in DIFFERENT}
    assert len(keys) == len(DIFFERENT)
    assert argument_key(kind, [math.nan]) == argument_key(kind, (float("nan"),))


@pytest.mark.parametrize("kind", list(ArgKind))
def test_an_absent_argument_is_none_and_no_empty_list(kind: ArgKind) -> None:
    assert argument_key(kind, None) is None


def test_an_empty_list_is_not_an_absent_one() -> None:
    assert argument_key(ArgKind.PLAINS, []) == ()


def test_lists_of_tensors_keep_their_gaps() -> None:
    x = leaf(0, TYPE)
    assert argument_key(ArgKind.TENSORS, [None, x]) == (None, x)
    assert argument_key(ArgKind.TENSORS, [x, None]) == (x, None)


@pytest.mark.parametrize(
    "different",
    [
        [torch.float32, torch.float64, None],
        [torch.device("cpu"), torch.device("lazy:0"), torch.device("lazy:1")],
        [torch.contiguous_format, torch.channels_last, torch.preserve_format],
        ["floor", "trunc", ""],
    ],
    ids=["dtypes", "devices", "memory formats", "strings"],
)
def test_plain_arguments_stand_for_themselves(different: list[Any]) -> None:
    assert [argument_key(ArgKind.PLAIN, item) for item in different] == different
    assert len(set(different)) == len(different)


def test_a_key_has_one_entry_per_argument_in_schema_order() -> None:
    x, y = leaf(0, TYPE), leaf(1, TYPE)
    spec = spec_of(aten.add.Tensor)
    assert key_of(spec, [x, y, 2]) == (x, y, ("int", 2))
    assert key_of(spec, spec.bind((x, y), {})) == key_of(spec, [x, y, 1])


@given(numbers, numbers)
def test_keys_of_ops_differ_where_their_numbers_do(a: complex, b: complex) -> None:
    x = leaf(0, TYPE)
    for target in (aten.mul.Scalar, aten.mul.Tensor, aten._foreach_mul.Scalar):
        spec = spec_of(target)
        first = (x,) if spec.arguments[0].kind is ArgKind.TENSORS else x
        same = key_of(spec, [first, a]) == key_of(spec, [first, b])
        assert same == (bits(a) == bits(b))
