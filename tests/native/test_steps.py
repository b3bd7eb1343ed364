"""What else the native library does in a step: attention, changing numbers, cuts, module calls."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad as fwAD
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import torpor
from tests.loud_hooks import LOUD_HOOKS
from tests.native.test_recorder import counted, torpors_functions
from torpor import metrics
from torpor.backend.data import BackendData, Done, filled, tensors_of
from torpor.backend.device import BackendDevice, BackendDeviceType
from torpor.backend.native_library import NATIVE
from torpor.backend.registry import get_backend
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.execute.sync import placeholders
from torpor.ir.types import TensorType
from torpor.observe.scope import _merged
from torpor.trace.values import value_of
from torpor.transactions import donation, transaction

aten = torch.ops.aten


def heads(requires_grad: bool = False) -> list[torch.Tensor]:
    torch.manual_seed(0)
    made = [torch.randn(2, 3, 4, 8).to("lazy") for _ in range(3)]
    return [tensor.requires_grad_(requires_grad) for tensor in made]


# -- attention -------------------------------------------------------------------------------------


def is_flash(tensor: torch.Tensor) -> bool:
    return "flash" in value_of(tensor).node.op.name  # type: ignore[arg-type]  # a lazy tensor


@pytest.mark.parametrize("requires_grad", [False, True])
def test_attention_enters_no_python(requires_grad: bool, library: Any) -> None:
    q, k, v = heads(requires_grad)
    assert torpors_functions(lambda: F.scaled_dot_product_attention(q, k, v)) == []
    with torch.inference_mode():
        assert torpors_functions(lambda: F.scaled_dot_product_attention(q, k, v)) == []


def test_attention_is_chosen_by_the_switches_of_torch(library: Any) -> None:
    q, k, v = heads()
    for _ in range(2):
        assert is_flash(F.scaled_dot_product_attention(q, k, v))
    with sdpa_kernel(SDPBackend.MATH):
        assert not is_flash(F.scaled_dot_product_attention(q, k, v))
    assert is_flash(F.scaled_dot_product_attention(q, k, v))


def test_attention_is_chosen_anew_for_another_device(library: Any) -> None:
    q, k, v = heads()
    call = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731  # called by name below
    call()
    assert torpors_functions(call) == []
    backend = get_backend()
    backend.default_device_type = backend.default_device_type
    seen = torpors_functions_once(call)
    assert any("scaled_dot_product_attention" in name for name in seen)


def test_attention_is_chosen_anew_where_what_is_not_deterministic_only_warns(library: Any) -> None:
    q, k, v = heads()
    call = lambda: F.scaled_dot_product_attention(q, k, v)  # noqa: E731  # called by name below
    try:
        for warn_only in (False, True):
            torch.use_deterministic_algorithms(True, warn_only=warn_only)
            seen = torpors_functions_once(call)
            assert any("scaled_dot_product_attention" in name for name in seen)
            assert torpors_functions(call) == []
    finally:
        torch.use_deterministic_algorithms(False)


def torpors_functions_once(call: Callable[[], Any]) -> list[str]:
    """Python functions of torpor that one call enters."""
    entered: list[str] = []

    def note(frame: Any, event: str, _: Any) -> None:
        if event == "call" and "torpor" in frame.f_globals.get("__name__", ""):
            entered.append(frame.f_code.co_qualname)

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.parametrize(
    ("op", "further"),
    [
        (aten._scaled_dot_product_flash_attention.default, (0.0, False, False)),
        (aten._scaled_dot_product_cudnn_attention.default, (None, True, 0.0, True, False)),
        (aten._scaled_dot_product_efficient_attention.default, (None, True)),
    ],
)
def test_attention_of_gpus_is_recorded_with_its_lengths(
    op: Any, further: tuple[Any, ...], library: Any
) -> None:
    tensors = heads()

    def call() -> list[Any]:
        torpor.sync()
        results = op(*tensors, *further, scale=0.5)
        return [value_of(r) if isinstance(r, torch.Tensor) else r for r in results]

    library.switch(False)
    expected = call()
    library.switch(True)
    before = library.counts()
    assert call() == expected
    assert library.counts() == (before[0] + 1, before[1])
    assert [r for r in expected if isinstance(r, int)] in ([], [4, 4])


# -- numbers that change ---------------------------------------------------------------------------


def test_lists_of_numbers_that_change_stay_native(library: Any) -> None:
    lazy, plain = ([torch.ones(3).to(d) for _ in range(4)] for d in ("lazy", "cpu"))
    for step in range(1, 7):
        before = library.counts()
        for tensors in (lazy, plain):
            torch._foreach_mul_(tensors, [1 / step] * 4)
            torch._foreach_add_(tensors, [float(step + i) for i in range(4)])
            tensors[0].mul_(step + 0.5)
        torpor.sync()
    native, passed = (b - a for a, b in zip(before, library.counts(), strict=True))
    assert passed == 0
    assert native == 3
    for one, other in zip(lazy, plain, strict=True):
        assert torch.equal(one.cpu(), other)


@pytest.mark.parametrize("odd", [0.0, -0.0, float("nan"), True])
def test_numbers_that_are_rare_are_pythons(odd: Any, library: Any) -> None:
    x = torch.ones(3, device="lazy")
    plain = torch.ones(3)
    for number in (1.5, 2.5, 3.5, odd, 4.5, odd):
        found = x * number
        torch.testing.assert_close(found.cpu(), plain * number, equal_nan=True)
        torpor.sync()


# -- cuts ------------------------------------------------------------------------------------------

DEVICE = BackendDevice(BackendDeviceType("cpu"), 0)
TYPE = TensorType.contiguous((3,), torch.float32, torch.device("cpu"))


def test_live_storages_are_those_that_python_finds(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(3, device="lazy")
    kept, read = x + 1, x + 2
    torpor.sync(read)
    del read
    found = TRACE.live()
    monkeypatch.setattr(NATIVE, "library", None)
    assert found == TRACE.live()
    assert kept._lazy_storage in found


def test_a_trace_is_forgotten(library: Any) -> None:
    x = torch.ones(3, device="lazy")
    y = x + 1
    torpor.sync()
    for storage in (x._lazy_storage, y._lazy_storage):
        assert storage.value is None
        assert not storage.listed
    assert not TRACE.is_open()


def test_placeholders_are_what_a_backend_makes(
    library: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    backend = get_backend()
    (found,) = placeholders(backend, DEVICE, (TYPE,))
    monkeypatch.setattr(NATIVE, "library", None)
    (expected,) = placeholders(backend, DEVICE, (TYPE,))
    names = [name for name in BackendData.__slots__ if name != "__weakref__"]
    assert [getattr(found, n) for n in names] == [getattr(expected, n) for n in names]
    assert weakref.ref(found)() is found


def test_placeholders_know_who_fills_them(either: str) -> None:
    done = Done()
    assert all(h.done is done for h in placeholders(get_backend(), DEVICE, (TYPE, TYPE), done))


@pytest.mark.parametrize("is_argument", [False, True])
def test_what_a_job_replaces_is_found(is_argument: bool, either: str) -> None:
    read, written = torch.ones(3, device="lazy"), torch.zeros(3, device="lazy")
    torpor.sync()
    written.copy_(read + 1) if not is_argument else written.add_(read)
    entered = next(e for e in TRACE.leaf_storages if e[0] is written._lazy_storage)
    leaf = entered[1]
    (handle,) = placeholders(get_backend(), DEVICE, (TYPE,))
    places = {leaf: 7} if is_argument else {}
    value = written._lazy_storage.value
    found = transaction._replaced(TRACE.leaf_storages, {value: 0}, places, [handle])
    held = TRACE.leaves[leaf.node.args[0]]
    assert found == [(handle, 7 if is_argument else held, entered)]
    assert transaction._replaced(TRACE.leaf_storages, {}, places, [handle]) == []


def test_a_backend_with_placeholders_of_its_own_is_asked(library: Any) -> None:
    class Own(type(get_backend())):  # type: ignore[misc]  # whichever it is
        def placeholder(self, device: Any, type_: Any) -> BackendData:
            return Handle(device, type_)

    class Handle(BackendData):
        __slots__ = ()

    assert type(placeholders(Own(), DEVICE, (TYPE,))[0]) is Handle


def test_storages_without_a_position_stay_pending(library: Any) -> None:
    one, other = (
        LazyStorage(TYPE, value_of(torch.ones(3, device="lazy") + i), None) for i in (1, 2)
    )
    (handle,) = placeholders(get_backend(), DEVICE, (TYPE,))
    library.hold([one, other], {other.value: 0}, [handle])
    assert one.data is None
    assert other.data is handle


@pytest.fixture(params=["native", "python"])
def either(request: pytest.FixtureRequest, library: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """With the library, and without it."""
    if request.param == "python":
        monkeypatch.setattr(NATIVE, "library", None)
    return str(request.param)


def test_storages_of_leaves_and_known_values_get_their_data(either: str) -> None:
    leaf, known = torch.ones(3, device="lazy"), torch.ones(3, device="lazy") + 1
    torpor.sync()
    fresh = known * 2
    entered = value_of(leaf.detach())
    storages = [LazyStorage(TYPE, value, None) for value in (entered, value_of(fresh))]
    computed = LazyStorage(TYPE, value_of(leaf * 3), None)
    assert computed.value is not None
    data = BackendData(DEVICE, TYPE, torch.ones(3))
    TRACE.computed[computed.value] = data
    live = [*storages, computed]
    wanted: list[Any] = [storage.value for storage in (*live, *live)]
    assert sync._settle(live, wanted) == (storages[1].value,)
    assert storages[0].data is TRACE.leaves[entered.node.args[0]]
    assert storages[1].data is None
    assert computed.data is data


def test_what_handles_hold(either: str) -> None:
    tensor, data = torch.ones(3), BackendData(DEVICE, TYPE)
    (full,) = filled(DEVICE, (TYPE,), [tensor])
    assert (full.tensor, full.type, full.device, full.error, full.done) == (
        tensor, TYPE, DEVICE, None, None,
    )  # fmt: skip
    assert tensors_of([full, 2.5, data]) == [tensor, 2.5, None]
    data.error = ValueError("failed")
    assert tensors_of([full, data]) is None
    assert tensors_of([]) == []
    with pytest.raises(ValueError, match=r"tensors|zip"):
        filled(DEVICE, (TYPE,), [])


def test_handles_of_a_backends_own_class(either: str) -> None:
    tensor = torch.ones(3)

    class Made(BackendData):
        __slots__ = ()

        @property
        def tensor(self) -> Any:
            return tensor

        @tensor.setter
        def tensor(self, value: Any) -> None:
            assert value is None

    made, unset = Made(DEVICE, TYPE), BackendData.__new__(BackendData)
    assert tensors_of([made]) == [tensor]
    plain = BackendData(DEVICE, TYPE)
    transaction._assign([plain], [made])
    assert plain.tensor is tensor
    with pytest.raises(AttributeError):
        tensors_of([unset])
    with pytest.raises(AttributeError):
        transaction._assign([plain], [unset])


def test_handles_take_over_what_others_hold(either: str) -> None:
    class Own(BackendData):
        __slots__ = ("taken",)

        def assign(self, other: BackendData) -> None:
            self.taken = other

    tensor = torch.ones(3)
    plain, own = BackendData(DEVICE, TYPE), Own(DEVICE, TYPE)
    results = [BackendData(DEVICE, TYPE, tensor), BackendData(DEVICE, TYPE)]
    assert not transaction._assign([plain, own], results)
    assert plain.tensor is tensor
    assert own.taken is results[1]
    results[1].error = ValueError("failed")
    assert transaction._assign([own, plain], tuple(results))
    assert plain.error is results[1].error
    assert plain.tensor is None
    with pytest.raises(ValueError, match=r"results|zip"):
        transaction._assign([plain], results)


def nobody(data: BackendData) -> Any:
    return None


def the_tensor(data: BackendData) -> Any:
    return data.tensor


def a_view(data: BackendData) -> Any:
    assert data.tensor is not None
    return data.tensor[1:]


def an_array(data: BackendData) -> Any:
    assert data.tensor is not None
    return data.tensor.numpy()


def its_storage_for_a_while(data: BackendData) -> Any:
    assert data.tensor is not None
    data.tensor.untyped_storage()


@pytest.mark.parametrize(
    ("hold", "is_shared"),
    [
        (nobody, False), (its_storage_for_a_while, False), (the_tensor, True), (a_view, True),
        (an_array, True), (lambda data: data, True),
    ],
)  # fmt: skip
def test_data_that_others_hold_is_noticed(
    hold: Callable[[BackendData], Any], is_shared: bool, library: Any
) -> None:
    arguments = [BackendData(DEVICE, TYPE, torch.ones(3)), 2.5]
    held = hold(arguments[0])  # type: ignore[arg-type]  # the first is data
    expected = [0] if is_shared else []
    assert library.shared(arguments, (0,)) == expected
    assert donation.shared(arguments, (0,), get_backend()) == expected
    del held
    assert library.shared(arguments, (0,)) == []


def test_a_storage_object_is_noticed(library: Any) -> None:
    arguments = [BackendData(DEVICE, TYPE, torch.ones(3))]
    assert arguments[0].tensor is not None
    held = arguments[0].tensor.untyped_storage()
    assert library.shared(arguments, (0,)) == [0]
    assert donation.shared(arguments, (0,), get_backend()) == [0]
    del held
    assert library.shared(arguments, (0,)) == []
    assert donation.shared(arguments, (0,), get_backend()) == []


# -- results that nobody wants ---------------------------------------------------------------------


def norm(tensor: torch.Tensor) -> torch.Tensor:
    return F.layer_norm(tensor, (8,))


def grouped(tensor: torch.Tensor) -> torch.Tensor:
    return F.group_norm(tensor, 2)


def attention(tensor: torch.Tensor) -> torch.Tensor:
    return F.scaled_dot_product_attention(tensor, tensor, tensor)


@pytest.mark.parametrize("op", [norm, grouped, attention])
def test_without_gradients_only_the_result_is_made(
    op: Callable[[torch.Tensor], torch.Tensor], library: Any
) -> None:
    def made(tensor: torch.Tensor, with_gradients: bool) -> int:
        with torch.set_grad_enabled(with_gradients):
            op(tensor)  # the first time it is Python's
            before: int = library.made()
            op(tensor)
            after: int = library.made()
        return after - before

    torch.manual_seed(0)
    plain = torch.randn(2, 4, 4, 8)
    lazy, leaf = plain.to("lazy"), plain.to("lazy").requires_grad_()
    assert made(lazy, with_gradients=False) == 1
    assert made(lazy, with_gradients=True) == 1
    assert made(leaf, with_gradients=False) == 1
    assert made(leaf, with_gradients=True) > 1
    expected = plain.clone().requires_grad_()
    op(expected).sum().backward()
    op(leaf).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad.cpu(), expected.grad)  # type: ignore[arg-type]  # there is one
    with torch.no_grad():
        assert torch.equal(op(lazy).cpu(), op(plain))


def test_who_asks_for_all_results_gets_them(library: Any) -> None:
    torch.manual_seed(0)
    plain = torch.randn(3, 8)
    lazy = plain.to("lazy")
    with torch.no_grad():
        for _ in range(2):
            norm(lazy)
            found = torch.native_layer_norm(lazy, (8,), None, None, 1e-5)
            expected = torch.native_layer_norm(plain, (8,), None, None, 1e-5)
            for one, other in zip(found, expected, strict=True):
                assert torch.equal(one.cpu(), other)


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
def test_tangents_are_taken_from_the_other_results(library: Any) -> None:
    torch.manual_seed(0)
    plain, tangent = torch.randn(3, 8), torch.randn(3, 8)

    def tangents(primal: torch.Tensor, along: torch.Tensor) -> torch.Tensor:
        with torch.no_grad(), fwAD.dual_level():
            made = norm(fwAD.make_dual(primal, along))
            return fwAD.unpack_dual(made).tangent.clone()

    expected = tangents(plain, tangent)
    for _ in range(2):
        norm(plain.to("lazy"))
        found = tangents(plain.to("lazy"), tangent.to("lazy"))
        torch.testing.assert_close(found.cpu(), expected)


# -- module calls ----------------------------------------------------------------------------------


class Inner(nn.Module):
    """Says what is called, and which modules are being called then."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []
        self.stack: list[Any] = []

    def forward(self, x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        self.said.append("forward")
        self.stack = [] if NATIVE.library is None else NATIVE.library.modules()
        return x * (4 if twice else 2)


class Outer(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x, twice=True)  # type: ignore[no-any-return]  # modules have no types


def replaced(inner: Inner) -> None:
    inner._call_impl = lambda x, **_: inner.said.append("replaced") or x  # type: ignore[assignment,method-assign,func-returns-value]


def compiled(inner: Inner) -> None:
    inner._compiled_call_impl = lambda x, **_: inner.said.append("compiled") or x  # type: ignore[func-returns-value]


def other_forward(inner: Inner) -> None:
    inner.forward = lambda x, **_: inner.said.append("other") or x  # type: ignore[assignment,method-assign,func-returns-value]


CHANGES: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    **LOUD_HOOKS,
    "replaced": (replaced, ["replaced"]),
    "compiled": (compiled, ["compiled"]),
    "other forward": (other_forward, ["other"]),
}


