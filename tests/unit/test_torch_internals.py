"""What `torpor._torch` takes from inside torch still is what torpor takes it for.

One test for each name of that module, `test_<name>` first in its name: the ones that fail under a
new torch say what has moved.
"""

import ast
import importlib
import inspect
import logging
import os
import subprocess
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.attention import SDPBackend, sdpa_kernel

import torpor
from tests.comparison import loads_jit_decompositions
from tests.loud_hooks import LOUD_HOOKS
from torpor import _torch
from torpor.ir.types import TensorType
from torpor.trace.tensor import LazyTensor

aten = torch.ops.aten


@pytest.fixture
def lazy() -> Iterator[torch.Tensor]:
    yield torch.ones(2, device="lazy")
    torpor.sync(wait=True)


def test_every_name_has_a_test() -> None:
    tree = ast.parse(inspect.getsource(_torch))
    names = [node.name for node in tree.body if isinstance(node, ast.FunctionDef)]
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names += [target.id for target in targets if isinstance(target, ast.Name)]
    tests = [name for name in globals() if name.startswith("test_")]
    public = [name for name in names if not name.startswith("_")]
    untested = [n for n in public if not any(t.startswith(f"test_{n}".lower()) for t in tests)]
    assert len(public) > 25
    assert untested == []


# -- the native recorder ---------------------------------------------------------------------------


def test_dispatch_keys_of_a_lazy_tensor_are_those_that_reach_torpor(lazy: torch.Tensor) -> None:
    assert "Python" in _torch.dispatch_keys(lazy)
    assert "Python" not in _torch.dispatch_keys(torch.ones(1))


def test_define_ops_gives_ops_without_kernels() -> None:
    schemas = ("one(Tensor a) -> Tensor", "two(Tensor a, int b=2) -> (Tensor, Tensor)")
    one, two = _torch.define_ops("torpor_test_ops", schemas)
    assert str(one) == "torpor_test_ops.one.default"
    assert two._schema.arguments[1].default_value == 2
    assert _torch.define_ops("torpor_test_ops", schemas) == [one, two]
    with pytest.raises(NotImplementedError, match=r"torpor_test_ops::one"):
        one(torch.ones(1))


def test_kernel_object_is_what_a_kernel_calls() -> None:
    kernel = _torch.kernel(aten.relu.default, "AutogradLazy")
    assert _torch.kernel_object(kernel).call_boxed == kernel


# -- tensors without memory ------------------------------------------------------------------------


def test_make_wrapper_takes_sizes_strides_offset_dtype_layout_and_device() -> None:
    arguments = ((2, 3), (1, 2), 4, None, torch.float16, torch.strided, torch.device("lazy:0"))
    made = _torch.make_wrapper(LazyTensor, *arguments)
    assert type(made) is LazyTensor
    assert (tuple(made.shape), made.stride(), made.storage_offset()) == ((2, 3), (1, 2), 4)
    assert (made.dtype, made.device) == (torch.float16, torch.device("lazy:0"))


def test_disabled_torch_function_is_what_torch_gives_a_class_that_wants_no_calls() -> None:
    assert _torch.disabled_torch_function is torch._C._disabled_torch_function_impl
    assert LazyTensor.__torch_function__ is _torch.disabled_torch_function


def test_set_conj_marks_a_tensor() -> None:
    tensor = torch.tensor([1 + 2j])
    _torch.set_conj(tensor, True)
    assert tensor.is_conj()
    assert tensor.item() == 1 - 2j


def test_set_neg_marks_a_tensor() -> None:
    tensor = torch.tensor([1.0])
    _torch.set_neg(tensor, True)
    assert tensor.is_neg()
    assert tensor.item() == -1


def test_set_metadata_gives_a_tensor_the_sizes_of_another() -> None:
    tensor, other = torch.zeros(2), torch.ones(3, 4, dtype=torch.int32)
    _torch.set_metadata(tensor, other)
    assert tensor.shape == (3, 4)
    assert tensor.dtype == torch.int32
    assert tensor.data_ptr() == other.data_ptr()


# -- trees -----------------------------------------------------------------------------------------


def test_tree_map_looks_into_lists_tuples_and_dicts() -> None:
    tree = {"a": [1, (2,)], "b": 3}
    assert _torch.tree_map(lambda n: -n, tree) == {"a": [-1, (-2,)], "b": -3}


def test_tree_leaves_lists_what_is_in_there() -> None:
    assert _torch.tree_leaves(([1, {"a": 2}], 3)) == [1, 2, 3]


# -- modes -----------------------------------------------------------------------------------------


class Seen(_torch.DispatchMode):  # type: ignore[misc]  # torch does not annotate it
    """Notes every op that passes."""

    def __init__(self) -> None:
        super().__init__()
        self.ops: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.ops.append((func, torch.is_grad_enabled()))
        return func(*args, **(kwargs or {}))


def test_dispatchmode_sees_every_op_below_autograd() -> None:
    with Seen() as seen:
        torch.ones(2, requires_grad=True) + 1
    assert [op for op, _ in seen.ops] == [aten.ones.default, aten.add.Tensor]


def test_without_modes_hides_a_mode() -> None:
    with Seen() as seen, _torch.without_modes():
        torch.ones(2)
    assert seen.ops == []


def test_as_on_another_thread_no_mode_is_on() -> None:
    with torch.inference_mode(), Seen() as seen:
        with _torch.as_on_another_thread():
            made = torch.ones(2)
        assert torch.ones(2).is_inference()
    assert not made.is_inference()
    assert len(seen.ops) == 1
    with Seen() as seen, _torch.as_on_another_thread():
        torch.ones(2)
    assert seen.ops == []


def test_as_on_another_thread_autocast_is_off() -> None:
    square = torch.ones(2, 2)
    with torch.autocast("cpu", torch.bfloat16):
        with _torch.as_on_another_thread():
            assert (square @ square).dtype is torch.float32
        assert (square @ square).dtype is torch.bfloat16


def test_as_on_another_thread_no_transform_is_on() -> None:
    plain = torch.ones(2)

    def squared(x: torch.Tensor) -> torch.Tensor:
        with _torch.as_on_another_thread():
            made = plain.detach()
            assert _torch.memory_of(made) == _torch.memory_of(plain)
        return (x * x).sum()

    assert torch.equal(torch.func.grad(squared)(torch.ones(2)), torch.full((2,), 2.0))


def test_without_torch_function_switches_the_default_device_off() -> None:
    with torch.device("meta"), _torch.without_torch_function():
        assert torch.ones(2).device.type == "cpu"


def test_kernels_run_below_autograd_with_the_grad_mode_on() -> None:
    leaf = torch.ones(2, requires_grad=True)
    with torch.no_grad(), Seen() as seen, _torch.kernels():
        result = leaf * 2
    assert not result.requires_grad
    assert seen.ops == [(aten.mul.Tensor, True)]


class Number:
    """What `torch.tensor` reads as a number, and how torch is set up meanwhile."""

    seen: ClassVar[list[bool]] = []

    def __float__(self) -> float:
        self.seen.append(_torch.is_python_off())
        with _torch.python_on():
            self.seen.append(_torch.is_python_off())
        return 1.0


def test_is_python_off_inside_torch_tensor() -> None:
    torch.tensor([Number()], dtype=torch.float32)
    assert Number.seen[-2]
    assert not _torch.is_python_off()


def test_python_on_inside_torch_tensor() -> None:
    torch.tensor([Number()], dtype=torch.float32)
    assert not Number.seen[-1]


def test_below_autograd_brings_a_composite_op_whole() -> None:
    index = torch.tensor([0, 1])
    with Seen() as seen, _torch.below_autograd():
        torch.ops.aten.one_hot.default(index, 2)
    assert [op for op, _ in seen.ops] == [aten.one_hot.default]


def test_take_apart_runs_eagers_own_form() -> None:
    with pytest.raises(RuntimeError, match=r"^Class values must be smaller than num_classes"):
        _torch.take_apart(aten.one_hot.default, torch.tensor([7]), 3)
    assert _torch.take_apart(aten.exp.default, torch.ones(2)) is NotImplemented


def test_is_transforming_inside_vmap() -> None:
    seen = []
    torch.vmap(lambda x: seen.append(_torch.is_transforming()) or x)(torch.ones(2))
    assert seen == [True]
    assert not _torch.is_transforming()


def test_is_differentiating_forward_at_a_dual_level() -> None:
    with torch.autograd.forward_ad.dual_level():
        assert _torch.is_differentiating_forward()
    assert not _torch.is_differentiating_forward()


def test_is_any_autocast_on_inside_autocast() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        assert _torch.is_any_autocast_on()
    assert not _torch.is_any_autocast_on()


def test_has_saved_tensors_hooks_inside_them() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert _torch.has_saved_tensors_hooks()
    assert not _torch.has_saved_tensors_hooks()


