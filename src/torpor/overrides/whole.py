"""Composite ops that are not decomposed on the device `lazy`: one recorded call instead of many.

torch decomposes `linear` and `matmul` above autograd: a linear layer becomes a dozen small calls,
forward and backward, and most of a step's recording time is spent on their views. An op with a
kernel registered for the device is not decomposed, nor is its backward. The graph stays the same:
on the first call, the op's decomposition is recorded, and memoized under the op's own arguments.

torch has no forward-mode derivative of these ops, differentiates them for real numbers only, and
accumulates their second derivative in another order than the decomposition's. So ops are decomposed
while forward mode is on, and permanently after the first complex tensor or the first backward with
`create_graph=True`.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from torpor import _torch, config, metrics
from torpor.execute.storage import TRACE
from torpor.inference.infer import types_in
from torpor.ir.memo import Memo
from torpor.ir.node import Value
from torpor.ir.types import on_first_complex
from torpor.observe.scope import parts_of, scope
from torpor.observe.site import site
from torpor.ops.signature import Extra
from torpor.ops.spec import OpSpec, spec_of
from torpor.overrides.composites import expanded_batch
from torpor.overrides.rnn_ops import unseen
from torpor.overrides.template import UNDEFINED, Template, Undefined, conditions_between
from torpor.symbols.leaves import SIZES
from torpor.trace.dispatch import SPECIAL
from torpor.trace.recorder import CutFirst, make_recorder
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import value_of
from torpor.trace.wrap import wrap_value

aten = torch.ops.aten


class Expansion:
    """The outputs of a decomposition; used where a recorder expects a node."""

    __slots__ = ("outputs",)

    def __init__(self, outputs: tuple[Value | Undefined, ...]) -> None:
        self.outputs = outputs


class _Parts:
    """Memoizes the decompositions of an op, by values and by types."""

    def __init__(self, spec: OpSpec, parts: Callable[..., Any]) -> None:
        self.spec = spec
        self.parts = parts
        self.memo: Memo[Expansion] = Memo()
        self.templates: Memo[Template] = Memo()

    def make(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Expansion:
        """Handle a cache miss: decompose, or instantiate a template."""
        if TRACE.misses > config.max_trace_nodes:
            raise CutFirst
        known = self.memo.find(key)
        if known is not None:
            return known
        metrics.count_node(self.spec.name)
        operands = [k for k in key if type(k) is Value]
        places = tuple(map(operands.index, operands))  # repeated operands need their own template
        kind = (places, types_in(key))
        template = self.templates.find(kind)
        if template is None:
            return self._learn(key, kind, operands, arguments)
        results = template.write(operands, site(), scope())
        conditions = conditions_between(operands, results) if SIZES.active else ()
        return self.memo.add(key, Expansion(results), conditions)

    def _learn(
        self, key: tuple[Any, ...], kind: Any, operands: list[Value], arguments: tuple[Any, ...]
    ) -> Expansion:
        epoch, leaves = TRACE.epoch, len(TRACE.leaves)
        with unseen(), parts_of(scope()):
            results = self.parts(*map(_as_recorded, arguments, key))  # the key may be longer
        expansion = Expansion(tuple(map(_output, results)))
        # memoize only if no leaf was added (a part that ran immediately made new data) and
        # the trace was not cut meanwhile (the key belongs to the old trace)
        if len(TRACE.leaves) == leaves and TRACE.epoch == epoch:
            conditions = conditions_between(operands, expansion.outputs)
            self.memo.add(key, expansion, conditions)
            template = Template.between(operands, expansion.outputs)
            if template is not None:
                self.templates.add(kind, template, conditions)
        return expansion


def _record_parts(op: Any, parts: Callable[..., Any], extra: Extra) -> None:
    """Record `op` as the decomposition that `parts` makes."""
    taken = _Parts(spec_of(op), parts)
    SPECIAL[str(op)] = make_recorder(
        taken.spec, extra=extra, nodes=taken.memo.young, make=taken.make
    )


def _as_recorded(argument: Any, value: Any) -> Any:
    """A plain tensor as its lazy leaf, so that no part of the op is computed immediately."""
    if type(value) is not Value or type(argument) is LazyTensor:
        return argument
    leaf: Any = wrap_value(value)
    return leaf.requires_grad_(argument.requires_grad)


def _output(tensor: Any) -> Value | Undefined:
    return UNDEFINED if tensor is None else value_of(tensor)


def _taken_apart(op: Any, *arguments: Any) -> Any:
    """The decomposition of `op` that eager uses for plain tensors."""
    if op is aten.matmul.default:
        one, other = arguments
        arguments = expanded_batch(one, other), expanded_batch(other, one)
    return _torch.take_apart(op, *arguments)


def _forward(op: Any) -> Callable[..., Any]:
    def parts(*arguments: Any) -> tuple[Any, ...]:
        with _torch.above_autograd():  # so that views inherit requires_grad
            return (_taken_apart(op, *arguments),)

    return parts


def _gradients(
    op: Any, inputs: list[Any], grad: torch.Tensor, mask: tuple[bool, ...], create_graph: bool
) -> list[Any]:
    """Gradients of the decomposition of `op`, for the inputs in `mask`."""
    with torch.enable_grad(), _torch.without_autocast():  # like the op itself
        output = _taken_apart(op, *inputs)
    wanted = [tensor for tensor, asked in zip(inputs, mask, strict=True) if asked]
    with torch.autograd.set_detect_anomaly(False):  # checked: the gradients of the op itself
        found = iter(torch.autograd.grad(output, wanted, grad, create_graph=create_graph))
    return [next(found) if asked else None for asked in mask]


def _cut_off(tensor: torch.Tensor, asked: bool) -> torch.Tensor:
    """`tensor` detached; keeps requires_grad, on which the decomposition depends."""
    return tensor.detach().requires_grad_(asked or tensor.requires_grad)


def _linear_inputs(
    prepare: Callable[[torch.Tensor, bool], torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    mask: tuple[bool, ...],
) -> list[Any]:
    """The arguments of `linear`; gradients do not depend on the values of the bias."""
    bias = weight.new_empty(weight.shape[:-1]).requires_grad_() if mask[2] else None
    return [prepare(input, mask[0]), prepare(weight, mask[1]), bias]


def _linear_backward(
    self: torch.Tensor, grad_output: torch.Tensor, weight: torch.Tensor, output_mask: Any
) -> Any:
    with _torch.above_autograd():
        inputs = _linear_inputs(_cut_off, self, weight, output_mask)
        return _gradients(aten.linear.default, inputs, grad_output, output_mask, False)


def _matmul_backward(grad: torch.Tensor, self: torch.Tensor, other: torch.Tensor, mask: Any) -> Any:
    with _torch.above_autograd():
        inputs = [_cut_off(self, mask[0]), _cut_off(other, mask[1])]
        return _gradients(aten.matmul.default, inputs, grad, mask, False)


_record_parts(
    aten.linear.default,
    _forward(aten.linear.default),
    Extra(grad_mode=True, requires_grad=(0, 1)),
)
_record_parts(
    aten.matmul.default,
    _forward(aten.matmul.default),
    Extra(grad_mode=True, requires_grad=(0, 1)),
)
_record_parts(aten.linear_backward.default, _linear_backward, Extra(requires_grad=(0, 2)))
_record_parts(aten.matmul_backward.default, _matmul_backward, Extra(requires_grad=(1, 2)))


# -- derivatives that torch lacks for the undecomposed ops -----------------------------------------


def _connected(tensor: torch.Tensor, asked: bool) -> torch.Tensor:
    """An alias of `tensor`, still connected to its graph."""
    with torch.enable_grad():
        return tensor.view_as(tensor)


def _linear_backward_again(
    self: torch.Tensor, grad_output: torch.Tensor, weight: torch.Tensor, output_mask: Any
) -> Any:
    inputs = _linear_inputs(_connected, self, weight, output_mask)
    again = torch.is_grad_enabled()
    return tuple(_gradients(aten.linear.default, inputs, grad_output, output_mask, again))


def _matmul_backward_again(
    grad: torch.Tensor, self: torch.Tensor, other: torch.Tensor, mask: Any
) -> Any:
    inputs = [_connected(self, mask[0]), _connected(other, mask[1])]
    again = torch.is_grad_enabled()
    return tuple(_gradients(aten.matmul.default, inputs, grad, mask, again))


def _in_autocast(op: Any, again: Callable[..., Any]) -> Callable[..., Any]:
    """A backward under autocast, which casts those inputs that it has not cast before."""

    def backward(*arguments: Any) -> Any:
        tensors = [one for one in arguments if isinstance(one, torch.Tensor)]
        lower = torch.get_autocast_dtype(tensors[0].device.type)
        if type(tensors[0]) is LazyTensor and any(one.dtype != lower for one in tensors):
            return again(*arguments)
        with _torch.without_autocast():
            return op(*arguments)

    return backward


def _never(*arguments: Any) -> Any:
    raise AssertionError("a lazy tensor reaches torpor before it reaches its backend")


def _nothing(on: bool) -> None:
    pass


class _While:
    """A process-wide state that is on while any thread is inside."""

    def __init__(self, change: Callable[[bool], None] = _nothing) -> None:
        self._change = change
        self.inside = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        with self._lock:
            self.inside += 1
            if self.inside == 1:
                self._change(True)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self.inside -= 1
            if self.inside == 0:
                self._change(False)


_listeners: list[Callable[[bool], None]] = []


def _notify(on: bool) -> None:
    for listener in _listeners:
        listener(on)


def on_parts(listener: Callable[[bool], None]) -> None:
    """Call `listener` with whether everything is decomposed, now and on every change."""
    _listeners.append(listener)
    listener(_parts.inside > 0)


WHOLE: dict[Any, Callable[..., Any]] = {}
"""Ops that are not decomposed, with torch's own kernel of each above autograd."""

