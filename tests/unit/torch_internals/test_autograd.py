"""What `_torch.autograd` takes from inside torch still is what torpor takes it for."""

import subprocess
import sys
import threading
import warnings
import weakref
from typing import Any

import pytest
import torch

from tests.comparison import loads_jit_decompositions
from torpor import _torch


def test_is_differentiating_forward_at_a_dual_level() -> None:
    with torch.autograd.forward_ad.dual_level():
        assert _torch.is_differentiating_forward()
    assert not _torch.is_differentiating_forward()


def test_has_saved_tensors_hooks_inside_them() -> None:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        assert _torch.has_saved_tensors_hooks()
    assert not _torch.has_saved_tensors_hooks()


@loads_jit_decompositions
def test_has_tangent_finds_a_forward_mode_derivative() -> None:
    from torch.autograd import forward_ad

    assert not _torch.has_tangent(torch.ones(1))
    with forward_ad.dual_level():
        assert not _torch.has_tangent(torch.ones(1))
        assert _torch.has_tangent(forward_ad.make_dual(torch.ones(1), torch.ones(1)))


@loads_jit_decompositions
def test_on_higher_derivatives_tells_of_levels_and_of_graphs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    forward_ad = torch.autograd.forward_ad
    for name in ("enter_dual_level", "exit_dual_level"):
        monkeypatch.setattr(forward_ad, name, getattr(forward_ad, name))
    for module in (torch.autograd, torch.autograd.graph):
        monkeypatch.setattr(module, "_engine_run_backward", module._engine_run_backward)
    reported: list[str] = []

    class Again:  # a context that can be entered again and again
        def __init__(self, name: str) -> None:
            self.name = name

        def __enter__(self) -> None:
            reported.append(f"into {self.name}")

        def __exit__(self, *_: object) -> None:
            reported.append(f"out of {self.name}")

    _torch.on_higher_derivatives(Again("forward mode"), Again("again"))
    with forward_ad.dual_level():
        assert reported == ["into forward mode"]
    assert reported == ["into forward mode", "out of forward mode"]
    reported.clear()
    x = torch.ones(2, requires_grad=True)
    (x * x).sum().backward()
    assert reported == []
    torch.autograd.grad((x * x).sum(), x, create_graph=True)
    with warnings.catch_warnings():  # torch warns of the cycle this makes
        warnings.simplefilter("ignore")
        (x * x).sum().backward(create_graph=True)
    x.grad = None
    assert reported == ["into again", "out of again"] * 2
    reported.clear()
    torch.func.jvp(lambda t: t * t, (torch.ones(2),), (torch.ones(2),))
    assert reported == ["into forward mode", "out of forward mode"]


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


def test_is_held_by_a_graph_and_by_what_accumulates_gradients() -> None:
    x = torch.ones(2).requires_grad_()
    assert not _torch.is_held(x)
    loss = (x * x).sum()
    assert _torch.is_held(x)
    loss.backward()
    assert _torch.is_held(x)
    del loss
    assert not _torch.is_held(x)


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


def test_backward_passes_of_this_thread_are_counted() -> None:
    before = _torch.backward_passes()
    x = torch.ones(2).requires_grad_()
    (x * x).sum().backward()
    torch.autograd.grad((x * x).sum(), x)
    thread = threading.Thread(target=lambda: (x * x).sum().backward())
    thread.start()
    thread.join()
    assert _torch.backward_passes() == before + 2


def test_pass_gradients_on_to_what_the_tensor_has_become() -> None:
    x, seen = torch.ones(2).requires_grad_(), []
    x.register_hook(lambda g: seen.append("hook") or 3 * g)
    x.register_post_accumulate_grad_hook(lambda t: seen.append(t is x))
    loss = (x * 2).sum()
    _torch.pass_gradients_on(x, lambda gradient, tensor: gradient + tensor.detach())
    _torch.swap(x, torch.zeros(2).requires_grad_())
    assert not weakref.getweakrefs(x)  # `torch.utils.swap_tensors` refuses it then
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


def test_compiled_node_is_that_of_a_compiled_call() -> None:
    x = torch.ones(3, requires_grad=True)
    result = torch.compile(torch.sin, backend="aot_eager")(x)
    assert _torch.compiled_node([None, result]) is result.grad_fn
    assert _torch.compiled_node([None, x, x.sin()]) is None


def test_backward_keeps_graph_for_later_passes() -> None:
    x, kept = torch.ones(3, requires_grad=True), []
    result = x.sin()
    result.register_hook(lambda grad: kept.append(_torch.backward_keeps_graph()))
    result.sum().backward(retain_graph=True)
    result.sum().backward()
    assert kept == [True, False]


def test_autocast_states_tell_dtype_and_device() -> None:
    assert not any(on for _, _, on in _torch.autocast_states())
    with torch.autocast("cpu", torch.float16):
        assert ("cpu", torch.float16, True) in _torch.autocast_states()


def test_has_gradient_hooks_sees_both_kinds_of_them() -> None:
    for name in ("register_hook", "register_post_accumulate_grad_hook"):
        tensor = torch.ones(2, requires_grad=True)
        assert not _torch.has_gradient_hooks(tensor)
        handle = getattr(tensor, name)(lambda _: None)
        assert _torch.has_gradient_hooks(tensor)
        handle.remove()
        assert not _torch.has_gradient_hooks(tensor)


def test_had_unusual_backward_tells_of_graphs_and_of_autocast() -> None:
    code = """
import torch, torpor
from torpor import _torch
x = torch.ones(2, requires_grad=True)
found = []
torch.nn.Linear(2, 2)(x).sum().backward()
found.append(_torch.had_unusual_backward())
with torch.autocast("cpu", torch.bfloat16):
    (x * 2).sum().backward()
found.append(_torch.had_unusual_backward())
print(found)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[False, True]"
