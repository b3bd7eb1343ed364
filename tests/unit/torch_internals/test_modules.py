"""What `_torch.modules` takes from inside torch still is what torpor takes it for."""

import importlib
from typing import Any

import pytest
import torch
from torch import nn

from tests.loud_hooks import LOUD_HOOKS
from torpor import _torch
from torpor._torch.modules import _CALL_NAMES, _SAME_BITS


def test_register_step_pre_hook_is_told_before_every_optimizer_step() -> None:
    parameter, seen = torch.nn.Parameter(torch.ones(1)), []
    handle = _torch.register_step_pre_hook(lambda *reported: seen.append(parameter.item()))
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


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # Inductor's import
@pytest.mark.parametrize("register", [_torch.register_step_pre_hook, _torch.register_step_hook])
def test_step_hooks_are_called_by_compiled_code_and_not_inlined(register: Any) -> None:
    inlined: list[bool] = []

    def hook(*reported: Any) -> None:
        inlined.append(torch.compiler.is_dynamo_compiling())

    weight = nn.Parameter(torch.ones(1))
    weight.grad = torch.ones(1)
    optimizer = torch.optim.SGD([weight], lr=0.1)
    handle = register(hook)
    try:
        torch.compile(optimizer.step, backend="eager")()
    finally:
        handle.remove()
        torch.compiler.reset()
    assert inlined == [False]


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
    assert names[: len(_CALL_NAMES)] == _CALL_NAMES


def test_module_attributes_are_looked_for_in_three_tables() -> None:
    found = _torch.module_attributes()
    assert found is not None
    function, tables = found
    assert function is nn.Module.__getattr__
    module = nn.BatchNorm1d(2)
    assert all(type(vars(module)[table]) is dict for table in tables)
    assert function(module, "weight") is module._parameters["weight"]
    assert function(module, "running_mean") is module._buffers["running_mean"]


@pytest.mark.parametrize("name", _SAME_BITS)
def test_prefer_foreach_changes_the_choice_for_lazy_tensors_alone(
    name: str, lazy: torch.Tensor
) -> None:
    choose = importlib.import_module(f"torch.optim.{name}")._default_to_fused_or_foreach
    assert choose([lazy, lazy.clone()], False) == (False, True)
    assert choose([lazy, lazy], False) == (False, False)  # in turn, as eager does
    assert choose([lazy, lazy.view(-1)], False) == (False, False)
    assert choose([lazy, lazy.clone()], True) == (False, False)
    assert choose([torch.ones(1)], False) == (False, False)


def test_prefer_foreach_lists_the_lazy_device(lazy: torch.Tensor) -> None:
    from torch.utils import _foreach_utils

    assert "lazy" in _foreach_utils._get_foreach_kernels_supported_devices()
    assert _foreach_utils._has_foreach_support([lazy], lazy.device)


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


def test_after_zero_grad_a_hook_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    for owner in (torch.optim.Optimizer, torch.nn.Module):
        monkeypatch.setattr(owner, "zero_grad", owner.zero_grad)
    seen = []
    layer = torch.nn.Linear(2, 2)
    _torch.after_zero_grad(lambda: seen.append(layer.weight.grad is None))
    layer(torch.ones(2)).sum().backward()
    torch.optim.SGD(layer.parameters(), lr=0.1).zero_grad()
    layer.zero_grad()
    assert seen == [True, True]


def test_has_hooks_sees_what_surrounds_forward() -> None:
    module = torch.nn.Linear(2, 2)
    assert not _torch.has_hooks(module)
    module.register_forward_hook(lambda *args: None)
    assert _torch.has_hooks(module)
