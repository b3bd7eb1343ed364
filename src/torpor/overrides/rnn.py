"""Recurrent layers: one node forward and one backward, for sequences of any lengths.

Decomposed like torch does where eager accumulates gradients step by step over a padded batch.
What must be decomposed, for autocast or forward mode, is decomposed like on the physical device.

The batch sizes of a packed sequence are a plain tensor, as on every device; in the graph they are
an ordinary leaf.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from typing import Any, Final, NamedTuple

import torch

from torpor import _torch
from torpor.overrides.composites import EAGER_TYPES, on_cpu, override, physically, taken_apart
from torpor.overrides.rnn_ops import (
    CELLS,
    Inputs,
    Layers,
    gradients,
    op_of,
    rnn,
    rnn_backward,
    run_layers,
)
from torpor.trace.dispatch import dispatch
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import physical
from torpor.trace.wrap import clone_plain, wrap_data

aten = torch.ops.aten

_GATES: Final = {"lstm": 4, "gru": 3, "rnn_tanh": 1, "rnn_relu": 1}
_BY_BACKEND: Final = frozenset({aten.lstm.input, aten.lstm.data})
"""RNN ops whose decomposition depends on a tensor's backend, not only on its device."""


def _in_parts(op: Any) -> Callable[..., Any]:
    """An RNN op decomposed as on the physical device: fused kernels, or eager's order of steps."""

    def run(input: torch.Tensor, *args: Any) -> Any:
        if input.device.type != "lazy" and op not in _BY_BACKEND:
            return taken_apart(op, input, *args)  # so that autocast caches its casts of leaves
        return physically(op, input, (input, *args))

    return run


# -- eligibility -----------------------------------------------------------------------------------


def _is_whole(inputs: Inputs, layers: Layers, dropout: float) -> bool:
    """Whether the layers can be one node: arguments are valid, and no transform is active.

    Invalid arguments are left to the decomposition, which raises like eager.
    """
    return (
        _are_ordinary(inputs.differentiable)
        and _shapes_agree(inputs, layers)
        and (inputs.batch_sizes is not None or _adds_up_nothing(inputs, layers))
        and 0 <= dropout <= 1
        and not (_torch.is_transforming() or _torch.is_any_autocast_on())
        and not any(map(_torch.has_tangent, inputs.differentiable))
    )


def _are_ordinary(tensors: Sequence[torch.Tensor]) -> bool:
    """Dense tensors of one device and dtype on a CPU, some of them lazy, none a compiler's."""
    device, dtype = tensors[0].device, tensors[0].dtype
    alike = all(
        type(t) in EAGER_TYPES and t.device == device and t.dtype == dtype
        and t.layout is torch.strided
        for t in tensors
    )  # fmt: skip
    lazy = any(type(t) is LazyTensor for t in tensors)
    return alike and lazy and dtype.is_floating_point and physical(device).type == "cpu"


def _shapes_agree(inputs: Inputs, layers: Layers) -> bool:
    """Whether all shapes are as eager requires."""
    states = [tuple(state.shape) for state in inputs.hx]
    if len(states) != (2 if layers.cell == "lstm" else 1) or any(len(s) != 3 for s in states):
        return False
    first = (layers.num_layers * layers.directions, _batch(inputs, layers))
    if any(s[:2] != first for s in states) or not inputs.data.numel():
        return False
    width, outer, hidden = inputs.data.shape[-1], states[0][2], states[-1][2]
    expected = _weights(layers, width, outer, hidden)
    return [tuple(param.shape) for param in inputs.params] == list(expected)


def _weights(layers: Layers, width: int, outer: int, hidden: int) -> Iterator[tuple[int, ...]]:
    """The expected shapes of the weights; `outer` is `hidden` after projection (`proj_size`)."""
    gates = _GATES[layers.cell] * hidden
    for layer in range(layers.num_layers):
        for _ in range(layers.directions):
            yield (gates, width if layer == 0 else outer * layers.directions)
            yield (gates, outer)
            if layers.has_biases:
                yield (gates,)
                yield (gates,)
            if outer != hidden:
                yield (outer, hidden)


def _batch(inputs: Inputs, layers: Layers) -> int:
    """The number of sequences; -1 if the arguments are inconsistent."""
    data, sizes = inputs.data, inputs.batch_sizes
    if sizes is None:
        return data.shape[0 if layers.batch_first else 1] if data.dim() == 3 else -1
    if data.dim() != 2 or sizes.dim() != 1 or sizes.dtype is not torch.int64:
        return -1
    numbers: list[int] = sizes.tolist()
    falling = all(one >= other for one, other in pairwise(numbers))
    whole = bool(numbers) and falling and numbers[-1] > 0 and sum(numbers) == len(data)
    return numbers[0] if whole else -1


def _adds_up_nothing(inputs: Inputs, layers: Layers) -> bool:
    """Whether eager accumulates no gradients over the steps of a padded batch.

    If it does, it accumulates into those of other calls of the layer, which affects the last bits.
    """
    tensors = inputs.differentiable
    if not torch.is_grad_enabled() or not any(t.requires_grad for t in tensors):
        return True
    once = inputs.data.shape[1 if layers.batch_first else 0] == 1 and not layers.bidirectional
    return once or _is_fused(inputs, layers)


def _is_fused(inputs: Inputs, layers: Layers) -> bool:
    """Whether one oneDNN kernel covers all steps."""
    return (
        layers.cell == "lstm"
        and inputs.data.dtype is torch.float32
        and inputs.hx[0].shape == inputs.hx[1].shape
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
    )


# -- recording -------------------------------------------------------------------------------------


