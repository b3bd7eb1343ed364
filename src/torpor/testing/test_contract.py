"""The methods of `Backend`: what each returns, and what the core relies on."""

from __future__ import annotations

import gc
import inspect
import subprocess
import sys
import weakref
from typing import Any

import pytest
import torch

import torpor
from torpor.backend import (
    Backend,
    BackendData,
    BackendDevice,
    BackendDeviceType,
    Computation,
    IrBuilder,
    LoweringContext,
    MemoryInfo,
)
from torpor.backend.data import number_dtype
from torpor.backend.registry import make
from torpor.backends.equality import same_bits
from torpor.compiling.compilation import compile_graph
from torpor.ir.node import LEAF
from torpor.ir.types import ScalarType, TensorType
from torpor.testing.kit import Kit, raised_by

DTYPES = (
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16,
    torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128,
)  # fmt: skip

LAYOUTS = {
    "contiguous": lambda t: t,
    "transposed": lambda t: t.t(),
    "channels_last": lambda t: t.reshape(1, 2, 3, 2).contiguous(memory_format=torch.channels_last),
    "zero_dim": lambda t: t[0, 0].clone(),
    "empty": lambda t: t[:0].clone(),
    "size_one": lambda t: t[:1].clone(),
}

X = torch.tensor([[1.0, -2.0, 0.5], [-0.25, 4.0, 3.0]])
Y = torch.tensor([[0.5, 0.5, -3.0], [2.0, -1.0, 8.0]])


def sample(dtype: torch.dtype) -> torch.Tensor:
    """Twelve numbers that every dtype can represent, with signs and fractions if possible."""
    numbers = torch.arange(12.0).view(6, 2)
    if dtype.is_floating_point or dtype.is_complex:
        numbers = (numbers - 5.5) / 4
    if dtype.is_complex:
        return torch.complex(numbers, -numbers).to(dtype)
    return numbers.to(dtype)


# -- lifecycle ---------------------------------------------------------------------------------


def test_it_is_a_backend_and_knows_its_name(kit: Kit) -> None:
    assert isinstance(kit.backend, Backend)
    assert kit.backend.name == kit.name