@pytest.mark.parametrize("case", CHANGES)
def test_a_module_inside_another_is_called_as_torch_calls_it(case: str, library: Any) -> None:
    change, said = CHANGES[case]
    inner = Inner()
    model = Outer(inner)
    plain = model(torch.ones(1, requires_grad=True))
    assert plain.item() == 4.0
    inner.said.clear()
    change(inner)
    model(torch.ones(1, requires_grad=True)).sum().backward()
    assert inner.said == said


def test_hooks_of_all_modules_are_called(library: Any) -> None:
    names: list[str] = []
    handle = nn.modules.module.register_module_forward_hook(
        lambda module, *_: names.append(type(module).__name__)
    )
    try:
        Outer(Inner())(torch.ones(1))
    finally:
        handle.remove()
    assert names == ["Inner", "Outer"]


def test_a_class_with_ways_of_its_own_is_asked(library: Any) -> None:
    class Asked(Inner):
        def __getattribute__(self, name: str) -> Any:
            if name == "forward":
                object.__getattribute__(self, "said").append("asked")
            return super().__getattribute__(name)

    inner = Asked()
    assert Outer(inner)(torch.ones(1)).item() == 4.0
    assert inner.said == ["asked", "forward"]


def test_an_error_inside_a_module_leaves_no_trace(library: Any) -> None:
    with pytest.raises(TypeError, match="forward"):
        Outer(nn.Identity())(torch.ones(1), torch.ones(1))
    with pytest.raises(TypeError, match="self"):
        nn.Module.__call__()
    assert library.modules() == []