def test_kernel_is_what_an_op_runs() -> None:
    keys = torch._C._dispatch_keys(torch.ones(2))
    assert _torch.kernel(aten.neg.default, "CPU")(keys, torch.ones(2)).tolist() == [-1, -1]


# -- fake tensors ----------------------------------------------------------------------------------


def test_fake_mode_infers_types_with_no_numbers() -> None:
    with _torch.fake_mode():
        result = torch.empty(2, 3) @ torch.empty(3, 4)
    assert result.shape == (2, 4)
    assert _torch.fake_mode() is _torch.fake_mode()


def test_quiet_fakes_silences_the_logger_of_fake_tensors_and_no_longer() -> None:
    from torch._subclasses import fake_tensor

    assert fake_tensor.log.name == "torch._subclasses.fake_tensor"
    with _torch.quiet_fakes():
        assert logging.getLogger(fake_tensor.log.name).disabled
    assert not logging.getLogger(fake_tensor.log.name).disabled


@pytest.mark.parametrize("read", [torch.Tensor.item, torch.nonzero])
def test_data_dependent_errors_are_what_fakes_raise_for_numbers(read: Any) -> None:
    with _torch.quiet_fakes(), _torch.fake_mode():
        tensor = torch.empty(1)
        with pytest.raises(_torch.data_dependent_errors()):
            read(tensor)


def test_unsupported_errors_are_what_fakes_raise_for_an_op_without_a_rule() -> None:
    library = torch.library.Library("torpor_internals", "FRAGMENT")
    library.define("no_rule(Tensor x) -> Tensor")
    library.impl("no_rule", lambda x: x.clone(), "CPU")
    with _torch.quiet_fakes(), _torch.fake_mode():
        tensor = torch.empty(1)
        with pytest.raises(_torch.unsupported_errors()):
            torch.ops.torpor_internals.no_rule(tensor)


# -- ops -------------------------------------------------------------------------------------------


def test_opoverload_has_what_a_spec_is_read_from() -> None:
    op = aten.add_.Tensor
    assert isinstance(op, _torch.OpOverload)
    assert (str(op), op.name()) == ("aten.add_.Tensor", "aten::add_.Tensor")
    assert (op.namespace, op._opname, op._schema.name) == ("aten", "add_", "aten::add_")
    assert op._schema.arguments[0].alias_info.is_write
    assert callable(op.decompose)


def test_set_op_attribute_keeps_something_on_an_op() -> None:
    op = aten.mul.Tensor
    _torch.set_op_attribute(op, "_torpor_internals_test", 7)
    assert torch.ops.aten.mul.Tensor._torpor_internals_test == 7
    del op._torpor_internals_test


def test_parse_schema_knows_the_types_of_torch() -> None:
    assert _torch.parse_schema("a::b.c(Tensor x, ScalarType t) -> Tensor").overload_name == "c"
    with pytest.raises(RuntimeError):
        _torch.parse_schema("a::b(Tensr x) -> Tensor")


def test_drop_op_attribute_takes_it_away_again() -> None:
    op = aten.mul.Tensor
    _torch.set_op_attribute(op, "_torpor_internals_test", 7)
    _torch.drop_op_attribute(op, "_torpor_internals_test")
    assert not hasattr(op, "_torpor_internals_test")
    _torch.drop_op_attribute(op, "_torpor_internals_test")


@torch.library.custom_op("torpor_internals::own", mutates_args=())
def _own(x: torch.Tensor) -> torch.Tensor:
    return x + 1


_bare = torch.library.Library("torpor_internals", "FRAGMENT")
_bare.define("bare(Tensor x) -> Tensor")


def test_custom_op_overload_is_the_op_behind_a_function() -> None:
    assert _torch.custom_op_overload(_own) is torch.ops.torpor_internals.own.default
    assert _torch.custom_op_overload(torch.add) is None


def test_opoverloadpacket_lists_its_overloads() -> None:
    assert isinstance(torch.ops.torpor_internals.own, _torch.OpOverloadPacket)
    assert torch.ops.torpor_internals.own.overloads() == ["default"]


def test_ops_in_lists_the_ops_of_a_namespace() -> None:
    assert _torch.ops_in("torpor_internals") == ["torpor_internals::bare", "torpor_internals::own"]
    assert _torch.ops_in("torpor_nowhere") == []


@pytest.mark.parametrize("name", ["name", "__init__", "__dict__", "_dir", "__file__", "f.op"])
def test_is_taken_op_name_tells_what_torch_ops_has_itself(name: str) -> None:
    assert _torch.is_taken_op_name(*name.split("."))


@pytest.mark.parametrize("name", ["relu", "scale", "own", "f.name", "f.out", "f.Tensor", "f.x"])
def test_is_taken_op_name_leaves_all_other_names(name: str) -> None:
    assert not _torch.is_taken_op_name(*name.split("."))


def test_has_fake_tells_ops_that_fake_tensors_know() -> None:
    assert _torch.has_fake(aten.add.Tensor)
    assert not _torch.has_fake(torch.ops.torpor_internals.own.default)
    assert not _torch.has_fake(torch.ops.torpor_internals.bare.default)


@pytest.mark.parametrize("name", ["own", "bare"])
def test_give_fake_lets_fake_tensors_know_an_op_and_is_undone(name: str) -> None:
    op = getattr(torch.ops.torpor_internals, name).default
    take = _torch.give_fake(op, lambda x: x.new_empty((7,)))
    assert _torch.has_fake(op)
    with _torch.new_fake_mode():
        assert op(torch.ones(2)).shape == (7,)
    take()
    assert not _torch.has_fake(op)


def test_is_composite_tells_ops_that_are_made_of_others() -> None:
    assert _torch.is_composite(aten.dropout.default)
    assert not _torch.is_composite(aten.add.Tensor)


def test_factory_ops_are_all_there() -> None:
    found = {str(op) for op in _torch.factory_ops()}
    assert {"aten.empty.memory_format", "aten.empty_strided.default"} <= found
    missing = [n for n in _torch._FACTORIES if not hasattr(aten, n.partition(".")[0])]
    assert missing == []


def test_composite_ops_with_cpu_kernels_are_composite() -> None:
    found = _torch.composite_ops_with_cpu_kernels()
    assert aten.silu_backward.default in found
    assert all(_torch.is_composite(op) for op in found)


def test_the_dispatch_keys_of_the_lazy_device_exist() -> None:
    assert torch.device("lazy").type == "lazy"
    for key in ("Lazy", "AutogradLazy", "AutogradCPU", "AutogradCUDA"):
        assert torch._C._dispatch_key_parse(key) is not None


# -- files -----------------------------------------------------------------------------------------


def test_rebuild_tensor_and_typed_storage_are_two_halves_of_a_saved_tensor() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    storage = _torch.typed_storage(tensor)
    made = _torch.rebuild_tensor(storage, 0, (2, 3), (3, 1), False, {})
    assert torch.equal(made, tensor)


def test_rebuild_parameter_makes_a_parameter() -> None:
    made = _torch.rebuild_parameter(torch.ones(2), True, {})
    assert type(made) is nn.Parameter
    assert made.requires_grad


def test_typed_storage_is_what_torch_save_writes() -> None:
    assert _torch.typed_storage(torch.ones(2))._is_shared() is False
    assert _torch.typed_storage(torch.ones(2)).dtype is torch.float32


# -- modules, optimizers, devices ------------------------------------------------------------------


def test_forget_inductor_threads_lets_the_next_compile_make_them_anew() -> None:
    from torch._inductor import config as settings
    from torch._inductor.async_compile import AsyncCompile

    with settings.patch(compile_threads=2):
        before = AsyncCompile.pool()
        _torch.forget_inductor_threads()
        after = AsyncCompile.pool()
    assert before is not after
    _torch.forget_inductor_threads()
    before.shutdown()
    after.shutdown()


def test_register_step_pre_hook_is_told_before_every_optimizer_step() -> None:
    parameter, seen = torch.nn.Parameter(torch.ones(1)), []
    handle = _torch.register_step_pre_hook(lambda *told: seen.append(parameter.item()))
    try:
        parameter.grad = torch.ones(1)
        torch.optim.SGD([parameter], lr=1.0).step()
    finally:
        handle.remove()
    assert seen == [1.0]


def test_register_step_hook_is_told_of_every_optimizer_step() -> None:
    steps: list[Any] = []
    handle = _torch.register_step_hook(lambda optimizer, args, kwargs: steps.append(optimizer))
    try:
        weight = nn.Parameter(torch.ones(1))
        weight.grad = torch.ones(1)
        optimizer = torch.optim.SGD([weight], lr=0.1)
        optimizer.step()
    finally:
        handle.remove()
    optimizer.step()
    assert steps == [optimizer]


