"""Autograd: nodes and hooks of its graphs, references to leaves, forward mode, and the profiler.

Uses `torch._C._autograd`, the backward engine, and the gradient accumulators of leaves.
"""

from __future__ import annotations

import functools
import sys
import threading
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import _C
from torch.autograd import profiler

from torpor._torch.dispatch import is_transforming


def has_saved_tensors_hooks() -> bool:
    """Whether hooks of `torch.autograd.graph.saved_tensors_hooks` are active on this thread."""
    return _C._autograd._top_saved_tensors_default_hooks(False) is not None


def is_in_backward() -> bool:
    """Whether autograd is running backward on this thread."""
    return int(_C._current_graph_task_id()) != -1


current_autograd_node: Callable[[], Any] = _C._current_autograd_node
"""The autograd node that this thread is running; None outside of backward."""

next_sequence_number: Callable[[], int] = _C._autograd._get_sequence_nr
"""The sequence number that autograd will give to the next node on this thread."""


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether the tensor has hooks that are called with its gradient, or after that is added."""
    return bool(tensor._backward_hooks or tensor._post_accumulate_grad_hooks)


def has_tangent(tensor: torch.Tensor) -> bool:
    """Whether the tensor has a forward-mode tangent."""
    return torch.autograd.forward_ad.unpack_dual(tensor).tangent is not None if _level() else False


def _level() -> bool:
    return torch.autograd.forward_ad._current_level >= 0


def is_differentiating_forward() -> bool:
    """Whether forward-mode differentiation or a function transform is active on this thread."""
    return _level() or is_transforming()


def on_higher_derivatives(
    forward_mode: AbstractContextManager[Any], again: AbstractContextManager[Any]
) -> None:
    """Enter `forward_mode` at each forward-mode level, `again` in each `create_graph` backward."""
    forward_ad: Any = torch.autograd.forward_ad
    enter, leave = forward_ad.enter_dual_level, forward_ad.exit_dual_level

    @functools.wraps(enter)
    def enter_dual_level() -> Any:
        level = enter()
        forward_mode.__enter__()
        return level

    @functools.wraps(leave)
    def exit_dual_level(*, level: int | None = None) -> None:
        leave(level=level)
        forward_mode.__exit__(None, None, None)

    forward_ad.enter_dual_level, forward_ad.exit_dual_level = enter_dual_level, exit_dual_level
    engine = torch.autograd.graph._engine_run_backward

    @functools.wraps(engine)
    def run_backward(outputs: Any, *args: Any, **kwargs: Any) -> Any:
        _passes.count += 1
        if args[2] or torch._C._is_any_autocast_enabled():
            _UNUSUAL.add("backward")
        if args[2]:  # gradients, keep_graph, create_graph, ...
            with again:
                return engine(outputs, *args, **kwargs)
        return engine(outputs, *args, **kwargs)

    for module in (torch.autograd, torch.autograd.graph):  # one imports it by name
        setattr(module, "_engine_run_backward", run_backward)  # noqa: B010  # untyped names


class _Passes(threading.local):
    count = 0


_passes = _Passes()


def backward_passes() -> int:
    """How many backward passes this thread has started, since `on_higher_derivatives`."""
    return _passes.count


_UNUSUAL: set[str] = set()


def had_unusual_backward() -> bool:
    """Whether any backward pass in this process created a graph or ran under autocast."""
    return bool(_UNUSUAL)


def _holders(tensor: torch.Tensor) -> int:
    """How many references torch has to a tensor; countless if there are weak ones, as a profiler's.

    Those forbid to swap it, even with itself, which changes nothing.
    """
    try:
        torch._C._swap_tensor_impl(tensor, tensor)
    except RuntimeError:
        return sys.maxsize
    return tensor._use_count()  # type: ignore[attr-defined,no-any-return]  # not in the stubs


def is_held(tensor: torch.Tensor, holders: int = 1) -> bool:
    """Whether torch holds the tensor more than `holders` times, so that some graph does."""
    return _holders(tensor) > holders


def may_change(tensor: torch.Tensor, holders: int = 1) -> bool:
    """Whether no autograd graph needs the tensor itself, apart from `holders` known references.

    Its gradient accumulator may hold it too, kept alive by a loss that was not dropped; but not if
    Python holds the accumulator, which means that hooks are registered on it.
    """
    if _holders(tensor) <= holders:
        return True
    if _holders(tensor) != holders + 1 or not tensor.is_leaf or not tensor.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    return _holders(tensor) == holders + 1 and sys.getrefcount(node) <= _sole_references()


@functools.cache
def _sole_references() -> int:
    """The reference count of an accumulator that only a graph holds, as seen by `may_change`."""
    with torch.inference_mode(False), torch.enable_grad():
        leaf = torch.ones((), requires_grad=True)
        kept = leaf * 2
    node = torch.autograd.graph.get_gradient_edge(leaf).node
    count = sys.getrefcount(node)
    del kept
    return count


def end_gradients(tensor: torch.Tensor, message: str) -> bool:
    """Make backward through earlier graphs raise `message`; False if more than that holds it.

    The gradient accumulator of a leaf holds the leaf, for as long as a graph needs it.
    """
    if _holders(tensor) != 2 or not tensor.is_leaf or not tensor.requires_grad:
        return False
    node = torch.autograd.graph.get_gradient_edge(tensor).node
    if _holders(tensor) != 2:  # the query itself created the accumulator
        return False

    def refuse(_: Any) -> None:
        raise RuntimeError(message)

    node.register_prehook(refuse)
    return True


def pass_gradients_on(
    tensor: torch.Tensor, convert: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
) -> None:
    """Redirect gradients of earlier graphs for `tensor` to the tensor it is at that time.

    `convert(gradient, tensor)` converts the gradient to match. Call this before `swap`.
    """
    if _holders(tensor) == 1:
        return
    node = torch.autograd.graph.get_gradient_edge(tensor).node

    def pass_on(gradients: tuple[Any, ...]) -> tuple[None]:  # keeps the tensor alive, like `node`
        if gradients[0] is not None:
            gradient = convert(gradients[0], tensor)
            for hook in (tensor._backward_hooks or {}).values():
                changed = hook(gradient)
                gradient = gradient if changed is None else changed
            accumulate: Any = torch.autograd.graph.get_gradient_edge(tensor).node
            accumulate(gradient)
        return (None,)

    node.register_prehook(pass_on)


def is_profiler_on() -> bool:
    """Whether any thread is being profiled by `torch.profiler`."""
    return profiler._is_profiler_enabled


is_profiler_on_this_thread: Callable[[], bool] = _C._autograd._profiler_enabled
"""Whether this thread is being profiled, by a profiler limited to this thread."""

profiler_span: Callable[[str], AbstractContextManager[Any]] = _C._profiler._RecordFunctionFast
"""Shows its body as a named span on the timeline of `torch.profiler`."""


def compiled_node(results: Sequence[Any]) -> Any:
    """The autograd node that AOTAutograd made for a call with these results, if any."""
    nodes = [getattr(result, "grad_fn", None) for result in results]
    names = ((node, node.name()) for node in nodes if node is not None)
    return next((node for node, name in names if name.endswith("CompiledFunctionBackward")), None)


def backward_keeps_graph() -> bool:
    """Whether the current backward pass retains its graph."""
    return bool(torch._C._autograd._get_current_graph_task_keep_graph())


def autocast_states() -> list[tuple[str, torch.dtype, bool]]:
    """For each device: its autocast dtype, and whether autocast is on."""
    devices = torch._C._autocast_supported_devices()
    return [(d, torch.get_autocast_dtype(d), torch.is_autocast_enabled(d)) for d in devices]