def test_the_modules_that_are_being_called(library: Any) -> None:
    inner = Inner()
    model = Outer(inner)
    model(torch.ones(1))
    assert inner.stack == [inner, model]
    assert library.modules() == []


def test_frames_and_calls_are_one_stack() -> None:
    a, b, c, d = (nn.Identity() for _ in range(4))
    assert _merged([], [a, b]) == [a, b]
    assert _merged([c, d], [a, b]) == [a, b, c, d]  # those began before the library was there
    assert _merged([b], [a, b]) == [a, b]
    assert _merged([c, b], [a, b]) == [a, c, b]


def test_nothing_is_between_an_inner_module_and_the_one_around_it(library: Any) -> None:
    class Looks(nn.Module):
        def forward(self) -> Any:
            return sys._getframe(1).f_code

    class Around(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = Looks()

        def forward(self) -> Any:
            return self.inner()

    assert Around()() is Around.forward.__code__
    assert Looks()() is not Around.forward.__code__


def test_the_parts_of_a_module_are_found(library: Any) -> None:
    module = nn.Sequential(nn.BatchNorm1d(2))
    norm = module._modules["0"]
    assert norm is not None
    assert getattr(module, "0") is norm
    assert norm.weight is norm._parameters["weight"]
    assert norm.running_mean is norm._buffers["running_mean"]
    norm.register_buffer("weight_too", None)
    assert norm.weight_too is None
    norm._parameters["running_mean"] = norm.bias  # as in torch, the first table that has it
    assert norm.running_mean is norm.bias


def test_a_part_that_is_not_there_is_missed_as_in_torch(library: Any) -> None:
    with pytest.raises(AttributeError, match="'Identity' object has no attribute 'nothing'"):
        nn.Identity().nothing  # noqa: B018  # it raises
    unborn = nn.Identity.__new__(nn.Identity)
    with pytest.raises(AttributeError, match="'Identity' object has no attribute 'weight'"):
        unborn.weight  # noqa: B018  # it raises


def test_a_class_that_looks_for_parts_itself_is_asked(library: Any) -> None:
    class Other(nn.Linear):
        def __getattr__(self, name: str) -> Any:
            return "mine" if name == "other" else super().__getattr__(name)

    module = Other(2, 2)
    assert module.other == "mine"
    assert module.weight is module._parameters["weight"]


def test_a_step_counts_attention_too(library: Any) -> None:
    q, k, v = heads()
    name = "lazy::_scaled_dot_product_flash_attention_for_cpu"
    before = metrics.counters().get(name, 0)
    _, (native, passed) = counted(library, lambda: F.scaled_dot_product_attention(q, k, v))
    assert (native, passed) == (1, 0)
    assert metrics.counters()[name] == before + 3