def test_initialize_is_called_once_and_before_anything_else(
    kit: Kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, calls = type(kit.backend), []
    real = kind.initialize

    def initialize(self: Backend) -> None:
        calls.append(self)
        real(self)

    monkeypatch.setattr(kind, "initialize", initialize)
    made = make(kit.name)
    assert calls == [made]


def test_two_backends_of_one_name_do_not_disturb_each_other(kit: Kit) -> None:
    x = kit.put(X)
    first = x + 1
    torpor.sync(wait=True)
    kit.renew()
    kit.check(first * 2, (X + 1) * 2)


def test_it_is_told_of_the_exit_once_and_leaves_quietly(kit: Kit) -> None:
    program = f"""
import sys
sys.path[:] = {sys.path!r}
import torch, torpor
from torpor.testing.kit import register_by_path
register_by_path({kit.name!r})
backend = torpor.use({kit.name!r})
real = backend.prepare_to_exit
def told():
    print("told of the exit", flush=True)
    real()
backend.prepare_to_exit = told
x = torch.ones(3).to("lazy")
print((x + 1).tolist())
left = x * 3  # pending when the process ends
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert "[2.0, 2.0, 2.0]" in done.stdout
    assert done.stdout.count("told of the exit") == 1
    assert "failed at exit" not in done.stderr, done.stderr


def test_prepare_to_exit_may_be_called_twice(kit: Kit) -> None:
    backend = make(kit.name)
    backend.prepare_to_exit()
    backend.prepare_to_exit()


def test_a_seed_gives_the_numbers_torch_gives_for_it(kit: Kit) -> None:
    torch.manual_seed(99)
    expected = torch.rand(5, device=kit.physical)
    kit.backend.set_rng_seed(99)
    kit.check(torch.rand(5, device=kit.device), expected)


def test_a_seed_set_for_the_device_is_handed_to_the_backend(kit: Kit) -> None:
    with kit.watched("set_rng_seed") as calls:
        torpor.manual_seed(7)
    assert [call.args for call in calls.of("set_rng_seed")] == [(7,)]


# -- data --------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d).removeprefix("torch."))
def test_every_dtype_goes_in_and_comes_out_bit_for_bit(kit: Kit, dtype: torch.dtype) -> None:
    tensor = sample(dtype)
    data = kit.data(tensor)
    assert isinstance(data, BackendData)
    assert data.has_value
    back = kit.read(data)
    assert back.dtype == dtype
    assert same_bits(back.cpu(), tensor)
    kit.check(kit.put(tensor), kit.eager(tensor))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_strides_go_in_and_come_out(kit: Kit, layout: str) -> None:
    tensor = LAYOUTS[layout](sample(torch.float32))
    data = kit.data(tensor)
    assert data.type is TensorType.of_tensor(tensor, kit.device)
    back = kit.read(data)
    assert (back.shape, back.stride()) == (tensor.shape, tensor.stride())
    assert same_bits(back.cpu(), tensor)


def test_special_numbers_survive(kit: Kit) -> None:
    numbers = [float("nan"), float("inf"), float("-inf"), -0.0, 0.0, 1e-45, 3.4e38]
    tensor = torch.tensor(numbers)
    assert same_bits(kit.read(kit.data(tensor)).cpu(), tensor)
    x = kit.put(tensor)
    assert same_bits(kit.plain(x.view(1, 7).t()).reshape(7).cpu(), tensor)
    assert same_bits(kit.plain(x * 1).cpu(), tensor)


def test_data_know_their_type_and_device(kit: Kit) -> None:
    data = kit.data(X)
    assert data.type is TensorType.of_tensor(X, kit.device)
    assert data.device == kit.backend.backend_device(kit.device)


def test_taking_data_in_leaves_the_tensor_alone(kit: Kit) -> None:
    tensor = X.clone()
    data = kit.data(tensor)
    kit.read(data)
    assert same_bits(tensor, X)


@pytest.mark.parametrize("number", [3, -1.5, 0.1, 2**40 + 1, True, 0.1 - 1j], ids=str)
def test_a_number_becomes_a_zero_dim_tensor_that_holds_all_of_it(kit: Kit, number: Any) -> None:
    device = kit.backend.backend_device(kit.device)
    data = kit.backend.data_from_scalar(number, device)
    assert isinstance(data, BackendData)
    assert data.device == device
    back = kit.read(data)
    assert back.dtype == number_dtype(number)
    assert back.shape == ()
    assert back.item() == number


def test_a_placeholder_is_empty_and_takes_over_data(kit: Kit) -> None:
    data = kit.data(X)
    empty = kit.backend.placeholder(data.device, data.type)
    assert isinstance(empty, BackendData)
    assert not empty.has_value
    assert (empty.device, empty.type) == (data.device, data.type)
    empty.assign(data)
    assert empty.has_value
    assert same_bits(kit.read(empty).cpu(), X)


def test_every_placeholder_is_a_handle_of_its_own(kit: Kit) -> None:
    data = kit.data(X)
    first = kit.backend.placeholder(data.device, data.type)
    second = kit.backend.placeholder(data.device, data.type)
    assert first is not second
    first.assign(data)
    assert not second.has_value


def test_data_without_a_value_are_not_read_as_numbers(kit: Kit) -> None:
    data = kit.data(X)
    empty = kit.backend.placeholder(data.device, data.type)
    raised_by(lambda: kit.backend.tensor_from_data(empty))


def test_a_logical_dtype_is_the_dtype_of_the_tensor(kit: Kit) -> None:
    back = kit.backend.tensor_from_data(kit.data(X), torch.float64)
    assert back.dtype == torch.float64
    assert torch.equal(back.cpu(), X.double())


def test_data_of_a_leaf_are_data_or_none(kit: Kit) -> None:
    leaf = kit.graph(kit.put(X).relu()).inputs[0].node
    assert leaf.op is LEAF
    data = kit.backend.data_of(leaf)
    assert data is None or isinstance(data, BackendData)


# -- lowering ----------------------------------------------------------------------------------


def test_it_builds_leaves_and_numbers(kit: Kit) -> None:
    builder = kit.backend.ir_builder()
    assert isinstance(builder, IrBuilder)
    type_ = TensorType.of_tensor(X, kit.device)
    value = builder.device_data(0, type_)
    assert value.node.op is LEAF
    assert value.type is type_
    assert builder.device_data(0, type_) is value
    assert builder.scalar(0, 1.5).type.kind is float


def test_a_lowering_context_knows_its_name_and_device(kit: Kit) -> None:
    device = kit.backend.backend_device(kit.device)
    context = kit.backend.lowering_context("named", device)
    assert isinstance(context, LoweringContext)
    assert (context.name, context.device) == ("named", device)


def test_lowering_numbers_parameters_and_results(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    graph = kit.graph(x + y, x * y)
    device = kit.backend.backend_device(kit.device)
    context = kit.backend.lowering_context("named", device, graph.nodes)
    assert [context.add_parameter(value) for value in graph.inputs] == [0, 1]
    for node in graph.nodes:
        context.lower(node)
    assert [context.add_result(value) for value in graph.outputs] == [0, 1]
    computation = context.build()
    assert isinstance(computation, Computation)
    assert computation.name == "named"
    assert computation.parameter_types == tuple(v.type for v in graph.inputs)
    assert computation.result_types == tuple(v.type for v in graph.outputs)
    assert len(set(computation.parameter_names)) == 2


def test_a_graph_is_handed_to_the_lowering_context_in_order(kit: Kit) -> None:
    with kit.watched("lowering_context", "compile", "execute") as calls:
        kit.plain(kit.put(X) * 2 + 1)
    order = [call.name for call in calls.made]
    assert order.index("lowering_context") < order.index("compile") < order.index("execute")


# -- compile and execute -----------------------------------------------------------------------


def lowered(kit: Kit, name: str, *tensors: torch.Tensor) -> Computation:
    graph = kit.graph(*tensors)
    context = kit.backend.lowering_context(
        name, kit.backend.backend_device(kit.device), graph.nodes
    )
    for value in graph.inputs:
        context.add_parameter(value)
    for node in graph.nodes:
        context.lower(node)
    for value in graph.outputs:
        context.add_result(value)
    return context.build()


def test_compile_returns_as_many_computations_in_the_same_order(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    pair = [lowered(kit, "first", x + y), lowered(kit, "second", x * y)]
    first, second = kit.backend.compile(pair)
    assert [first.name, second.name] == ["first", "second"]
    kit.check(kit.read(kit.execute(first, kit.datas(X, Y))[0]), kit.eager(X + Y))
    kit.check(kit.read(kit.execute(second, kit.datas(X, Y))[0]), kit.eager(X * Y))


def test_compiling_nothing_gives_nothing(kit: Kit) -> None:
    assert list(kit.backend.compile([])) == []


def test_execute_returns_data_with_values_of_the_promised_types(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    program = (x + y, (x * y).t(), x @ y.t())
    computation = kit.compiled(*program)
    results = kit.execute(computation, kit.datas(X, Y))
    assert isinstance(results, list)
    assert len(results) == 3
    for result, type_ in zip(results, computation.result_types, strict=True):
        assert isinstance(result, BackendData)
        assert result.has_value
        assert result.type is type_
        assert result.device == computation.device
        tensor = kit.read(result)
        assert (tuple(tensor.shape), tensor.dtype) == (type_.shape, type_.dtype)
        assert tensor.stride() == type_.stride
        assert tensor.device.type == kit.physical.type


def test_results_stand_in_the_order_of_the_graph(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    computation = kit.compiled(x + y, x - y, x * y, y - x)
    results = [kit.read(result) for result in kit.execute(computation, kit.datas(X, Y))]
    kit.check(results, [kit.eager(t) for t in (X + Y, X - Y, X * Y, Y - X)])


def test_results_share_memory_with_nothing(kit: Kit) -> None:
    x = kit.put(X)
    y = x.relu()
    program = (y, y.t(), y.clone(), x.t(), x.view(6), x.reshape(-1), x.clone(), x - x)
    computation = kit.compiled(*program)
    given = kit.datas(X)
    tensors = [kit.read(data) for data in (*kit.execute(computation, given), *given)]
    places = [tensor.untyped_storage().data_ptr() for tensor in tensors]
    assert len(set(places)) == len(places)
    assert all(tensor.storage_offset() == 0 for tensor in tensors)


def test_arguments_are_not_written_to(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    x.add_(y).mul_(y)
    y[0].sub_(x[1])
    computation = kit.compiled(x, y)
    given = kit.datas(X, Y)
    kit.execute(computation, given)
    assert same_bits(kit.read(given[0]).cpu(), X)
    assert same_bits(kit.read(given[1]).cpu(), Y)


def test_a_computation_computes_anew_from_other_arguments(kit: Kit) -> None:
    x, y = kit.put(X), kit.put(Y)
    computation = kit.compiled(x * y - x)
    for left, right in ((X, Y), (Y, X), (X - 3, X)):
        (result,) = kit.execute(computation, kit.datas(left, right))
        kit.check(kit.read(result), kit.eager(left * right - left))


def test_numbers_given_at_run_time_are_taken_anew(kit: Kit) -> None:
    """A number that changes from step to step is passed as an argument, not as a constant."""
    x = kit.put(X)
    for number in (2.0, 3.0, 5.0, 7.5):
        kit.check(x * number, kit.eager(X * number))
        torpor.sync(wait=True)
    y = x * 11.25
    graph = kit.graph(y)
    assert any(isinstance(value.type, ScalarType) for value in graph.inputs)
    computation = kit.compiled(y)
    for number in (11.25, -4.0):
        given = [
            number if isinstance(t, ScalarType) else kit.data(X.clone())
            for t in computation.parameter_types
        ]
        if kit.backend.scalars_as_data:
            given = [
                a
                if isinstance(a, BackendData)
                else kit.backend.data_from_scalar(a, computation.device)
                for a in given
            ]
        (result,) = kit.execute(computation, given)
        kit.check(kit.read(result), kit.eager(X * number))


def test_results_of_an_earlier_run_stay_what_they_are(kit: Kit) -> None:
    computation = kit.compiled(kit.put(X).relu())
    (first,) = kit.execute(computation, kit.datas(X))
    kit.execute(computation, kit.datas(Y))
    kit.check(kit.read(first), kit.eager(X.relu()))


def test_a_donated_argument_changes_no_result(kit: Kit) -> None:
    """An alias lets a result overwrite an argument; later readers of it must not notice."""
    x, y = kit.put(X), kit.put(Y)
    graph = kit.graph(x + y, x * x, (x - y).relu())
    device = kit.backend.backend_device(kit.device)
    computation = compile_graph(graph, "donating", kit.backend, device, {0: 0})
    assert computation.aliases == {0: 0}
    for left, right in ((X, Y), (Y, X)):
        kept = kit.data(right.clone())
        results = kit.execute(computation, [kit.data(left.clone()), kept])
        expected = [left + right, left * left, (left - right).relu()]
        kit.check([kit.read(result) for result in results], [kit.eager(e) for e in expected])
        assert same_bits(kit.read(kept).cpu(), right)


def test_the_text_of_a_computation_is_text(kit: Kit) -> None:
    text = kit.backend.computation_text(kit.compiled(kit.put(X).relu()))
    assert isinstance(text, str)
    assert text.strip()


# -- the disk cache ----------------------------------------------------------------------------


def must_keep(kit: Kit) -> str:
    """The backend's cache key; skips backends that do not cache compiled graphs."""
    key = kit.backend.cache_key()
    if key is None:
        pytest.skip("the backend keeps no compiled graphs")
    return key


def test_a_graph_that_was_kept_computes_the_same(kit: Kit) -> None:
    """Another process, with another backend object, has nothing but the result of `dump`."""
    must_keep(kit)
    x, y = kit.put(X), kit.put(Y)
    graph = kit.graph((x @ y.t()).softmax(1), (x * y).t(), x.add_(y), (x - y).sum(0))
    device = kit.backend.backend_device(kit.device)
    first = compile_graph(graph, "kept", kit.backend, device)
    saved = kit.backend.dump(first)
    assert isinstance(saved, bytes)
    again = compile_graph(graph, "loaded", make(kit.name), device, saved=saved)
    assert again.name == "loaded"
    for left, right in ((X, Y), (Y, X)):
        expected = [kit.read(result) for result in kit.execute(first, kit.datas(left, right))]
        got = [kit.read(result) for result in kit.execute(again, kit.datas(left, right))]
        for one, other in zip(got, expected, strict=True):
            assert one.stride() == other.stride()
            assert same_bits(one, other)


def test_a_graph_that_was_kept_takes_its_donations(kit: Kit) -> None:
    must_keep(kit)
    x, y = kit.put(X), kit.put(Y)
    graph = kit.graph(x + y, x * x)
    device = kit.backend.backend_device(kit.device)
    first = compile_graph(graph, "kept", kit.backend, device, {0: 0})
    saved = kit.backend.dump(first)
    again = compile_graph(graph, "loaded", make(kit.name), device, {0: 0}, saved)
    assert again.aliases == {0: 0}
    kept = kit.data(Y.clone())
    results = kit.execute(again, [kit.data(X.clone()), kept])
    kit.check([kit.read(result) for result in results], [kit.eager(X + Y), kit.eager(X * X)])
    assert same_bits(kit.read(kept).cpu(), Y)


def test_the_same_options_give_the_same_key(kit: Kit) -> None:
    assert must_keep(kit) == make(kit.name).cache_key()


@pytest.mark.parametrize("saved", [b"", b"\0", bytes(99)], ids=["nothing", "little", "zeros"])
def test_bytes_that_it_never_made_are_refused(kit: Kit, saved: bytes) -> None:
    must_keep(kit)
    computation = lowered(kit, "foreign", kit.put(X) + 1)
    assert isinstance(raised_by(lambda: kit.backend.load(computation, saved)), Exception)


# -- devices -----------------------------------------------------------------------------------


def test_it_has_devices_and_finds_them_by_number(kit: Kit) -> None:
    devices = kit.backend.devices()
    assert devices
    for number, device in enumerate(devices):
        assert isinstance(device, BackendDevice)
        assert device.ordinal == number
        assert kit.backend.backend_device(torch.device("lazy", number)) == device


def test_a_device_that_is_not_there_is_refused(kit: Kit) -> None:
    number = len(kit.backend.devices())
    error = raised_by(lambda: kit.backend.backend_device(torch.device("lazy", number)))
    assert isinstance(error, RuntimeError)
    raised_by(lambda: torch.ones(2, device=f"lazy:{number}"))


def test_a_concrete_device_is_itself(kit: Kit) -> None:
    device = kit.backend.backend_device(kit.physical)
    assert device.torch_device == kit.physical


def test_the_default_device_can_be_asked_and_set(kit: Kit) -> None:
    kind, ordinal = kit.backend.default_device_type, kit.backend.default_device_ordinal
    assert isinstance(kind, BackendDeviceType)
    assert 0 <= ordinal < len(kit.backend.devices())
    kit.backend.default_device_type = kind
    kit.backend.default_device_ordinal = ordinal
    assert (kit.backend.default_device_type, kit.backend.default_device_ordinal) == (kind, ordinal)


def test_results_are_on_the_device_of_the_computation(kit: Kit) -> None:
    last = len(kit.backend.devices()) - 1
    x = X.to(f"lazy:{last}")
    y = x + 1
    assert y.device == torch.device("lazy", last)
    with kit.watched("execute") as calls:
        kit.check(y.cpu(), X + 1)
    (call,) = calls.of("execute")
    assert call.args[2].ordinal == last
    assert all(result.device.ordinal == last for result in call.result)


def test_the_device_for_fallbacks_is_one_torch_knows(kit: Kit) -> None:
    name = kit.backend.eager_fallback_device_type()
    assert isinstance(name, str)
    torch.ones(1, device=name)


def test_compilation_devices_are_names(kit: Kit) -> None:
    device = str(kit.backend.backend_device(kit.device))
    names = kit.backend.compilation_devices(device, [device])
    assert names
    assert all(isinstance(name, str) for name in names)
    assert kit.backend.compilation_devices(device, [])


# -- metrics and memory ------------------------------------------------------------------------


def test_metrics_are_numbers_and_the_report_is_text(kit: Kit) -> None:
    kit.plain(kit.put(X) + 1)
    metrics = kit.backend.metrics()
    assert isinstance(metrics, dict)
    assert all(isinstance(n, str) and isinstance(v, int | float) for n, v in metrics.items())
    assert isinstance(kit.backend.metric_report(), str)


def test_memory_info_is_consistent(kit: Kit) -> None:
    info = kit.backend.memory_info(kit.backend.backend_device(kit.device))
    assert isinstance(info, MemoryInfo)
    for number in (info.used, info.total):
        assert number is None or number >= 0
    assert info.used is None or info.total is None or info.used <= info.total


def test_buffers_of_past_steps_are_let_go(kit: Kit) -> None:
    """Dead data are freed: after a few steps, those of the first are gone."""
    seen: list[weakref.ref[BackendData]] = []
    x = kit.put(X)
    with kit.watched("placeholder") as calls:
        for _ in range(8):
            x = x * 0.5 + 1
            torpor.sync(wait=True)
            seen.extend(weakref.ref(call.result) for call in calls.of("placeholder"))
            calls.made.clear()
    early = [torch_data(reference) for reference in seen[:4]]
    gc.collect()
    assert early == [None] * len(early)


def torch_data(reference: weakref.ref[BackendData]) -> BackendData | None:
    gc.collect()
    return reference()


def test_every_method_is_a_method(kit: Kit) -> None:
    for name, member in inspect.getmembers(Backend, inspect.isfunction):
        assert callable(getattr(kit.backend, name)), f"{name} is {member!r} in the interface"
