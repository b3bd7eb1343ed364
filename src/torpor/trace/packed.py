"""Packed sequences: recurrent layers over them as one node, packing and padding as gathers.

The sizes of batches are plain numbers, as on every device. So all sizes are known when an op is
recorded, and nothing is computed for them. In the graph the lengths are a leaf like others: a batch
of other lengths is the same graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final, NamedTuple

import torch

from torpor import _torch
from torpor.errors import annotate
from torpor.ops.packed_rnn import CELLS, Layers, packed_rnn, packed_rnn_backward, run_layers
from torpor.trace.composites import EAGER_TYPES, on_cpu, override, physically, taken_apart
from torpor.trace.dispatch import dispatch
from torpor.trace.site import site
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import physical
from torpor.trace.wrap import clone_plain, wrap_data

aten = torch.ops.aten
Tensors = tuple[torch.Tensor, ...]


# -- recurrent layers ------------------------------------------------------------------------------


_BY_BACKEND: Final = frozenset({aten.lstm.input, aten.lstm.data})
"""Recurrent networks whose form depends on a tensor's backend, not only on its device."""


def _in_parts(op: Any) -> Callable[..., Any]:
    """A recurrent network in the physical device's form: fused kernels, or its order of steps."""

    def run(input: torch.Tensor, *args: Any) -> Any:
        if input.device.type != "lazy" and op not in _BY_BACKEND:
            return taken_apart(op, input, *args)  # autocast keeps its copies of leaves alone
        return physically(op, input, (input, *args))

    return run


class _Call(NamedTuple):
    """A recurrent layer that is called on a packed sequence."""

    layers: Layers
    dropout: float
    batch_sizes: torch.Tensor  # plain
    tensors: Tensors  # rows, hidden states, weights

    @property
    def states(self) -> int:
        return 2 if self.layers.cell == "lstm" else 1

    @property
    def data(self) -> torch.Tensor:
        return self.tensors[0]

    @property
    def hx(self) -> Tensors:
        return self.tensors[1 : 1 + self.states]

    @property
    def params(self) -> Tensors:
        return self.tensors[1 + self.states :]

    @property
    def directions(self) -> int:
        return 2 if self.layers.bidirectional else 1

    def is_whole(self) -> bool:
        """Eager takes these arguments, and nothing changes what its ops do with them."""
        return (
            self._is_ordinary()
            and self._fits()
            and 0 <= self.dropout <= 1
            and not (_torch.is_transforming() or _torch.is_any_autocast_on())
            and not any(map(_torch.has_tangent, self.tensors))
        )

    def _is_ordinary(self) -> bool:
        device, dtype = self.data.device, self.data.dtype
        lazy = any(type(t) is LazyTensor for t in self.tensors)
        alike = all(
            type(t) in EAGER_TYPES and t.device == device and t.dtype == dtype
            and t.layout is torch.strided
            for t in self.tensors
        )  # fmt: skip
        return lazy and alike and dtype.is_floating_point and physical(device).type == "cpu"

    def _fits(self) -> bool:
        """Every size is what eager asks for: whatever is wrong, eager says so on the parts."""
        shapes = [tuple(t.shape) for t in self.tensors]
        states, weights = shapes[1 : 1 + self.states], shapes[1 + self.states :]
        if len(shapes[0]) != 2 or not weights or any(len(s) != 3 for s in states):
            return False
        count = self.layers.num_layers * self.directions
        first = (count, self._batch(shapes[0][0]))
        outer, hidden = states[0][2], states[-1][2]
        if any(s[:2] != first for s in states):
            return False
        return weights == list(self._weights(shapes[0][1], hidden, outer))

    def _weights(self, width: int, hidden: int, outer: int) -> list[tuple[int, ...]]:
        """The shapes of the weights; `outer` is what `proj_size` makes of `hidden`."""
        gates = {"lstm": 4, "gru": 3}.get(self.layers.cell, 1) * hidden
        found: list[tuple[int, ...]] = []
        for layer in range(self.layers.num_layers):
            of_input = width if layer == 0 else outer * self.directions
            one: list[tuple[int, ...]] = [(gates, of_input), (gates, outer)]
            one += [(gates,), (gates,)] * self.layers.has_biases
            one += [(outer, hidden)] * (outer != hidden)
            found += one * self.directions
        return found

    def _batch(self, rows: int) -> int:
        """How many sequences there are; -1 if the sizes of batches do not make sense."""
        sizes = self.batch_sizes
        if sizes.dim() != 1 or sizes.dtype is not torch.int64 or not sizes.numel():
            return -1
        numbers: list[int] = sizes.tolist()
        falling = all(one >= other for one, other in zip(numbers, numbers[1:]))
        return numbers[0] if falling and numbers[-1] > 0 and sum(numbers) == rows else -1

    def masks(self) -> Tensors:
        """What eager's dropout multiplies with after each layer but the last, drawn now."""
        if not self.dropout:
            return ()
        layers = self.layers.num_layers - 1
        return tuple([self._mask() for _ in range(layers)])

    def _mask(self) -> torch.Tensor:
        lazy = next(t for t in self.tensors if type(t) is LazyTensor)
        if self.dropout == 1:
            return lazy.new_zeros(())
        size = (self.data.shape[0], self.hx[0].shape[2] * self.directions)
        kept = 1 - self.dropout
        with torch.no_grad():
            return lazy.new_empty(size).bernoulli_(kept).div_(kept)