_kept = _torch.Kernels("Lazy", {aten.linear.default: _never, aten.matmul.default: _never})
_library = torch.library.Library("aten", "IMPL")
_parts = _While(_notify)
_again: dict[Any, Callable[..., Any]] = {
    aten.linear_backward.default: _linear_backward_again,
    aten.matmul_backward.default: _matmul_backward_again,
}
_parts_of_backward = _While(_torch.Kernels("AutogradLazy", _again).set)
_under_autocast = [
    _torch.Kernels(key, {op: _in_autocast(op, again) for op, again in _again.items()})
    for key in ("AutocastCPU", "AutocastCUDA")
]


def _whole_or_parts(op: Any) -> None:
    """Do not decompose `op` if it then saves the same tensors for backward as its decomposition.

    The decomposition saves an operand only if the other's gradient needs it; one that is not saved
    may be written to before backward. Plain data are new in every step, so memoizing an op on them
    would never hit.
    """
    whole = WHOLE[op] = _torch.kernel(op, "AutogradLazy")

    def linear(keys: Any, one: torch.Tensor, other: torch.Tensor, bias: Any = None) -> Any:
        if one.requires_grad and other.requires_grad and _is_whole(one):
            return whole(keys, one, other, bias)
        if not _is_whole(one) or _needs_gradient(one, other, bias):
            return _taken_apart(op, one, other, bias)
        return whole(keys, one, other, bias)

    def matmul(keys: Any, one: torch.Tensor, other: torch.Tensor) -> Any:
        if one.requires_grad and other.requires_grad and _is_whole(one):
            return whole(keys, one, other)
        if not _is_whole(one) or _needs_gradient(one, other, None):
            return _taken_apart(op, one, other)
        return whole(keys, one, other)

    run = linear if op is aten.linear.default else matmul
    _library.impl(op, run, "AutogradLazy", with_keyset=True)


