"""Composite ops that stay whole on the device `lazy`: recorded by one call in the place of many.

torch takes `linear` and `matmul` apart above autograd: a linear layer is a dozen small calls,
forward and backward, and most of a step's recording time is spent on their views. An op with a
kernel of its own for the device is left whole, and so is its backward. The graph does not change:
when such an op is met for the first time its parts are recorded, as torch takes it apart, and what
they came to is remembered under the op's own arguments.

torch has no forward-mode derivative of these ops, differentiates them for real numbers only, and
adds up their second derivative in another order than that of their parts. So the parts are what is
recorded while forward mode is on, and for good from the first complex tensor or the first backward
that keeps its graph.
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
    """What the parts of an op came to; it stands where a recorder expects a node."""

    __slots__ = ("outputs",)

    def __init__(self, outputs: tuple[Value | Undefined, ...]) -> None:
        self.outputs = outputs


class _Parts:
    """How an op is taken apart: what was met before, by values and by types."""

    def __init__(self, spec: OpSpec, parts: Callable[..., Any]) -> None:
        self.spec = spec
        self.parts = parts
        self.memo: Memo[Expansion] = Memo()
        self.templates: Memo[Template] = Memo()

    def make(self, key: tuple[Any, ...], arguments: tuple[Any, ...]) -> Expansion:
        """What the op comes to on arguments it was not met with."""
        if TRACE.misses > config.max_trace_nodes:
            raise CutFirst
        known = self.memo.find(key)
        if known is not None:
            return known
        metrics.count_node(self.spec.name)
        operands = [k for k in key if type(k) is Value]
        places = tuple(map(operands.index, operands))  # the same operand twice is another case
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
            results = self.parts(*map(_as_recorded, arguments, key))  # the key may end with more
        expansion = Expansion(tuple(map(_output, results)))
        # no leaf was added, or else a part was run at once and its result is new data;
        # the trace was not cut meanwhile, or else the key is of another trace
        if len(TRACE.leaves) == leaves and TRACE.epoch == epoch:
            conditions = conditions_between(operands, expansion.outputs)
            self.memo.add(key, expansion, conditions)
            template = Template.between(operands, expansion.outputs)
            if template is not None:
                self.templates.add(kind, template, conditions)
        return expansion


def _record_parts(op: Any, parts: Callable[..., Any], extra: Extra) -> None:
    """Let `op` be recorded as what `parts` makes of its arguments."""
    taken = _Parts(spec_of(op), parts)
    SPECIAL[str(op)] = make_recorder(
        taken.spec, extra=extra, nodes=taken.memo.young, make=taken.make
    )


def _as_recorded(argument: Any, value: Any) -> Any:
    """A plain tensor as the leaf it was taken for: no part of the op is computed on plain ones."""
    if type(value) is not Value or type(argument) is LazyTensor:
        return argument
    leaf: Any = wrap_value(value)
    return leaf.requires_grad_(argument.requires_grad)


def _output(tensor: Any) -> Value | Undefined:
    return UNDEFINED if tensor is None else value_of(tensor)


def _taken_apart(op: Any, *arguments: Any) -> Any:
    """The parts of `op` as eager takes plain tensors apart."""
    if op is aten.matmul.default:
        one, other = arguments
        arguments = expanded_batch(one, other), expanded_batch(other, one)
    return _torch.take_apart(op, *arguments)


def _forward(op: Any) -> Callable[..., Any]:
    def parts(*arguments: Any) -> tuple[Any, ...]:
        with _torch.above_autograd():  # views of what needs a gradient need one too
            return (_taken_apart(op, *arguments),)

    return parts


def _gradients(
    op: Any, inputs: list[Any], grad: torch.Tensor, mask: tuple[bool, ...], create_graph: bool
) -> list[Any]:
    """Gradients of the parts of `op` at `inputs`, where `mask` asks for them."""
    with torch.enable_grad(), _torch.without_autocast():  # which the whole op was recorded below
        output = _taken_apart(op, *inputs)
    wanted = [tensor for tensor, asked in zip(inputs, mask, strict=True) if asked]
    found = iter(torch.autograd.grad(output, wanted, grad, create_graph=create_graph))
    return [next(found) if asked else None for asked in mask]


def _cut_off(tensor: torch.Tensor, asked: bool) -> torch.Tensor:
    """`tensor` as the start of a graph; how parts are chosen depends on who needs a gradient."""
    return tensor.detach().requires_grad_(asked or tensor.requires_grad)


def _linear_inputs(
    prepare: Callable[[torch.Tensor, bool], torch.Tensor],
    input: torch.Tensor,
    weight: torch.Tensor,
    mask: tuple[bool, ...],
) -> list[Any]:
    """The arguments of `linear`; the gradients do not depend on the numbers of the bias."""
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


# -- derivatives torch does not have of the whole op -----------------------------------------------


def _connected(tensor: torch.Tensor, asked: bool) -> torch.Tensor:
    """`tensor` under a name of its own, still part of the graph it is in."""
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
    """A backward under autocast, which casts the parts of those that it has not cast before."""

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
    """A state of the process that lasts while anybody is inside."""

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
    """Call `listener` with whether all is taken apart, now and whenever that changes."""
    _listeners.append(listener)
    listener(_parts.inside > 0)


WHOLE: dict[Any, Callable[..., Any]] = {}
"""Ops that stay whole, and torch's own kernel above autograd of each."""

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
    """Let `op` be whole where that saves for its backward what the parts would save.

    The parts keep an operand only if the gradient of another needs it; one that they leave alone
    may be written to before backward. Data that are plain enter anew in every step: the parts of a
    whole op on them would be learnt in vain.
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
    """From now on ops are taken apart: gradients of their arguments arrive in eager's order."""
    _parts.__enter__()


class _Again:
    """A backward that keeps its graph: somebody differentiates twice, and will do so again."""

    def __init__(self) -> None:
        self.met = False

    def __enter__(self) -> None:
        if not self.met:
            self.met = True
            _parts.__enter__()  # to stay: only the parts of a forward add up in eager's order
        _parts_of_backward.__enter__()

    def __exit__(self, *_: object) -> None:
        _parts_of_backward.__exit__()


def install() -> None:
    """Keep the ops whole, but for what needs their parts."""
    for kernels in (_kept, *_under_autocast):
        kernels.set(True)
    _whole_or_parts(aten.linear.default)
    _whole_or_parts(aten.matmul.default)
    _torch.on_higher_derivatives(_While(_forward_mode), _Again())
    on_first_complex(_parts.__enter__)  # to stay: complex tensors may live as long as the program
