"""Types are interned, and know how their elements lie in memory."""

import copy
import gc
import itertools
import pickle
import weakref
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torpor.ir.types import SCALAR_TYPES, ScalarType, TensorType, contiguous_strides

CPU = torch.device("cpu")
FIELDS: dict[str, Any] = {
    "shape": (2, 3),
    "stride": (3, 1),
    "dtype": torch.float32,
    "device": CPU,
    "offset": 0,
    "conj": False,
    "neg": False,
}
OTHERS: dict[str, Any] = {
    "shape": (3, 2),
    "stride": (1, 2),
    "dtype": torch.int32,
    "device": torch.device("lazy:0"),
    "offset": 1,
    "conj": True,
    "neg": True,
}

shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
layouts = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 12)), max_size=4)


def of(shape: tuple[int, ...], stride: tuple[int, ...], offset: int = 0) -> TensorType:
    return TensorType.of(shape, stride, torch.float32, CPU, offset)


def places(type_: TensorType) -> list[int]:
    """Where each element lies, counted from the first."""
    indices = itertools.product(*map(range, type_.shape))
    return [sum(i * s for i, s in zip(index, type_.stride, strict=True)) for index in indices]


# -- interning -------------------------------------------------------------------------------------


def test_equal_types_are_one_object() -> None:
    assert TensorType.of(**FIELDS) is TensorType.of(**FIELDS)


@pytest.mark.parametrize("field", FIELDS)
def test_every_field_tells_types_apart(field: str) -> None:
    changed = TensorType.of(**{**FIELDS, field: OTHERS[field]})
    assert changed is not TensorType.of(**FIELDS)
    assert getattr(changed, field) == OTHERS[field]


def test_types_are_made_by_of_alone() -> None:
    with pytest.raises(TypeError, match="interned"):
        TensorType()


def test_copies_and_pickles_are_the_same_object() -> None:
    type_ = TensorType.of(**{**FIELDS, **OTHERS})
    for twin in (copy.copy(type_), copy.deepcopy(type_), pickle.loads(pickle.dumps(type_))):
        assert twin is type_


def test_a_type_nobody_holds_is_forgotten() -> None:
    type_ = of((97, 89), (89, 1))
    gone = weakref.ref(type_)
    del type_
    gc.collect()
    assert gone() is None


def test_the_type_of_a_tensor_is_what_the_tensor_says() -> None:
    tensor = torch.zeros(4, 6, dtype=torch.complex64).t()[1:, ::2].conj()
    type_ = TensorType.of_tensor(tensor)
    assert type_ is TensorType.of_tensor(tensor)
    assert (type_.shape, type_.stride) == (tuple(tensor.shape), tensor.stride())
    assert (type_.dtype, type_.device) == (tensor.dtype, tensor.device)
    assert (type_.offset, type_.conj, type_.neg) == (tensor.storage_offset(), True, False)
    assert TensorType.of_tensor(tensor.imag).neg


def test_a_type_may_be_seen_on_another_device_or_place() -> None:
    lazy = torch.device("lazy:0")
    type_ = of((2,), (1,))
    assert type_.on(lazy).device == lazy
    assert type_.on(lazy).on(CPU) is type_
    assert type_.at_offset(3).offset == 3
    assert type_.at_offset(3).at_offset(0) is type_
    assert TensorType.of_tensor(torch.zeros(2), lazy) is type_.on(lazy)


class Wrapper(torch.Tensor):
    @classmethod
    def __torch_dispatch__(cls, *args: object) -> object:
        raise AssertionError("nothing runs")


def test_a_wrapper_made_from_a_type_has_that_type() -> None:
    type_ = TensorType.of((2, 3), (1, 2), torch.float64, CPU, 5)
    arguments: tuple[Any, ...] = type_.wrapper
    wrapper = torch.Tensor._make_wrapper_subclass(Wrapper, *arguments)
    assert TensorType.of_tensor(wrapper) is type_


def test_number_types_are_one_per_python_type() -> None:
    assert {kind: type_.kind for kind, type_ in SCALAR_TYPES.items()} == {
        kind: kind for kind in (bool, int, float, complex)
    }
    assert repr(ScalarType(float)) == "scalar float"


def test_a_type_reads_as_text() -> None:
    assert repr(of((2, 3), (3, 1))) == "float32[2,3] @cpu"
    assert repr(of((), ())) == "float32[] @cpu"
    assert repr(TensorType.of((2, 3), (1, 2), torch.complex64, CPU, 4, True, True)) == (
        "complex64[2,3] stride [1,2] offset 4 conj neg @cpu"
    )


# -- memory ----------------------------------------------------------------------------------------


@given(shapes)
def test_contiguous_strides_are_torchs(shape: tuple[int, ...]) -> None:
    assert contiguous_strides(shape) == torch.empty(shape).stride()


@given(shapes)
def test_numel_is_torchs(shape: tuple[int, ...]) -> None:
    assert TensorType.contiguous(shape, torch.int8, CPU).numel == torch.empty(shape).numel()


@given(layouts, st.integers(0, 3))
def test_span_and_bytes_are_those_of_the_smallest_storage(
    layout: list[tuple[int, int]], offset: int
) -> None:
    type_ = of(tuple(n for n, _ in layout), tuple(s for _, s in layout), offset)
    assert type_.span == max(places(type_)) + 1
    storage = torch.empty_strided(type_.shape, type_.stride).untyped_storage()
    assert type_.at_offset(0).nbytes == storage.nbytes()
    assert type_.nbytes == type_.at_offset(0).nbytes + 4 * offset


@given(layouts)
def test_dense_means_every_place_of_the_span_is_met_once(layout: list[tuple[int, int]]) -> None:
    type_ = of(tuple(n for n, _ in layout), tuple(s for _, s in layout))
    assert type_.is_dense == (sorted(places(type_)) == list(range(type_.span)))


@given(st.permutations(range(4)), st.lists(st.integers(1, 3), min_size=4, max_size=4))
def test_permuted_contiguous_memory_is_dense(order: list[int], sizes: list[int]) -> None:
    assert TensorType.of_tensor(torch.empty(sizes).permute(order)).is_dense


@pytest.mark.parametrize(
    ("tensor", "dense"),
    [
        (torch.empty(()), True),
        (torch.empty(2, 3, 4, 5, memory_format=torch.channels_last), True),
        (torch.empty(6)[::2], False),
        (torch.empty(1).expand(3), False),
        (torch.empty(4, 4)[:, :2], False),
        (torch.empty(4, 4)[:2], True),
        (torch.empty(6).unfold(0, 3, 1), False),
        (torch.empty_strided((1, 3), (77, 1)), True),
    ],
    ids=["0-dim", "channels last", "step", "expanded", "columns", "rows", "windows", "size of 1"],
)
def test_layouts_met_in_practice(tensor: torch.Tensor, dense: bool) -> None:
    assert TensorType.of_tensor(tensor).is_dense is dense
