"""Reading a lazy tensor from Python: numbers, text, arrays."""

import math
import operator
from collections.abc import Callable

import numpy
import pytest
import torch
from torch import Tensor

import torpor
from tests.comparison import Put, agree, assert_same, message, plain, raised_by

X = torch.arange(6.0).view(2, 3)
SCALARS = {
    "float": torch.tensor(2.5),
    "int": torch.tensor(-3),
    "bool": torch.tensor(True),
    "zero": torch.tensor(0),
    "complex": torch.tensor(1 + 2j),
    "half": torch.tensor(1.5, dtype=torch.float16),
    "bfloat16": torch.tensor(1.5, dtype=torch.bfloat16),
    "nan": torch.tensor(math.nan),
    "one_element": torch.tensor([[7]]),
}


@pytest.mark.parametrize("name", SCALARS)
def test_item_gives_eagers_number(put: Put, name: str) -> None:
    agree(put, lambda x: x.item(), SCALARS[name])


@pytest.mark.parametrize(
    "convert",
    [bool, int, float, complex, math.floor, str, hash],
    ids=lambda f: f.__name__,
)
def test_python_converts_a_scalar(put: Put, convert: Callable) -> None:
    scalar = put(torch.tensor(3.0)) * 1
    if convert is hash:
        assert hash(scalar) == hash(scalar)
        assert {scalar: 1}[scalar] == 1
    elif convert is str:
        assert "3." in str(scalar)
    else:
        expected = convert(torch.tensor(3.0))
        got = convert(scalar)
        assert (plain(got) if isinstance(got, Tensor) else got) == expected


def test_an_integer_scalar_is_an_index(put: Put) -> None:
    two = put(torch.tensor(2))
    assert operator.index(two) == 2
    assert ["a", "b", "c"][two] == "c"
    assert list(range(two)) == [0, 1]
    assert X.tolist()[0][: put(torch.tensor(2))] == [0.0, 1.0]


def test_a_float_scalar_is_no_index(put: Put) -> None:
    assert type(raised_by(lambda: operator.index(put(torch.tensor(2.0))))) is TypeError


def test_comparisons_decide_branches(put: Put) -> None:
    x = put(X)
    assert x.sum() > 14
    assert not x.sum() > 16
    assert (x == x).all()
    assert bool(x.any())
    assert 3.0 in x
    assert 99.0 not in x


@pytest.mark.parametrize("name", [*SCALARS, "matrix", "empty", "int_matrix"])
def test_tolist_gives_eagers_lists(put: Put, name: str) -> None:
    tensors = {**SCALARS, "matrix": X, "empty": torch.ones(0, 2), "int_matrix": X.int()}
    agree(put, lambda x: x.tolist(), tensors[name])


def test_tolist_of_views_and_transposes(put: Put) -> None:
    agree(put, lambda x: [(x + 1).t().tolist(), x[:, 1].tolist(), x.expand(2, 2, 3).tolist()], X)


def test_len_and_iteration(put: Put) -> None:
    x = put(X)
    assert len(x) == 2
    rows = list(x)
    assert_same(rows, [X[0], X[1]])
    first, second = x
    assert_same([first, second], [X[0], X[1]])
    assert [v.item() for v in x[0]] == [0.0, 1.0, 2.0]
    assert_same(list(reversed(x)), list(reversed(X)))
    assert_same(dict(enumerate(x)), dict(enumerate(X)))


def test_iteration_is_over_views(put: Put) -> None:
    x = put(X)
    for row in x:
        row += 1
    assert_same(x, X + 1)


# --- text ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "make",
    [
        lambda: X,
        lambda: X.int(),
        lambda: X > 2,
        lambda: torch.complex(X, X),
        lambda: torch.tensor(1.5),
        lambda: torch.ones(0, 3),
        lambda: torch.arange(5000.0),
        lambda: X.bfloat16(),
        lambda: torch.tensor([math.nan, math.inf, 1e-9]),
        lambda: X.t(),
    ],
    ids="float int bool complex scalar empty long bfloat16 odd transposed".split(),
)
def test_repr_shows_eagers_values(put: Put, make: Callable[[], Tensor]) -> None:
    expected = repr(make())
    shown = repr(put(make()))
    numbers = expected.removeprefix("tensor(").split("],")[0].removesuffix(")")
    assert numbers.split("\n")[0].rstrip("]), ") in shown


def test_repr_names_the_virtual_device(virtual: Put) -> None:
    assert "device='lazy:0'" in repr(virtual(X))