def _lazily(tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` as a leaf of this trace; one with a history stays what autograd knows."""
    if type(tensor) is LazyTensor or tensor.requires_grad:
        return tensor
    with _torch.without_modes():
        return wrap_data(clone_plain(tensor), tensor.device)


def _record(op: Any, *args: Any) -> Any:
    return dispatch(LazyTensor, op, (), args)


def _forward(call: _Call, batch_sizes: Any, masks: Tensors, needs: Sequence[bool]) -> Any:
    data, hx, params = call.data, list(call.hx), list(call.params)
    return _record(
        packed_rnn, data, batch_sizes, hx, params, list(masks), *call.layers, tuple(needs)
    )


class PackedLayers(torch.autograd.Function):
    """Recurrent layers over a packed sequence: one node forward, one node backward."""

    @staticmethod
    def forward(ctx: Any, call: _Call, batch_sizes: Any, masks: Tensors, *tensors: Any) -> Any:
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad[3:]
        *outputs, ticket = _forward(call._replace(tensors=tensors), batch_sizes, masks, needs)
        ctx.call = call._replace(tensors=())
        ctx.masks = len(masks)
        ctx.save_for_backward(batch_sizes, ticket, *masks, *tensors)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        needs = ctx.needs_input_grad[3:]
        if all(grad is None for grad in grads):
            return (None,) * (3 + len(needs))
        batch_sizes, ticket, *saved = ctx.saved_tensors
        masks, tensors = saved[: ctx.masks], tuple(saved[ctx.masks :])
        call = ctx.call._replace(tensors=tensors)
        if torch.is_grad_enabled():
            found = _gradients_of_parts(call, masks, needs, grads)
        else:
            found = _record(
                packed_rnn_backward, list(grads), ticket, call.data, batch_sizes, list(call.hx),
                list(call.params), masks, *call.layers, tuple(needs),
            )  # fmt: skip
        rest = iter(found)
        return None, None, None, *(next(rest) if asked else None for asked in needs)


_packed_layers: Callable[..., Any] = PackedLayers.apply


def _gradients_of_parts(
    call: _Call, masks: Tensors, needs: Sequence[bool], grads: Sequence[torch.Tensor | None]
) -> Sequence[torch.Tensor | None]:
    """Gradients that may be differentiated again."""
    run = _in_parts(CELLS[call.layers.cell])
    given = (call.data, call.batch_sizes, call.hx, call.params, masks)
    outputs = run_layers(run, call.layers, *given)
    roots = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    wanted = [tensor for tensor, asked in zip(call.tensors, needs, strict=True) if asked]
    ends, starts = zip(*roots, strict=True)
    return torch.autograd.grad(ends, wanted, starts, create_graph=True, allow_unused=True)


def _run_whole(call: _Call) -> Tensors:
    masks = call.masks()
    batch_sizes = wrap_data(clone_plain(call.batch_sizes), call.data.device)
    tensors = tuple(map(_lazily, call.tensors))
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return _packed_layers(call, batch_sizes, masks, *tensors)  # type: ignore[no-any-return]
    needs = [False] * len(tensors) if torch.is_grad_enabled() else []
    return tuple(_forward(call._replace(tensors=tensors), batch_sizes, masks, needs)[:-1])


def _over_packed(cell: str, op: Any) -> None:
    parts = _in_parts(op)

    @override(op)
    def run(
        data: torch.Tensor, batch_sizes: torch.Tensor, hx: Any, params: Sequence[torch.Tensor],
        has_biases: bool, num_layers: int, dropout: float, train: bool, bidirectional: bool,
    ) -> Any:  # fmt: skip
        if type(batch_sizes) is LazyTensor:
            batch_sizes = on_cpu(batch_sizes)
        layers = Layers(cell, has_biases, num_layers, bidirectional)
        states = tuple(hx) if cell == "lstm" else (hx,)
        tensors = (data, *states, *params)
        call = _Call(layers, dropout if train else 0.0, batch_sizes, tensors)
        if len(states) == call.states and call.is_whole():
            return _run_whole(call)
        how = (has_biases, num_layers, dropout, train, bidirectional)
        return parts(data, batch_sizes, hx, params, *how)


# -- packing and padding ---------------------------------------------------------------------------


class _Places(NamedTuple):
    """Which row of a packed sequence is where in the padded one: by step, then by sequence."""

    steps: torch.Tensor  # of each row
    sequences: torch.Tensor
    rows: torch.Tensor  # at each place; 0 where there is none
    is_padding: torch.Tensor

    @staticmethod
    def of(rows: torch.Tensor, device: torch.device) -> _Places:
        """From a plain table of rows, -1 where there is none."""
        is_padding = rows < 0
        where = (~is_padding).nonzero()
        found = (where[:, 0].clone(), where[:, 1].clone(), rows.clamp(min=0), is_padding)
        return _Places(*(wrap_data(tensor, device) for tensor in found))

    def packed(self, padded: torch.Tensor) -> torch.Tensor:
        """The rows of a padded sequence."""
        return padded[self.steps, self.sequences].contiguous()

    def padded(self, packed: torch.Tensor, value: Any) -> torch.Tensor:
        """The rows at their places, and `value` elsewhere."""
        is_padding = self.is_padding[(..., *[None] * (packed.dim() - 1))]
        return packed[self.rows].masked_fill(is_padding, value).contiguous()


class Packed(torch.autograd.Function):
    """The rows of a padded sequence."""

    @staticmethod
    def forward(ctx: Any, padded: torch.Tensor, places: _Places) -> Any:
        ctx.places = places
        return places.packed(padded)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _padded(grad, ctx.places, 0), None


class Padded(torch.autograd.Function):
    """The rows of a packed sequence at their places in a padded one."""

    @staticmethod
    def forward(ctx: Any, packed: torch.Tensor, places: _Places, value: Any) -> Any:
        ctx.places = places
        return places.padded(packed, value)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return _packed(grad, ctx.places), None, None


_apply_packed: Callable[..., torch.Tensor] = Packed.apply
_apply_padded: Callable[..., torch.Tensor] = Padded.apply


def _has_own_derivative(tensor: torch.Tensor) -> bool:
    return not (_torch.is_transforming() or _torch.has_tangent(tensor))


def _packed(padded: torch.Tensor, places: _Places) -> torch.Tensor:
    if _has_own_derivative(padded):
        return _apply_packed(padded, places)
    return places.packed(padded)


def _padded(packed: torch.Tensor, places: _Places, value: Any) -> torch.Tensor:
    if _has_own_derivative(packed):
        return _apply_padded(packed, places, value)
    return places.padded(packed, value)


def _judged(op: Any, *args: Any) -> Any:
    """What eager's op makes of plain tensors, or its refusal."""
    try:
        with _torch.kernels(), _torch.without_modes():
            return op(*args)
    except Exception as error:
        raise annotate(error, str(op), str(site())) from None


def _table(batch_sizes: torch.Tensor, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers of rows at their places, and the lengths of the sequences."""
    op = aten._pad_packed_sequence.default
    table, lengths = _judged(op, torch.arange(rows), batch_sizes, False, -1, length)
    return table, lengths


@override(aten._pack_padded_sequence.default)
def pack_padded_sequence(input: torch.Tensor, lengths: torch.Tensor, batch_first: bool) -> Any:
    """Packed rows are lazy; the sizes of the batches are plain numbers, as on every device."""
    op = aten._pack_padded_sequence.default
    if type(lengths) is LazyTensor:
        lengths = on_cpu(lengths)
    with _torch.without_modes():
        if type(input) is not LazyTensor:
            return op(input, lengths, batch_first)
        if input.dim() < 2 or not input.numel():
            return _judged(op, torch.zeros(input.shape), lengths, batch_first)
        padded = input.transpose(0, 1) if batch_first else input
        like = torch.zeros((1,)).expand(padded.shape[:2])
        rows, batch_sizes = _judged(op, like, lengths, False)
        table, _ = _table(batch_sizes, len(rows), len(padded))
        places = _Places.of(table, input.device)
    return _packed(padded, places), batch_sizes


@override(aten._pad_packed_sequence.default)
def pad_packed_sequence(
    data: torch.Tensor, batch_sizes: torch.Tensor, batch_first: bool, value: Any, length: int
) -> Any:
    """The numbers of a packed sequence at their places; the lengths are plain numbers."""
    op = aten._pad_packed_sequence.default
    if type(batch_sizes) is LazyTensor:
        batch_sizes = on_cpu(batch_sizes)
    with _torch.without_modes():
        if type(data) is not LazyTensor:
            return taken_apart(op, data, batch_sizes, batch_first, value, length)
        table, lengths = _table(batch_sizes, len(data), length)
        places = _Places.of(table, data.device)
    padded = _padded(data, places, value)
    return padded.transpose(0, 1) if batch_first else padded, lengths


for _cell, _op in CELLS.items():
    _over_packed(_cell, _op)
for _packet in (aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu):
    override(_packet.input)(_in_parts(_packet.input))