def _is_whole(one: torch.Tensor) -> bool:
    return type(one) is LazyTensor and not _parts.inside


def _needs_gradient(one: torch.Tensor, other: torch.Tensor, bias: torch.Tensor | None) -> bool:
    needs = one.requires_grad or other.requires_grad or (bias is not None and bias.requires_grad)
    return needs and torch.is_grad_enabled()


def _forward_mode(on: bool) -> None:
    for state in (_parts, _parts_of_backward):
        state.__enter__() if on else state.__exit__()


@functools.cache
def keep_parts() -> None:
    """Decompose from now on, so that gradients accumulate in eager's order."""
    _parts.__enter__()


class _Again:
    """Entered by a backward that creates a graph: the program will probably do so again."""

    def __init__(self) -> None:
        self.met = False

    def __enter__(self) -> None:
        if not self.met:
            self.met = True
            _parts.__enter__()  # permanently: only decomposed forwards accumulate in eager's order
        _parts_of_backward.__enter__()

    def __exit__(self, *_: object) -> None:
        _parts_of_backward.__exit__()


def install() -> None:
    """Register the undecomposed ops, and the conditions under which they are decomposed."""
    for kernels in (_kept, *_under_autocast):
        kernels.set(True)
    _whole_or_parts(aten.linear.default)
    _whole_or_parts(aten.matmul.default)
    _torch.on_higher_derivatives(_While(_forward_mode), _Again())
    on_first_complex(_parts.__enter__)  # permanently