def test_repr_tells_of_gradients(put: Put) -> None:
    leaf = put(X.clone().requires_grad_())
    assert "requires_grad=True" in repr(leaf)
    assert "grad_fn=" in repr(leaf * 2)
    assert "Parameter containing" in repr(torch.nn.Parameter(put(X)))


def test_repr_of_a_pending_tensor_has_its_values(put: Put) -> None:
    pending = put(torch.tensor([1.0, 2.0])) * 3
    assert "3., 6." in repr(pending)


def test_printing_options_hold(put: Put) -> None:
    torch.set_printoptions(precision=2)
    try:
        assert "0.33" in repr(put(torch.tensor([1 / 3])))
        assert "0.333" not in repr(put(torch.tensor([1 / 3])))
    finally:
        torch.set_printoptions(profile="default")


def test_str_and_print_show_values(put: Put, capsys: pytest.CaptureFixture) -> None:
    print(put(torch.tensor([4.0, 5.0])) + 1)
    assert "5., 6." in capsys.readouterr().out


def test_a_list_and_a_module_print(put: Put) -> None:
    assert "2." in repr([put(torch.tensor([2.0]))])
    assert "Linear" in repr(put(torch.nn.Linear(2, 2)))


@pytest.mark.parametrize("spec", ["", ".2f", "8.3e", ">10", "d"])
def test_format_of_a_scalar_is_eagers(put: Put, spec: str) -> None:
    scalar = torch.tensor(7) if spec == "d" else torch.tensor(2.0 / 3)
    assert format(put(scalar), spec) == format(scalar, spec)


def test_an_f_string_shows_a_loss(put: Put) -> None:
    assert f"loss {put(X).mean():.3f}" == "loss 2.500"


def test_formatting_a_matrix_with_a_spec_is_refused(put: Put) -> None:
    assert type(raised_by(lambda: format(put(X), ".2f"))) is TypeError


# --- arrays ----------------------------------------------------------------------------------


def test_numpy_of_a_concrete_tensor_has_its_values(concrete: Put) -> None:
    array = (concrete(X) + 1).numpy()
    assert isinstance(array, numpy.ndarray)
    assert array.tolist() == (X + 1).tolist()


def test_numpy_of_the_virtual_device_is_refused_as_for_any_device(virtual: Put) -> None:
    """Eager refuses `.numpy()` off the CPU with a TypeError; torpor may also give the values."""
    try:
        array = virtual(X).numpy()
    except TypeError as refusal:
        assert "cpu" in message(refusal).lower()
    else:
        assert array.tolist() == X.tolist()


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float64, torch.int64, torch.bool, torch.complex64, torch.float16]
)
def test_numpy_keeps_the_dtype(put: Put, dtype: torch.dtype) -> None:
    original = X.to(dtype)
    lazy = put(original)
    array = (lazy.cpu() if put.name == "lazy" else lazy).numpy()
    assert array.dtype == original.numpy().dtype
    assert array.tolist() == original.numpy().tolist()


def test_numpy_of_a_tensor_with_gradient_is_refused(concrete: Put) -> None:
    leaf = concrete(X.clone().requires_grad_())
    assert type(raised_by(lambda: leaf.numpy())) is RuntimeError
    assert leaf.detach().numpy().tolist() == X.tolist()
    assert leaf.numpy(force=True).tolist() == X.tolist()


def test_numpy_force_works_on_the_virtual_device(virtual: Put) -> None:
    assert (virtual(X) * 2).numpy(force=True).tolist() == (X * 2).tolist()


def test_numpy_functions_take_a_concrete_tensor(concrete: Put) -> None:
    lazy = concrete(X)
    assert numpy.asarray(lazy).tolist() == X.tolist()
    assert float(numpy.sum(numpy.asarray(lazy))) == 15.0


def test_a_numpy_array_becomes_lazy(put: Put) -> None:
    array = numpy.arange(6, dtype=numpy.float32).reshape(2, 3)
    lazy = put(torch.from_numpy(array))
    array[:] = 0
    assert lazy.tolist() == X.tolist()


def test_a_numpy_scalar_mixes_with_a_lazy_tensor(put: Put) -> None:
    agree(put, lambda x: [x * numpy.float64(2), x + numpy.int64(3), x.sum() > numpy.float32(1)], X)


def test_numpy_writes_are_seen_or_the_array_is_a_copy(concrete: Put) -> None:
    lazy = concrete(X)
    array = lazy.numpy()
    lazy.add_(1)
    torpor.sync(wait=True)
    assert lazy.tolist() == (X + 1).tolist()
    assert array.tolist() in (X.tolist(), (X + 1).tolist())