def test_wrap_module_call_surrounds_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "__call__", nn.Module._wrapped_call_impl)  # put back at the end
    calls: list[str] = []

    def around(call: Any) -> Any:
        def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            calls.append(type(module).__name__)
            return call(module, *args, **kwargs)

        return wrapped

    _torch.wrap_module_call(around)
    nn.Sequential(nn.ReLU())(torch.ones(1))
    assert calls == ["Sequential", "ReLU"]


class _Inside:
    inside = False


def _wrapped_calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Wraps `nn.Module.__call__` of torch; the modules whose calls are outermost, as they come."""
    plain: Any = nn.Module._wrapped_call_impl
    monkeypatch.setattr(nn.Module, "__call__", plain)  # what is there is put back at the end
    seen: list[str] = []
    calls = _Inside()

    def around(call: Any) -> Any:
        def wrapped(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            seen.append(type(module).__name__)
            calls.inside = True
            try:
                return call(module, *args, **kwargs)
            finally:
                calls.inside = False

        return wrapped

    made = _torch.wrap_outermost_call(around, calls)
    assert made.function is nn.Module.__call__
    assert made.is_known
    return seen


def test_wrap_outermost_call_surrounds_no_other_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = _wrapped_calls(monkeypatch)
    nn.Sequential(nn.ReLU())(torch.ones(1))
    nn.Tanh()(torch.ones(1))
    assert seen == ["Sequential", "Tanh"]


class _Loud(nn.Module):
    """Says which of its methods are called."""

    def __init__(self) -> None:
        super().__init__()
        self.said: list[str] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.said.append("forward")
        return x * 2

    def _slow_forward(self, *args: Any, **kwargs: Any) -> Any:
        self.said.append("slow")
        return super()._slow_forward(*args, **kwargs)


class _Other(_Loud):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        self.said.append("other")
        return super()._call_impl(*args, **kwargs)


def _replaced(module: _Loud) -> None:
    original = module._call_impl

    def call(*args: Any, **kwargs: Any) -> Any:
        module.said.append("replaced")
        return original(*args, **kwargs)

    module._call_impl = call  # type: ignore[method-assign]  # as a user might


def _compiled(module: _Loud) -> None:
    module._compiled_call_impl = lambda x: module.said.append("compiled") or x  # type: ignore[func-returns-value]


_CALLED: dict[str, tuple[Any, list[str]]] = {
    **LOUD_HOOKS,
    "compiled": (_compiled, ["compiled"]),
    "replaced": (_replaced, ["replaced", "forward"]),
}  # fmt: skip


@pytest.mark.parametrize("case", _CALLED)
def test_wrap_outermost_call_does_inside_what_torch_does(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _wrapped_calls(monkeypatch)
    change, said = _CALLED[case]
    inner = _Loud()
    change(inner)
    result = nn.Sequential(inner)(torch.ones(1, requires_grad=True))
    result.sum().backward()
    assert inner.said == said


def test_wrap_outermost_call_meets_global_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    _wrapped_calls(monkeypatch)
    names: list[str] = []
    note = lambda module, *_: names.append(type(module).__name__)  # noqa: E731  # used three times
    hooks = nn.modules.module
    handles = [
        hooks.register_module_forward_pre_hook(note),
        hooks.register_module_forward_hook(note),
        hooks.register_module_full_backward_hook(note),
    ]
    try:
        nn.Sequential(_Loud())(torch.ones(1, requires_grad=True)).sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    assert names.count("_Loud") == 3
    names.clear()
    nn.Sequential(_Loud())(torch.ones(1))
    assert not names


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_wrap_outermost_call_leaves_traced_and_overridden_calls_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    _wrapped_calls(monkeypatch)
    other = _Other()
    nn.Sequential(other)(torch.ones(1))
    assert other.said == ["other", "forward"]
    traced = _Loud()
    torch.jit.trace(nn.Sequential(traced), torch.ones(1), check_trace=False)
    assert traced.said == ["slow", "forward"]


def test_wrap_outermost_call_knows_what_torch_looks_at() -> None:
    names = nn.Module._call_impl.__code__.co_names
    assert names[: len(_torch._CALL_NAMES)] == _torch._CALL_NAMES


def test_module_attributes_are_looked_for_in_three_tables() -> None:
    found = _torch.module_attributes()
    assert found is not None
    function, tables = found
    assert function is nn.Module.__getattr__
    module = nn.BatchNorm1d(2)
    assert all(type(vars(module)[table]) is dict for table in tables)
    assert function(module, "weight") is module._parameters["weight"]
    assert function(module, "running_mean") is module._buffers["running_mean"]


@pytest.mark.parametrize("name", _torch._SAME_BITS)
def test_prefer_foreach_changes_the_choice_for_lazy_tensors_alone(
    name: str, lazy: torch.Tensor
) -> None:
    choose = importlib.import_module(f"torch.optim.{name}")._default_to_fused_or_foreach
    assert choose([lazy, lazy], False) == (False, True)
    assert choose([lazy, lazy], True) == (False, False)
    assert choose([torch.ones(1)], False) == (False, False)


def test_prefer_foreach_lists_the_lazy_device(lazy: torch.Tensor) -> None:
    from torch.utils import _foreach_utils

    assert "lazy" in _foreach_utils._get_foreach_kernels_supported_devices()
    assert _foreach_utils._has_foreach_support([lazy], lazy.device)


def test_register_device_module_makes_a_namespace_and_keeps_it() -> None:
    module = torch.get_device_module("lazy")
    _torch.register_device_module("lazy", object())
    assert torch.get_device_module("lazy") is module


def test_accept_lazy_autocast_leaves_other_devices_alone() -> None:
    assert torch.is_autocast_enabled("lazy") is False
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.is_autocast_enabled("cpu") is True


def test_accept_lazy_attention_leaves_other_devices_alone(lazy: torch.Tensor) -> None:
    from torch.nn.modules import activation

    assert activation._check_arg_device(lazy)
    assert activation._check_arg_device(None)
    assert not activation._check_arg_device(torch.ones(1, device="meta"))


def test_accept_lazy_losses_chooses_as_on_the_physical_device(lazy: torch.Tensor) -> None:
    module = pytest.importorskip("torch.nn.modules.linear_cross_entropy_options")
    sizes = (8, 4, 16, torch.bfloat16)
    chosen = module.LinearCrossEntropyOptions()._adjust(*sizes, device=lazy.device)
    expected = module.LinearCrossEntropyOptions()._adjust(*sizes, device=torch.device("cpu"))
    assert chosen == expected
    assert chosen.acc_dtype is torch.float32


# -- attention -------------------------------------------------------------------------------------


def test_attention_switches_follow_sdpa_kernel() -> None:
    with sdpa_kernel(SDPBackend.MATH):
        flash, math, *_ = _torch.attention_switches()
    assert (flash, math) == (False, True)


def test_attention_choice_is_the_number_of_a_kernel() -> None:
    query = torch.zeros(1, 2, 4, 8)
    choice = _torch.attention_choice(query, query, query, 0.0, True, None)
    assert choice == SDPBackend.FLASH_ATTENTION.value
    with sdpa_kernel(SDPBackend.MATH):
        choice = _torch.attention_choice(query, query, query, 0.0, True, 0.5)
    assert choice == SDPBackend.MATH.value


# -- derivatives -----------------------------------------------------------------------------------


@loads_jit_decompositions
def test_has_tangent_finds_a_forward_mode_derivative() -> None:
    from torch.autograd import forward_ad

    assert not _torch.has_tangent(torch.ones(1))
    with forward_ad.dual_level():
        assert not _torch.has_tangent(torch.ones(1))
        assert _torch.has_tangent(forward_ad.make_dual(torch.ones(1), torch.ones(1)))


def test_on_default_dtype_is_told_of_changes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("set_default_dtype", "set_default_tensor_type"):
        monkeypatch.setattr(torch, name, getattr(torch, name))  # put back afterwards
    told: list[torch.dtype] = []

    def tell() -> None:
        told.append(torch.get_default_dtype())

    _torch.on_default_dtype(tell, tell)
    before = torch.get_default_dtype()
    try:
        torch.set_default_dtype(before)
        assert told == []
        torch.set_default_dtype(torch.float64)
        assert told == [before, torch.float64]
    finally:
        torch.set_default_dtype(before)


def test_above_autograd_makes_a_kernels_ops_differentiable_again() -> None:
    x = torch.ones(2, requires_grad=True)
    with _torch.below_autograd():
        assert (x * 2).grad_fn is None
        with _torch.above_autograd():
            assert (x * 2).grad_fn is not None
        assert (x * 2).grad_fn is None


def test_Kernels_are_put_in_place_and_taken_away() -> None:
    kernels = _torch.Kernels("MTIA", {torch.ops.aten.erfinv.default: lambda x: x})

    def there() -> bool:
        return torch._C._dispatch_has_kernel_for_dispatch_key("aten::erfinv", "MTIA")

    assert not there()
    kernels.set(True)
    kernels.set(True)
    assert there()
    kernels.set(False)
    kernels.set(False)
    assert not there()


@loads_jit_decompositions
def test_on_higher_derivatives_tells_of_levels_and_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward_ad = torch.autograd.forward_ad
    for name in ("enter_dual_level", "exit_dual_level"):
        monkeypatch.setattr(forward_ad, name, getattr(forward_ad, name))
    for module in (torch.autograd, torch.autograd.graph):
        monkeypatch.setattr(module, "_engine_run_backward", module._engine_run_backward)
    told: list[str] = []

    class Again:  # a context that can be entered again and again
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            told.append(f"into {self.name}")

        def __exit__(self, *_: object) -> None:
            told.append(f"out of {self.name}")

    _torch.on_higher_derivatives(Again("forward mode"), Again("again"))
    with forward_ad.dual_level():
        assert told == ["into forward mode"]
    assert told == ["into forward mode", "out of forward mode"]
    told.clear()
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    assert told == []
    torch.autograd.grad((x * x).sum(), x, create_graph=True)
    with warnings.catch_warnings():  # torch warns of the cycle this makes
        warnings.simplefilter("ignore")
        (x * x).sum().backward(create_graph=True)
    x.grad = None
    assert told == ["into again", "out of again"] * 2
    told.clear()
    torch.func.jvp(lambda t: t * t, (torch.ones(2),), (torch.ones(2),))
    assert told == ["into forward mode", "out of forward mode"]


def test_op_table_has_samples_for_every_entry_by_name() -> None:
    table = {entry.formatted_name: entry for entry in _torch.op_table()}
    assert len(table) > 500
    sample = next(iter(table["add"].sample_inputs("cpu", torch.float32)))
    assert isinstance(sample.input, torch.Tensor)


# -- TorchScript graphs ----------------------------------------------------------------------------


def _identity_graph(type_: Any) -> Any:
    graph = _torch.script_graph()
    value = graph.addInput()
    value.setType(type_)
    graph.registerOutput(value)
    return graph


def _clone_graph(memory_format: int) -> Any:
    graph = _torch.script_graph()
    inputs = [graph.addInput(), graph.insertConstant(memory_format)]
    graph.registerOutput(graph.insertNode(graph.create("aten::clone", inputs, 1)).output())
    return graph


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("Tensor", torch.ones(2)),
        ("Tensor[]", [torch.ones(2)]),
        ("int", 3),
        ("int[]", [3, 4]),
        ("int[][]", [[3], []]),
        ("(Tensor[], int[][], int[])", ([], [[1]], [2])),
    ],
)
def test_script_types_are_what_their_names_say(name: str, value: Any) -> None:
    function = _torch.script_function("f", _identity_graph(_torch.SCRIPT_TYPES[name]))
    assert str(function(value)) == str(value)
    with pytest.raises(RuntimeError, match="Expected a value of type"):
        function("none of them")


@pytest.mark.parametrize("memory_format", _torch.SCRIPT_MEMORY_FORMATS)
def test_script_memory_formats_are_torchs_numbers(memory_format: torch.memory_format) -> None:
    shape = (2, 3, 4, 5, 6) if "3d" in str(memory_format) else (2, 3, 4, 5)
    tensor = torch.ones(shape).transpose(0, 1)
    function = _torch.script_function(
        "f", _clone_graph(_torch.SCRIPT_MEMORY_FORMATS[memory_format])
    )
    assert function(tensor).stride() == tensor.clone(memory_format=memory_format).stride()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.complex64, torch.bfloat16])
def test_script_dtype_is_the_number_a_graph_gives(dtype: torch.dtype) -> None:
    graph = _torch.script_graph()
    node = graph.insertNode(graph.create("prim::dtype", [graph.addInput()], 1))
    node.output().setType(_torch.SCRIPT_TYPES["int"])
    graph.registerOutput(node.output())
    assert _torch.script_function("f", graph)(torch.ones(1).to(dtype)) == _torch.script_dtype(dtype)


def test_script_graph_is_empty() -> None:
    graph = _torch.script_graph()
    assert (list(graph.nodes()), list(graph.inputs()), list(graph.outputs())) == ([], [], [])


def test_script_function_runs_a_graph_on_its_inputs() -> None:
    graph = _torch.script_graph()
    inputs = [graph.addInput(), graph.addInput()]
    graph.registerOutput(graph.insertNode(graph.create("aten::mul", inputs, 1)).output())
    assert _torch.script_function("f", graph)(
        torch.full((2,), 3.0), torch.full((2,), 2.0)
    ).tolist() == [
        6.0,
        6.0,
    ]


def test_script_as_drawn_keeps_ops_nobody_looks_at_and_is_undone() -> None:
    """Batch norm writes to its statistics, and its schema denies it: dropped, they would be old."""
    graph = _torch.script_graph()
    x, mean, variance = (graph.addInput() for _ in range(3))
    none, training = graph.insertConstant(None), graph.insertConstant(True)
    numbers = [graph.insertConstant(0.5), graph.insertConstant(1e-5)]
    inputs = [x, none, none, mean, variance, training, *numbers]
    graph.insertNode(graph.create("aten::native_batch_norm", inputs, 3))
    graph.registerOutput(mean)
    function = _torch.script_function("f", graph)
    before = torch._C._get_graph_executor_optimize()
    with _torch.script_as_drawn():
        result = function(torch.ones(2, 3), torch.zeros(3), torch.ones(3))
    assert result.tolist() == [0.5] * 3
    assert torch._C._get_graph_executor_optimize() is before


@pytest.mark.parametrize("number", [2, 0.1, True, 1j, -0.0, float("nan"), 2**62 + 1])
def test_wrapped_number_gives_way_in_type_promotion_as_the_number_does(number: Any) -> None:
    wrapped = _torch.wrapped_number(number)
    assert repr(wrapped.item()) == repr(number)
    assert not wrapped.requires_grad
    for dtype in (torch.bool, torch.int8, torch.bfloat16, torch.float32, torch.complex64):
        tensor = torch.ones((), dtype=dtype)
        assert (tensor * wrapped).dtype == (tensor * number).dtype


def test_wrapped_number_is_plain_in_any_mode() -> None:
    with torpor.mode(), torch.no_grad(), torch.device("meta"):
        wrapped = _torch.wrapped_number(0.125)
    assert type(wrapped) is torch.Tensor
    assert wrapped.device.type == "cpu"


# -- compilers of fx graphs ------------------------------------------------------------------------


def traced_sine() -> tuple[torch.fx.GraphModule, list[torch.Tensor], Any]:
    mode = _torch.new_fake_mode()
    with mode:
        inputs = [torch.empty(3, 4).t()]
        module = make_fx(lambda x: (x.sin() + 1,))(*inputs)
    return module, inputs, mode


def test_new_fake_mode_is_a_new_one_and_refuses_real_tensors() -> None:
    mode = _torch.new_fake_mode()
    assert mode is not _torch.new_fake_mode()
    with mode:
        fake = torch.empty(2)
        with pytest.raises(Exception, match="FakeTensor"):
            fake + real_two()
    assert type(fake).__name__ == "FakeTensor"


def real_two() -> torch.Tensor:
    with _torch.without_modes():
        return torch.ones(2)


def test_last_traced_node_is_what_make_fx_added_last() -> None:
    seen = []

    def function(x: torch.Tensor) -> torch.Tensor:
        seen.append(_torch.last_traced_node().op)
        y = x.sin()
        seen.append(str(_torch.last_traced_node().target))
        return y

    make_fx(function)(torch.ones(2))
    assert seen == ["placeholder", "aten.sin.default"]


def test_inductor_decompositions_take_compound_ops_apart() -> None:
    assert aten.native_layer_norm.default in _torch.inductor_decompositions()


def test_inductor_options_have_dotted_names() -> None:
    assert {"max_autotune", "cpp.simdlen"} <= set(_torch.inductor_options())


@pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates
def test_inductor_compile_gives_a_function_of_a_list(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import compile_fx

    given = {}

    def compile_inner(module: Any, inputs: Any, **options: Any) -> Any:
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        given.update(options, visible=output.meta["user_visible_output_idxs"])
        return lambda boxed: module(*boxed)

    parameters = inspect.signature(compile_fx.compile_fx_inner).parameters
    assert list(parameters)[:2] == ["gm", "example_inputs"]
    monkeypatch.setattr(compile_fx, "compile_fx_inner", compile_inner)
    compiled = _torch.inductor_compile(*traced_sine(), {"cpp.simdlen": 1})
    assert given["visible"] == [0]
    assert given["is_inference"] is True
    assert not given["cudagraphs"]
    x = torch.randn(4, 3)
    assert torch.equal(compiled([x])[0], x.sin() + 1)


def test_inductor_settings_change_with_a_setting_and_are_the_same_text_otherwise() -> None:
    from torch._inductor import config

    before = _torch.inductor_settings()
    assert before is not None
    with config.patch({"cpp.simdlen": 1}):
        assert _torch.inductor_settings() not in (None, before)
    assert _torch.inductor_settings() == before


def test_inductor_settings_have_no_text_for_a_pass_of_somebodys_own() -> None:
    from torch._inductor import config

    with config.patch({"post_grad_custom_pre_pass": lambda graph: None}):
        assert _torch.inductor_settings() is None


@pytest.fixture(scope="module")
def compiled_sine() -> Any:
    from torpor.backends.inductor import runtime

    reason = runtime.unavailable()
    if reason is not None:
        pytest.skip(reason)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Inductor imports what torch deprecates
        return _torch.inductor_compile(*traced_sine(), {})


def test_inductor_module_is_the_source_with_its_kernels(compiled_sine: Any) -> None:
    found = _torch.inductor_module(compiled_sine)
    assert found is not None
    source, names, constants = found
    assert "def call(" in source
    assert callable(names["call"])
    assert constants == {}
    kernels = [name for name, thing in names.items() if name.startswith("cpp_fused")]
    assert kernels
    assert names[kernels[0]].__self__.__file__.endswith(".so")


def test_inductor_module_is_none_for_other_code() -> None:
    assert _torch.inductor_module(lambda inputs: inputs) is None


def test_inductor_pickle_is_none_for_other_code() -> None:
    assert _torch.inductor_pickle(lambda inputs: inputs) is None


def test_inductor_unpickle_gives_the_code_again(compiled_sine: Any) -> None:
    data = _torch.inductor_pickle(compiled_sine)
    assert data is not None
    _, inputs, mode = traced_sine()
    again = _torch.inductor_unpickle(data, inputs, mode)
    x = torch.randn(3, 4).t()
    assert torch.equal(again([x])[0], compiled_sine([x])[0])
    assert again.source_code == compiled_sine.source_code


def test_load_kernel_loads_a_library_that_inductor_made(compiled_sine: Any, tmp_path: Path) -> None:
    found = _torch.inductor_module(compiled_sine)
    assert found is not None
    kernel = next(thing for name, thing in found[1].items() if name.startswith("cpp_fused"))
    copied = tmp_path / "copied.so"
    copied.write_bytes(Path(kernel.__self__.__file__).read_bytes())
    inductors = kernel.__self__.__name__
    module = _torch.load_kernel(inductors, str(copied))
    assert callable(module.kernel)
    assert module.kernel is not kernel
    assert sys.modules[inductors] is kernel.__self__  # Inductor finds its own
    assert module not in sys.modules.values()


def test_load_kernel_refuses_what_is_no_library(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("no library")
    with pytest.raises(ImportError):
        _torch.load_kernel("some.kernel", str(tmp_path / "text.txt"))


@pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates
def test_kernels_in_background_are_waited_for_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    waited: list[Any] = []
    monkeypatch.setattr(AsyncCompile, "wait", lambda self, scope: waited.append(scope))
    monkeypatch.setattr(_torch, "_patched_wait", _torch._patched_wait.__wrapped__)
    compiler = AsyncCompile()
    with _torch.kernels_in_background() as finish:
        compiler.wait({"kernel": 1})
        assert waited == []
        other = threading.Thread(target=compiler.wait, args=({"kernel of another thread": 2},))
        other.start()
        other.join()
        assert waited == [{"kernel of another thread": 2}]
    finish()
    assert waited[1:] == [{"kernel": 1}]
    compiler.wait({"kernel": 3})
    assert waited[2:] == [{"kernel": 3}]


@pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates
@pytest.mark.parametrize(("works", "tried"), [(True, ["wide"]), (False, ["wide"])])
def test_best_vectors_work_tries_the_widest_alone(
    works: bool, tried: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch._inductor import cpu_vec_isa

    asked: list[str] = []

    class Vectors(str):
        def __bool__(self) -> bool:
            asked.append(self)
            return works

    assert bool(cpu_vec_isa.supported_vec_isa_list)
    known = [Vectors("matrix wide"), Vectors("wide"), Vectors("narrow")]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", known)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["narrow", "wide"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    monkeypatch.setattr(_torch, "try_best_vectors", _torch.try_best_vectors.__wrapped__)
    assert _torch.best_vectors_work() is works
    assert asked == tried
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "avx2")
    assert not _torch.best_vectors_work()


@pytest.mark.filterwarnings("ignore")  # Inductor imports what torch deprecates
def test_try_best_vectors_asks_on_another_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpu_vec_isa

    class Vectors(str):
        def __bool__(self) -> bool:
            return threading.current_thread() is not threading.main_thread()

    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", [Vectors("wide")])
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["wide"])
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    assert _torch.try_best_vectors.__wrapped__().result() is True


def test_tracing_with_tells_compilers_the_fake_mode() -> None:
    from torch._guards import TracingContext

    mode = _torch.new_fake_mode()
    with _torch.tracing_with(mode):
        assert TracingContext.get().fake_mode is mode


def test_ops_inductor_refused_are_read_off_its_error() -> None:
    from torch._inductor.exc import LoweringException

    error = LoweringException(ValueError("no"), aten.tan.default, [1], {})
    assert _torch.ops_inductor_refused(error) == {"aten.tan.default"}
    assert _torch.ops_inductor_refused(ValueError("no")) == set()


def test_dynamo_backends_are_listed_with_those_for_debugging() -> None:
    assert {"eager", "aot_eager", "inductor"} <= set(_torch.dynamo_backends())
    assert "torpor" not in _torch.dynamo_backends()


def test_dynamo_compiler_takes_a_module_and_inputs() -> None:
    module, inputs, _ = traced_sine()
    x = torch.randn(4, 3)
    assert torch.equal(_torch.dynamo_compiler("eager")(module, inputs)(x)[0], x.sin() + 1)


def test_inductor_prefers_channels_last_where_there_are_convolutions() -> None:
    def trace(function: Any, *sizes: tuple[int, ...]) -> torch.fx.GraphModule:
        return make_fx(function, tracing_mode="fake")(*map(torch.ones, sizes))

    convolution = trace(torch.conv2d, (2, 3, 8, 8), (128, 3, 3, 3))
    assert _torch.inductor_prefers_channels_last(convolution)
    assert not _torch.inductor_prefers_channels_last(trace(torch.sin, (2, 3)))


def test_dynamo_training_backend_compiles_forward_and_backward() -> None:
    compiled = []

    def compile_graph(module: torch.fx.GraphModule, shown: int, is_forward: bool) -> Any:
        compiled.append((shown, len(module.graph.output_node().args[0]), is_forward))
        return lambda args: module(*args)

    backend = _torch.dynamo_training_backend(compile_graph)
    function = torch.compile(lambda x: x.sin().sum(), backend=backend)
    x = torch.randn(3, requires_grad=True)
    function(x).backward()
    assert compiled == [(1, 2, True), (1, 1, False)]  # forward also keeps something for backward
    assert torch.allclose(x.grad, x.detach().cos())  # type: ignore[arg-type]  # it has one


def test_lazy_keys_put_a_concrete_tensor_under_autograd_of_lazy() -> None:
    assert _torch.lazy_keys("lazy") == ()
    arguments = ((2,), (1,), 0, None, torch.float32, torch.strided, torch.device("cpu"))
    made = _torch.make_wrapper(LazyTensor, *arguments, *_torch.lazy_keys("cpu"))
    keys = torch._C._dispatch_keys(made)
    for name in ("CPU", "Lazy", "AutogradLazy", "AutocastCPU"):
        assert keys.has(getattr(torch._C.DispatchKey, name))
    assert made.device == torch.device("cpu")


def test_shares_memory_notices_views_and_storages() -> None:
    tensor = torch.ones(3)
    assert not _torch.shares_memory(tensor)
    for look in (lambda t: t[1:], torch.Tensor.detach, torch.Tensor.untyped_storage):
        other = look(tensor)
        assert _torch.shares_memory(tensor)
        del other
        assert not _torch.shares_memory(tensor)


def test_memory_of_names_what_views_share() -> None:
    tensor = torch.ones(3)
    assert _torch.memory_of(tensor) == _torch.memory_of(tensor[1:])
    assert _torch.memory_of(tensor) != _torch.memory_of(tensor.clone())


def test_users_of_counts_tensors_on_a_memory() -> None:
    tensor = torch.ones(3)
    memory = _torch.memory_of(tensor)
    alone = _torch.users_of(memory)
    other = tensor.detach()
    assert _torch.users_of(memory) == alone + 1
    del other
    assert _torch.users_of(memory) == alone


def test_a_storage_alone_has_one_user() -> None:
    storage = torch.ones(3).untyped_storage()
    assert _torch.users_of(storage._cdata) == 1
    tensor = torch.empty(0).set_(storage)
    assert _torch.users_of(storage._cdata) == 2
    assert tensor.shape == (3,)


def test_untyped_gives_the_memory_of_both_forms_of_storages() -> None:
    tensor = torch.ones(3)
    memory = tensor.untyped_storage()
    assert _torch.untyped(memory) is memory
    assert _torch.untyped(_torch.typed_storage(tensor))._cdata == memory._cdata


class FakeGenerator:
    """A generator of a GPU, on a CPU: its state is a list that others may hold."""

    def __init__(self, state: list[int]) -> None:
        self.state = state

    def clone_state(self) -> Any:
        return FakeGenerator(list(self.state))

    def set_state(self, state: torch.Tensor) -> None:
        self.state[:] = state.tolist()

    def graphsafe_set_state(self, other: Any) -> None:
        self.state = other.state


@pytest.mark.parametrize("device", [0, "cuda:0", torch.device("cuda", 0)])
def test_set_cuda_states_by_copies_leaves_the_old_state_as_it_was(
    device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    old = [1, 2]
    generator = FakeGenerator(old)
    monkeypatch.setattr(torch.cuda, "default_generators", (generator,))
    with _torch.set_cuda_states_by_copies():
        torch.cuda.set_rng_state(torch.tensor([3, 4]), device)
    assert generator.state == [3, 4]
    assert old == [1, 2]


def test_leave_states_alone_holds_for_this_thread() -> None:
    from torch._dynamo.utils import preserve_rng_state

    expected = torch.rand(3, generator=torch.Generator().manual_seed(5))
    torch.manual_seed(5)
    with _torch.leave_states_alone(), preserve_rng_state():
        first = torch.rand(1)
    assert torch.equal(torch.cat([first, torch.rand(2)]), expected)
    with preserve_rng_state():
        drawn = torch.rand(1)
    assert torch.equal(torch.rand(1), drawn)


def test_set_cuda_states_by_copies_is_what_inductor_meets() -> None:
    from torch._dynamo.utils import preserve_rng_state

    assert "torch.cuda.set_rng_state(" in inspect.getsource(preserve_rng_state)
    assert hasattr(torch.Generator, "graphsafe_set_state")
    assert hasattr(torch.Generator, "clone_state")


def test_copy_each_copies_one_list_over_another() -> None:
    targets = [torch.zeros(2), torch.zeros(3, dtype=torch.int64)]
    _torch.copy_each(targets, [torch.ones(2), torch.tensor([1, 2, 3])])
    assert [target.tolist() for target in targets] == [[1, 1], [1, 2, 3]]


def test_cuda_stream_is_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "_cuda_getCurrentRawStream"
    if torch.cuda.is_available():
        assert _torch.cuda_stream(0) == torch.cuda.current_stream(0).cuda_stream
    monkeypatch.setattr(torch._C, name, lambda device: 7 + device, raising=False)
    assert _torch.cuda_stream(1) == 8


def test_end_allocating_to_pool_says_so_to_the_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[Any] = []
    names = ("_cuda_endAllocateToPool", "_cuda_releasePool")
    for name in names:
        assert hasattr(torch._C, name)
        monkeypatch.setattr(torch._C, name, lambda *args, name=name: said.append((name, *args)))
    _torch.end_allocating_to_pool(0, (0, 1))
    assert said == [(name, 0, (0, 1)) for name in names]


@pytest.mark.parametrize("started", [False, True])
def test_forget_cublas_workspaces_needs_a_device_that_was_used(
    started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bool] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: started)
    name = "_cuda_clearCublasWorkspaces"
    monkeypatch.setattr(torch._C, name, lambda: said.append(True), raising=False)
    _torch.forget_cublas_workspaces()
    assert said == [True] * started


def test_type_source_tells_who_knows_the_result() -> None:
    aten = torch.ops.aten
    assert _torch.type_source(aten.add.Tensor) == "meta"
    assert _torch.type_source(aten.linear.default) == "parts"
    assert _torch.type_source(aten.nonzero.default) == "fake"
    assert _torch.type_source(aten._foobar.default) == ""


def test_dynamo_graphs_counts_what_is_compiled() -> None:
    before = _torch.dynamo_graphs()
    torch.compile(lambda x: x + 1, backend="eager")(torch.ones(2))
    assert _torch.dynamo_graphs() == before + 1


def test_torch_lazy_system_runs_where_torpor_is_not_loaded(tmp_path: Path) -> None:
    source = Path(_torch.__file__).parent
    (tmp_path / "lazy_system.py").write_text(
        "import torch\n"
        "from torpor._torch import torch_lazy_system\n"
        "mark_step, wait, compiles = torch_lazy_system()\n"
        "x = torch.ones(2).to('lazy') + 1\n"
        "mark_step(); wait()\n"
        "print(compiles(), x.cpu().tolist())\n"
    )
    command = [sys.executable, "-P", str(source / "bench" / "bare.py"), "lazy_system"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout == "1 [2.0, 2.0]\n", done.stderr


def test_current_autograd_node_is_that_of_the_op_whose_derivative_is_computed() -> None:
    seen: list[Any] = []
    x = torch.ones(2, requires_grad=True)
    y = x.exp()
    y.register_hook(lambda grad: seen.append(_torch.current_autograd_node()))
    x.register_hook(lambda grad: seen.append(_torch.current_autograd_node()))
    y.sum().backward()
    assert _torch.current_autograd_node() is None
    assert [node.name() for node in seen] == ["ExpBackward0", "torch::autograd::AccumulateGrad"]


def test_next_sequence_number_is_given_to_the_next_op_and_known_to_its_derivative() -> None:
    x = torch.ones(2, requires_grad=True)
    number = _torch.next_sequence_number()
    y = x.exp()
    assert y.grad_fn is not None
    assert y.grad_fn._sequence_nr() == number
    assert _torch.next_sequence_number() == number + 1


def test_is_profiler_on_anywhere() -> None:
    assert not _torch.is_profiler_on()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.is_profiler_on()
    assert not _torch.is_profiler_on()


def test_is_profiler_on_this_thread_and_no_other() -> None:
    seen = []
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]):
        assert _torch.is_profiler_on_this_thread()
        other = threading.Thread(target=lambda: seen.append(_torch.is_profiler_on_this_thread()))
        other.start()
        other.join()
    assert seen == [False]
    assert not _torch.is_profiler_on_this_thread()


def test_profiler_span_shows_its_body() -> None:
    with (
        torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler,
        _torch.profiler_span("a span of torpor's"),
    ):
        torch.ones(1)
    assert "a span of torpor's" in {event.name for event in profiler.events()}


def test_source_of_op() -> None:
    library = torch.library.Library("tests_internals", "FRAGMENT")
    library.define("defined_here(Tensor x) -> Tensor")
    made = torch.library.custom_op("tests_internals::made_here", _made_here, mutates_args=())
    assert _torch.source_of_op("tests_internals::defined_here") == __file__
    assert _torch.source_of_op(made._qualname) == __file__
    assert _torch.source_of_op("aten::add.Tensor") is None


def _made_here(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


def test_is_size() -> None:
    arguments = {a.name: a.real_type for a in torch.ops.aten.slice.Tensor._schema.arguments}
    found = {name: _torch.is_size(type_) for name, type_ in arguments.items()}
    assert found == {"self": False, "dim": False, "start": True, "end": True, "step": True}
    assert _torch.is_size(torch.ops.aten.view.default._schema.arguments[1].real_type)


def test_OpenSizes() -> None:
    opened = _torch.OpenSizes({"s0": 37, "s1": 8})
    long, wide = opened.sizes["s0"], opened.sizes["s1"]
    type_ = TensorType.loose((wide, long), (long, 1), torch.float32, torch.device("cpu"))
    with opened.tracing():
        tensor = opened.tensor(type_, torch.device("cpu"))
        torch.ops.aten.view.default(tensor, [wide * long])
        assert opened.conditions() == []
        torch.ops.aten.slice.Tensor(tensor, 1, 0, 20)
        torch.ops.aten.add.Tensor(tensor, torch.empty(37))
    assert set(opened.conditions()) == {"s0 >= 20", "s0 == 37"}


def test_OpenSizes_formulas() -> None:
    opened = _torch.OpenSizes({"s0": 37, "s1": 8})
    long, wide = opened.sizes["s0"], opened.sizes["s1"]
    assert opened.formula(5) == 5
    assert opened.formula(3 * long * long + 1) == (((1, ()), (3, ("s0", "s0"))), 1)
    assert opened.formula((long + 1) // 4) == (((1, ((((1, ()), (1, ("s0",))), 4),)),), 1)
    assert opened.formula(long % 5) is None
    assert opened.at((long + 1) // 4 * wide, {"s0": 11, "s1": 2}) == 6
    assert opened.conditions() == []
    assert opened.formula(torch.sym_min(long, wide)) == (((1, ("s1",)),), 1)
    assert opened.conditions() in (["s1 <= s0"], ["s0 >= s1"])


def test_fold_known_sizes() -> None:
    opened = _torch.OpenSizes({"s0": 37, "s1": 8})
    long, wide = opened.sizes["s0"], opened.sizes["s1"]

    def scaled(x: torch.Tensor, long: int, wide: int) -> torch.Tensor:
        y = x * (long / (long - 1)) * (wide / 3)
        torch._check(long == 37)
        return y

    with opened.mode:
        module = make_fx(scaled)(torch.empty(long, wide), long, wide)
        _torch.fold_known_sizes(module)
    scales = module.graph.find_nodes(op="call_function", target=torch.ops.aten.mul.Tensor)
    numbers = [node.args[1] for node in scales]
    assert numbers[0] == 37 / 36
    assert isinstance(numbers[1], torch.fx.Node)  # of a size that is open
    assert torch.equal(module(torch.ones(37, 8), 37, 8), scaled(torch.ones(37, 8), 37, 8))


def test_start_inductor_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.async_compile import AsyncCompile

    asked: list[bool] = []
    monkeypatch.setattr(AsyncCompile, "use_process_pool", lambda: asked.append(True))
    _torch.start_inductor_workers.cache_clear()
    _torch.start_inductor_workers()
    _torch.start_inductor_workers()
    _torch.start_inductor_workers.cache_clear()
    assert asked == [True]


def test_weak_memories() -> None:
    tensors = [torch.ones(3), torch.ones(3)]
    tensors.append(tensors[0][1:])
    one, two, three = names = [memory.cdata for memory in _torch.weak_memories(tensors)]
    assert names == list(map(_torch.memory_of, tensors))
    assert one == three != two
    memories = _torch.weak_memories(tensors)
    tensors.clear()
    others = [torch.ones(3) for _ in range(100)]
    assert all(memory.expired() for memory in memories)
    assert {memory.cdata for memory in memories}.isdisjoint(map(_torch.memory_of, others))


def test_window_on() -> None:
    class Kept:
        pass

    owner, kept = torch.arange(12.0), Kept()
    part = owner[2:8].view(2, 3).t()
    window, alive = _torch.window_on(part, kept), weakref.ref(kept)
    assert torch.equal(window, part)
    assert (window.stride(), window.storage_offset()) == (part.stride(), part.storage_offset())
    owner.fill_(7)
    assert window.tolist() == [[7, 7]] * 3
    memory = _torch.memory_of(window)
    assert memory != _torch.memory_of(owner)
    users = _torch.users_of(memory)
    view = window[1:]
    assert _torch.users_of(memory) == users + 1
    del kept, window
    assert alive() is not None
    del view
    assert alive() is None
    nothing = torch.empty(0)
    assert _torch.window_on(nothing, None) is nothing


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_window_on_a_gpu() -> None:
    owner = torch.arange(12.0, device="cuda")
    window = _torch.window_on(owner.view(3, 4).t(), None)
    owner.fill_(7)
    assert window.tolist() == [[7, 7, 7]] * 4
    assert window.dtype is torch.float32


def test_fakes_by_decomposition() -> None:
    aten = torch.ops.aten
    assert _torch.fakes_by_decomposition(aten.upsample_bilinear2d.default)
    assert not _torch.fakes_by_decomposition(aten.mm.default)
    assert not _torch.fakes_by_decomposition(aten.convolution.default)


# -- parameters that become lazy in place ----------------------------------------------------------


def test_is_held_by_a_graph_and_by_what_accumulates_gradients() -> None:
    x = torch.ones(2).requires_grad_()
    assert not _torch.is_held(x)
    loss = (x * x).sum()
    assert _torch.is_held(x)
    loss.backward()
    assert _torch.is_held(x)
    del loss
    assert not _torch.is_held(x)


def test_swap_keeps_hooks_with_the_object() -> None:
    x, y, calls = torch.ones(2).requires_grad_(), torch.zeros(2).requires_grad_(), []
    handle = x.register_hook(lambda g: calls.append("before"))
    x.register_post_accumulate_grad_hook(lambda t: calls.append("after"))
    _torch.swap(x, y)
    assert (x.tolist(), y.tolist()) == ([0.0, 0.0], [1.0, 1.0])
    x.sum().backward()
    handle.remove()
    x.sum().backward()
    assert calls == ["before", "after", "after"]


def test_end_gradients_of_what_a_finished_graph_holds_alone() -> None:
    x = torch.ones(2).requires_grad_()
    assert not _torch.end_gradients(x, "too late")
    loss = (x * 2).sum()
    assert _torch.end_gradients(x, "too late")
    with pytest.raises(RuntimeError, match="too late"):
        loss.backward()
    other = (y := torch.ones(2).requires_grad_()) * y
    assert not _torch.end_gradients(y, "saved")
    assert other.requires_grad


def test_may_change_while_a_finished_graph_holds_what_accumulates_and_nothing_else() -> None:
    x = torch.ones(2).requires_grad_()
    assert _torch.may_change(x)
    loss = (x * 2).sum()
    assert _torch.may_change(x)
    with torch.no_grad():
        assert _torch.may_change(x)
    loss = (x * x).sum()
    assert not _torch.may_change(x)
    loss.backward()
    assert _torch.may_change(x)
    accumulator = torch.autograd.graph.get_gradient_edge(x).node
    assert not _torch.may_change(x)
    del accumulator
    assert _torch.may_change(x)


def test_pass_gradients_on_to_what_the_tensor_has_become() -> None:
    x, seen = torch.ones(2).requires_grad_(), []
    x.register_hook(lambda g: seen.append("hook") or 3 * g)
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t is x))
    loss = (x * 2).sum()
    _torch.pass_gradients_on(x, lambda gradient, tensor: gradient + tensor.detach())
    _torch.swap(x, torch.zeros(2).requires_grad_())
    loss.backward()
    assert x.grad is not None
    assert x.grad.tolist() == [6.0, 6.0]
    assert seen == ["hook", True]


def test_is_in_backward_while_hooks_of_gradients_run() -> None:
    x, seen = torch.ones(2).requires_grad_(), []
    x.register_hook(lambda _: seen.append(_torch.is_in_backward()))
    x.sum().backward()
    assert seen == [True]
    assert not _torch.is_in_backward()


def test_is_distributed_while_there_is_a_process_group() -> None:
    assert not _torch.is_distributed()
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        assert _torch.is_distributed()
    finally:
        torch.distributed.destroy_process_group()


def test_finish_gpu_asks_no_gpu_to_start() -> None:
    before = torch.cuda.is_initialized()
    _torch.finish_gpu()
    assert torch.cuda.is_initialized() == before


def test_on_move_goes_around_every_move_of_a_module(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "_apply", nn.Module._apply)
    seen: list[str] = []

    def around(original: Any) -> Any:
        def apply(self: Any, fn: Any, recurse: bool = True) -> Any:
            seen.append(type(self).__name__)
            return original(self, fn, recurse)

        return apply

    _torch.on_move(around)
    nn.Sequential(nn.Linear(1, 1)).double()
    assert seen == ["Sequential", "Linear"]


def test_on_set_data_is_asked_about_lazy_data_alone() -> None:
    x, y = torch.ones(2), torch.zeros(2)
    x.data = y
    assert x.data_ptr() == y.data_ptr()
    x.data = torpor.lazy(y + 3)
    assert torpor.is_lazy(x)
    assert x.tolist() == x.data.tolist() == [3.0, 3.0]


def test_on_parameter_groups_goes_around_what_every_optimizer_calls(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        torch.optim.Optimizer, "add_param_group", torch.optim.Optimizer.add_param_group
    )
    seen: list[int] = []

    def around(original: Any) -> Any:
        def add(self: Any, group: Any) -> None:
            original(self, group)
            seen.append(len(self.param_groups[-1]["params"]))

        return add

    _torch.on_parameter_groups(around)
    torch.optim.Adam(nn.Linear(1, 1).parameters())
    assert seen == [2]


def test_on_compile_is_told_of_modules_compiled_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nn.Module, "compile", nn.Module.compile)
    seen: list[nn.Module] = []
    _torch.on_compile(seen.append)
    module = nn.Linear(1, 1)
    module.compile(backend="eager")
    assert seen == [module]
    assert _torch.is_compiled(module)


def test_on_registration_is_told_of_parameters_buffers_and_modules() -> None:
    seen: list[str] = []
    hooks = nn.modules.module
    tables = (
        hooks._global_parameter_registration_hooks, hooks._global_buffer_registration_hooks,
        hooks._global_module_registration_hooks,
    )  # fmt: skip
    before = [dict(table) for table in tables]
    _torch.on_registration(lambda module, name, value: seen.append(name))
    try:
        module = nn.Module()
        module.a = nn.Parameter(torch.ones(1))
        module.register_buffer("b", torch.ones(1))
        module.b = torch.zeros(1)
        module.c = nn.Identity()
    finally:
        for table, old in zip(tables, before, strict=True):
            for key in set(table) - set(old):
                del table[key]
    assert seen == ["a", "b", "b", "c"]


def test_is_compiled_tells_modules_that_torch_compile_runs() -> None:
    module = nn.Linear(1, 1)
    assert not _torch.is_compiled(module)
    assert _torch.is_compiled(torch.compile(module, backend="eager"))


def test_is_tracing_inside_a_transform() -> None:
    seen = []
    torch.func.vmap(lambda x: (seen.append(_torch.is_tracing()), x)[1])(torch.ones(2))
    assert seen == [True]
    assert not _torch.is_tracing()


def test_modes_are_those_that_are_active() -> None:
    with torpor.mode():
        assert [type(mode).__name__ for mode in _torch.modes()] == ["LazyMode"]
    assert _torch.modes() == []


def test_users_besides_are_tensors_and_storages_on_the_same_memory() -> None:
    x = torch.ones(4)
    half = x[:2]
    assert _torch.users_besides([x])
    assert not _torch.users_besides([x, half])
    del half
    assert not _torch.users_besides([x])
    memory = x.untyped_storage()
    assert _torch.users_besides([x])
    del memory
    assert not _torch.users_besides([x])


def test_is_data_worker_only_in_workers() -> None:
    loader = torch.utils.data.DataLoader(_AsksForWorkers(), num_workers=1)
    assert [bool(batch) for batch in loader] == [True]
    assert not _torch.is_data_worker()


class _AsksForWorkers(torch.utils.data.Dataset[bool]):
    def __len__(self) -> int:
        return 1

    def __getitem__(self, i: int) -> bool:
        return _torch.is_data_worker()


def test_accept_lazy_states_of_generators() -> None:
    state = torch.get_rng_state()
    expected = torch.rand(1)
    torch.set_rng_state(torpor.lazy(state))
    assert torch.equal(torch.rand(1), expected)


# -- parts of torch that meet lazy tensors without an op -------------------------------------------


def test_after_import_now_or_when_a_module_is_imported(tmp_path: Path) -> None:
    (tmp_path / "later.py").write_text("value = 1")
    script = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "from torpor import _torch\n"
        "met = []\n"
        "_torch.after_import('later', met.append)\n"
        "assert 'later' not in sys.modules and not met\n"
        "import later\n"
        "assert met == [later] and later.__loader__ is later.__spec__.loader\n"
        "_torch.after_import('later', met.append)\n"
        "assert met == [later, later]\n"
        "assert 'torch._dynamo' not in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True)


def test_replace_function_wherever_torch_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def shown() -> int:
        return 1

    for module in (torch, torch.jit):
        monkeypatch.setattr(module, "shown", shown, raising=False)
    _torch.replace_function("torch.jit.shown", lambda original: lambda: original() + 1)
    assert torch.shown() == torch.jit.shown() == 2
    _torch.replace_function("torch.jit.there_is_none", lambda original: original)
    assert not hasattr(torch.jit, "there_is_none")


def test_without_dispatch_modes() -> None:
    with torpor.mode():
        with _torch.without_dispatch_modes():
            assert _torch.modes() == []
            assert not torpor.is_lazy(torch.ones(2))
        assert torpor.is_lazy(torch.ones(2))


def test_modes() -> None:
    assert _torch.modes() == []
    with torpor.mode():
        assert [type(mode).__name__ for mode in _torch.modes()] == ["LazyMode"]


def test_on_dynamo_frame_is_what_torchdynamo_calls() -> None:
    from torch._dynamo import convert_frame, types
    from torch._dynamo.variables import builder

    assert "meets_lazy" in convert_frame.CatchErrorsWrapper.__call__.__code__.co_freevars
    assert "is_lazy" in builder.VariableBuilder.wrap_tensor.__code__.co_freevars
    made = _torch._uncompiled()
    assert made.guarded_code is None
    assert made.apply_to_code is False
    assert made.frame_exec_strategy.recursive_action == types.FrameAction.SKIP


def test_make_fakes_with_a_type_and_the_device() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensor = torch.ones(2, 3, device="lazy").t()
    fake = FakeTensorMode().from_tensor(tensor)
    assert (fake.shape, fake.stride(), fake.device) == ((3, 2), (1, 3), tensor.device)
    assert not isinstance(fake, LazyTensor)


def _script(module: nn.Module) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return torch.jit.script(module)


def _is_torpors(function: Any) -> bool:
    return "torpor" in function.__code__.co_filename


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_on_script_call(monkeypatch: pytest.MonkeyPatch) -> None:
    torchbind = importlib.import_module("torch._higher_order_ops.torchbind")
    for kind in (torch._C.ScriptFunction, torch._C.ScriptMethod):
        monkeypatch.setattr(kind, "__call__", kind.__call__)
    monkeypatch.setattr(torchbind, "_orig_scriptmethod_call", torchbind._orig_scriptmethod_call)
    called: list[str] = []

    def around(call: Any) -> Any:
        return lambda self, *args: called.append(type(self).__name__) or call(self, *args)

    module, function = _script(nn.Linear(2, 2)), torch.jit.trace(torch.sin, (torch.ones(2),))
    _torch.on_script_call(around)
    module(torch.ones(2)), function(torch.ones(2))
    with torchbind.enable_torchbind_tracing():
        pass
    module(torch.ones(2))
    assert called == ["ScriptMethod", "ScriptFunction", "ScriptMethod"]


def test_on_script_save() -> None:
    writers = [getattr(torch._C.ScriptModule, name, None) for name in _torch._SCRIPT_WRITERS]
    assert all(_is_torpors(writer) for writer in writers[:2])


def test_on_script_move() -> None:
    assert _is_torpors(torch.jit.RecursiveScriptModule._apply)


def test_script_module_and_its_tensors() -> None:
    module = _script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2)))
    inside = _torch.script_module(module)
    names = [name for _, name, _ in _torch.script_tensors(inside)]
    assert names[:2] == ["weight", "bias"]
    assert "running_mean" in names
    holder, name, tensor = next(_torch.script_tensors(inside))
    holder.setattr(name, torch.zeros_like(tensor))
    assert not next(module.parameters()).any()


def test_script_tensors() -> None:
    tensors = list(_torch.script_tensors(_torch.script_module(_script(nn.Linear(2, 2)))))
    assert [name for _, name, _ in tensors] == ["weight", "bias"]


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_script_has_constants() -> None:
    weight = torch.ones(2)
    given = (torch.ones(2),)
    assert _torch.script_has_constants(torch.jit.trace(lambda a: a * weight, given))
    assert not _torch.script_has_constants(torch.jit.trace(lambda a: a * 2, given))


@pytest.mark.filterwarnings("ignore:`torch.jit.:DeprecationWarning")
def test_script_owner_of_a_method_and_of_a_function() -> None:
    module = _script(nn.Linear(2, 2))
    assert _torch.script_owner(module.forward).hasattr("weight")
    assert _torch.script_owner(torch.jit.trace(torch.sin, (torch.ones(2),))) is None


def test_on_subclass_is_asked() -> None:
    for make in (torch.Tensor._make_subclass, torch.Tensor.__new__):
        assert make.__code__.co_filename.endswith("subclasses.py")

    class Sub(torch.Tensor):
        pass

    assert type(torch.ones(2).as_subclass(Sub)) is type(Sub([1.0])) is Sub


def test_has_own_dispatch() -> None:
    class Sub(torch.Tensor):
        pass

    assert not _torch.has_own_dispatch(Sub)
    assert _torch.has_own_dispatch(LazyTensor)


def test_on_higher_order_op_is_asked() -> None:
    from torch._ops import HigherOrderOperator

    assert HigherOrderOperator.dispatch.__code__.co_filename.endswith("foreign.py")


def test_on_set_data_leaves_plain_tensors_as_they_are() -> None:
    x, y = torch.ones(2).requires_grad_(), torch.zeros(3)
    x.data = y
    assert (x.tolist(), x.requires_grad, x.data.requires_grad) == ([0, 0, 0], True, False)
    assert x.data_ptr() == y.data_ptr()


def test_inductor_has_loops_over_rows_that_share_a_buffer() -> None:
    """What `_mend_local_buffers` changes: `tests/backends/test_sizes.py` holds that it mends."""
    from torch._inductor.codegen import cpp
    from torch._inductor.virtualized import V

    check: Any = cpp.OuterLoopFusedSchedulerNode.check_outer_fusion_loop_level_attr
    found = inspect.signature(inspect.unwrap(check)).parameters
    assert list(found) == ["self", "cpp_kernel_proxy_list", "outer_loop_fusion_depth"]
    assert getattr(V.local_buffer_context, "local_buffers", None) is None
    assert cpp.LoopLevel.steps == 1