def _masks(inputs: Inputs, layers: Layers, dropout: float) -> list[torch.Tensor]:
    """The scaled dropout masks after each layer but the last, drawn immediately."""
    if not dropout or not layers.train:
        return []
    lazy = next(t for t in inputs.differentiable if type(t) is LazyTensor)
    rows = inputs.data.shape[:-1]
    shape = (*(reversed(rows) if layers.batch_first else rows),)
    size = (*shape, inputs.hx[0].shape[2] * layers.directions)
    with torch.no_grad():
        return [_mask(lazy, size, 1 - dropout) for _ in range(layers.num_layers - 1)]


def _mask(lazy: torch.Tensor, size: tuple[int, ...], kept: float) -> torch.Tensor:
    if not kept:
        return lazy.new_zeros(())
    return lazy.new_empty(size).bernoulli_(kept).div_(kept)


def _lazily(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a leaf of this trace; unchanged if it requires a gradient."""
    if type(tensor) is LazyTensor or tensor.requires_grad:
        return tensor
    return _leaf(tensor, tensor.device)


def _leaf(tensor: torch.Tensor, device: torch.device) -> LazyTensor:
    with _torch.without_modes():
        return wrap_data(clone_plain(tensor), device)


def _record(op: Any, *args: Any) -> Any:
    return dispatch(LazyTensor, op, (), args)


class RecurrentLayers(torch.autograd.Function):
    """Recurrent layers as one node forward and one backward."""

    @staticmethod
    def forward(
        ctx: Any, inputs: Inputs, sizes: torch.Tensor | None, layers: Layers, *tensors: torch.Tensor
    ) -> Any:
        ctx.set_materialize_grads(False)
        recorded = inputs.with_differentiable(tensors)._replace(batch_sizes=sizes)
        *outputs, ticket = _record(rnn, *recorded, *layers, ctx.needs_input_grad[3:])
        ctx.layers, ctx.sizes = layers, inputs.batch_sizes
        ctx.counts = len(inputs.masks), len(inputs.hx)
        ctx.save_for_backward(ticket, sizes, *inputs.masks, *tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad[3:]
        if all(grad is None for grad in grads):
            return (None,) * (3 + len(needs))
        ticket, sizes, *saved = ctx.saved_tensors
        masks, states = ctx.counts
        data, *others = saved[masks:]
        inputs = Inputs(data, sizes, others[:states], others[states:], saved[:masks])
        if torch.is_grad_enabled():
            plain_sizes = inputs._replace(batch_sizes=ctx.sizes)
            found = _gradients_of_parts(plain_sizes, ctx.layers, needs, grads)
        else:
            found = _record(rnn_backward, list(grads), ticket, *inputs, *ctx.layers, needs)
        rest = iter(found)
        return None, None, None, *(next(rest) if asked else None for asked in needs)


_recurrent_layers: Callable[..., Any] = RecurrentLayers.apply


def _gradients_of_parts(
    inputs: Inputs, layers: Layers, needs: Sequence[bool], grads: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Gradients by the decomposition, which are differentiable."""
    outputs = run_layers(_in_parts(op_of(inputs, layers)), inputs, layers)
    pairs = zip(inputs.differentiable, needs, strict=True)
    return gradients(outputs, [t for t, asked in pairs if asked], grads, create_graph=True)


def _run_whole(inputs: Inputs, layers: Layers, dropout: float) -> tuple[torch.Tensor, ...]:
    inputs = inputs._replace(masks=_masks(inputs, layers, dropout))
    device, sizes = inputs.data.device, inputs.batch_sizes
    leaf = None if sizes is None else _leaf(sizes, device)
    tensors = tuple(map(_lazily, inputs.differentiable))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _recurrent_layers(inputs, leaf, layers, *tensors)  # type: ignore[no-any-return]
    needs = (False,) * len(tensors) if torch.is_grad_enabled() else ()
    recorded = inputs.with_differentiable(tensors)._replace(batch_sizes=leaf)
    return tuple(_record(rnn, *recorded, *layers, needs)[:-1])


# -- torch's ops -----------------------------------------------------------------------------------


class _Tail(NamedTuple):
    """The last arguments of torch's RNN ops."""

    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False

    def layers(self, cell: str) -> Layers:
        first = (cell, self.has_biases, self.num_layers, self.train)
        return Layers(*first, self.bidirectional, self.batch_first)


Call = Callable[..., Any]


def _whole_or_parts(cell: str, op: Any) -> Call:
    in_parts = _in_parts(op)

    def run(data: torch.Tensor, sizes: Any, hx: Any, params: Any, tail: tuple[Any, ...]) -> Any:
        layers, dropout = _Tail(*tail).layers(cell), tail[2]
        inputs = Inputs(data, sizes, tuple(hx) if cell == "lstm" else (hx,), params, ())
        if _is_whole(inputs, layers, dropout):
            return _run_whole(inputs, layers, dropout)
        if sizes is None:
            return in_parts(data, hx, params, *tail)
        return in_parts(data, sizes, hx, params, *tail)

    return run


def _on_padded(run: Call) -> Call:
    def call(input: torch.Tensor, hx: Any, params: Any, *tail: Any) -> Any:
        return run(input, None, hx, params, tail)

    return call


def _on_packed(run: Call) -> Call:
    def call(data: torch.Tensor, batch_sizes: Any, hx: Any, params: Any, *tail: Any) -> Any:
        sizes = on_cpu(batch_sizes) if type(batch_sizes) is LazyTensor else batch_sizes
        return run(data, sizes, hx, params, tail)

    return call


for _cell, _packet in CELLS.items():
    override(_packet.input)(_on_padded(_whole_or_parts(_cell, _packet.input)))
    override(_packet.data)(_on_packed(_whole_or_parts(_cell, _packet.data)))