def test_dlpack_gives_the_values_or_says_why_not(put: Put) -> None:
    try:
        taken = torch.from_dlpack(put(X) + 1)
    except (BufferError, RuntimeError, TypeError) as refusal:
        assert len(message(refusal)) > 20
    else:
        assert taken.tolist() == (X + 1).tolist()


def test_dlpack_of_a_concrete_tensor_goes_to_numpy(concrete: Put) -> None:
    assert numpy.from_dlpack(concrete(X) + 1).tolist() == (X + 1).tolist()


def test_data_ptr_is_real_memory_or_a_clear_error(put: Put) -> None:
    import ctypes

    lazy = put(X) + 1
    try:
        pointer = lazy.data_ptr()
    except (RuntimeError, NotImplementedError) as refusal:
        assert "data_ptr" in message(refusal)
        return
    assert pointer != 0
    values = (ctypes.c_float * 6).from_address(pointer)
    assert list(values) == (X + 1).flatten().tolist()


def test_data_ptr_of_a_view_points_into_its_base(put: Put) -> None:
    lazy = put(X) + 1
    try:
        base, view = lazy.data_ptr(), lazy[1].data_ptr()
    except (RuntimeError, NotImplementedError) as refusal:
        assert "data_ptr" in message(refusal)
    else:
        assert view - base == 3 * 4


# --- metadata --------------------------------------------------------------------------------

METADATA = {
    "shape": lambda x: tuple(x.shape),
    "size": lambda x: (x.size(), x.size(1), x.size(-1)),
    "stride": lambda x: (x.stride(), x.stride(0)),
    "dim": lambda x: (x.dim(), x.ndim, x.ndimension()),
    "numel": lambda x: (x.numel(), x.nelement(), x.nbytes, x.itemsize, x.element_size()),
    "dtype": lambda x: x.dtype,
    "layout": lambda x: x.layout,
    "offset": lambda x: x.storage_offset(),
    "contiguous": lambda x: x.is_contiguous(),
    "flags": lambda x: (
        *(x.is_floating_point(), x.is_complex(), x.is_signed(), x.is_sparse, x.is_quantized),
        *(x.is_conj(), x.is_neg(), x.is_inference(), x.is_leaf, x.requires_grad, x.is_meta),
    ),
    "dim_order": lambda x: x.dim_order(),
    "type": lambda x: torch.is_tensor(x) and isinstance(x, Tensor),
}


@pytest.mark.parametrize("name", METADATA)
@pytest.mark.parametrize("view", [lambda x: x, lambda x: x.t()[1:]], ids=["whole", "view"])
def test_metadata_is_eagers(put: Put, name: str, view: Callable) -> None:
    agree(put, lambda x: METADATA[name](view(x)), X)


def test_the_devices_index_is_there(virtual: Put) -> None:
    x = virtual(X)
    assert str(x.device) == "lazy:0"
    assert x.get_device() == 0
    assert x.device == torch.device("lazy", 0)


def test_a_concrete_tensor_is_a_cpu_tensor(concrete: Put) -> None:
    x = concrete(X)
    assert x.is_cpu
    assert x.device == torch.device("cpu")


def test_tensors_compare_elementwise_and_hash_by_identity(put: Put) -> None:
    x, y = put(X), put(X)
    assert_same(x == y, X == X)
    assert len({x, y, x}) == 2


def test_torch_testing_compares_lazy_tensors(put: Put) -> None:
    torch.testing.assert_close(put(X), put(X))
    with pytest.raises(AssertionError):
        torch.testing.assert_close(put(X), put(X + 1))
    assert torch.equal(put(X), put(X))
    assert not torch.equal(put(X), put(X + 1))
    assert torch.allclose(put(X), put(X + 1e-9))


OPERATORS = {
    "add": lambda x: 2 + x,
    "sub": lambda x: 2 - x,
    "mul": lambda x: 2 * x,
    "div": lambda x: 2 / (x + 1),
    "pow": lambda x: 2**x,
    "floordiv": lambda x: 7 // (x + 1),
    "mod": lambda x: 7 % (x + 1),
    "signs": lambda x: [-x, +x, abs(x)],
    "order": lambda x: [x > 2, x <= 2, operator.lt(2, x), operator.ge(2, x)],
    "equality": lambda x: [x == 2, x != 2, operator.eq(2, x)],
    "logic": lambda x: [~(x > 2), (x > 1) & (x < 4), (x > 1) | (x < 0), (x > 1) ^ (x < 4)],
    "shift": lambda x: [x.int() << 1, x.int() >> 1, 1 << x.int()],
    "matmul": lambda x: x @ x.T,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_pythons_operators_work_from_both_sides(put: Put, name: str) -> None:
    agree(put, OPERATORS[name], X)
