"""Recurrent layers as one op forward and one backward, over packed or padded sequences.

torch decomposes most of them into ops per time step, with the sizes of one batch. These ops have no
sizes but those of their tensors, so one graph serves batches of any lengths. Their kernels run
eager's own implementation on plain tensors with eager's autograd: results are bit-identical.

Forward attaches eager's autograd graph to one of its results, the ticket; backward consumes it. If
it is missing (the ticket was copied, or backward runs a second time), backward reruns forward. The
graph is freed after backward, or with the ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch.autograd.graph import saved_tensors_hooks

from torpor import _torch

_aten = torch.ops.aten
_library = torch.library.Library("torpor", "FRAGMENT")

CELLS: Final = {
    "lstm": _aten.lstm,
    "gru": _aten.gru,
    "rnn_tanh": _aten.rnn_tanh,
    "rnn_relu": _aten.rnn_relu,
}
"""torch's ops: the overload `data` is for packed sequences, `input` for padded ones."""

_INPUTS: Final = "Tensor data, Tensor? batch_sizes, Tensor[] hx, Tensor[] params, Tensor[] masks"
_LAYERS: Final = (
    "str cell, bool has_biases, int num_layers, bool train, bool bidirectional, bool batch_first"
)
_library.define(f"rnn({_INPUTS}, {_LAYERS}, bool[] needs) -> Tensor[]")
_library.define(
    f"rnn_backward(Tensor?[] grads, Tensor ticket, {_INPUTS}, {_LAYERS}, bool[] needs) -> Tensor[]"
)


class Layers(NamedTuple):
    """The non-tensor arguments of recurrent layers, in schema order."""

    cell: str
    has_biases: bool
    num_layers: int
    train: bool
    bidirectional: bool
    batch_first: bool

    @property
    def directions(self) -> int:
        """How many passes each layer makes over its input."""
        return 2 if self.bidirectional else 1


class Inputs(NamedTuple):
    """The tensors of recurrent layers, in schema order."""

    data: torch.Tensor
    batch_sizes: torch.Tensor | None  # None: `data` is a padded batch
    hx: Sequence[torch.Tensor]
    params: Sequence[torch.Tensor]
    masks: Sequence[torch.Tensor]  # dropout's factors after each layer but the last

    @property
    def differentiable(self) -> tuple[torch.Tensor, ...]:
        """Those that may need a gradient."""
        return (self.data, *self.hx, *self.params)

    def with_differentiable(self, tensors: Sequence[torch.Tensor]) -> Inputs:
        """Replace those that may need a gradient."""
        end = 1 + len(self.hx)
        return self._replace(data=tensors[0], hx=tensors[1:end], params=tensors[end:])


Run = Callable[..., Sequence[torch.Tensor]]


def run_layers(run: Run, inputs: Inputs, layers: Layers) -> list[torch.Tensor]:
    """The outputs of torch's op, called through `run`.

    With dropout it runs layer by layer, because the masks were drawn when the op was recorded.
    """
    if not inputs.masks:
        return list(_run(run, inputs, layers))
    one = layers._replace(num_layers=1, batch_first=False)
    data = inputs.data.transpose(0, 1) if layers.batch_first else inputs.data
    count = len(inputs.params) // layers.num_layers
    states = []
    of_layer = zip(*(state.split(layers.directions) for state in inputs.hx), strict=True)
    for layer, hx in enumerate(of_layer):
        params = inputs.params[layer * count : (layer + 1) * count]
        data, *last = _run(run, inputs._replace(data=data, hx=hx, params=params), one)
        states.append(last)
        if layer < len(inputs.masks):
            data = data * inputs.masks[layer]
    hidden = [torch.cat(parts) for parts in zip(*states, strict=True)]
    return [data.transpose(0, 1) if layers.batch_first else data, *hidden]


def _run(run: Run, inputs: Inputs, layers: Layers) -> Sequence[torch.Tensor]:
    state = list(inputs.hx) if layers.cell == "lstm" else inputs.hx[0]
    how = (layers.has_biases, layers.num_layers, 0.0, layers.train, layers.bidirectional)
    params = list(inputs.params)
    if inputs.batch_sizes is None:
        return run(inputs.data, state, params, *how, layers.batch_first)
    return run(inputs.data, inputs.batch_sizes, state, params, *how)


def op_of(inputs: Inputs, layers: Layers) -> Any:
    """The op of torch's for these arguments."""
    packet = CELLS[layers.cell]
    return packet.input if inputs.batch_sizes is None else packet.data


# -- kernels -----------------------------------------------------------------------------------


class _Kept:
    """Eager's autograd graph of one forward: its inputs and outputs."""

    def __init__(self, inputs: Sequence[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.inputs = inputs
        self.outputs = outputs


KEPT: Final[WeakSet[_Kept]] = WeakSet()
"""All graphs that wait for their backward."""

_ATTRIBUTE: Final = "_torpor_kept"


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def unseen() -> AbstractContextManager[Any]:
    """Hide tensors saved for backward from the user's `saved_tensors_hooks`.

    Skipped if there are none: packing through Python hooks costs two calls per tensor.
    """
    if _torch.has_saved_tensors_hooks():
        return saved_tensors_hooks(_as_it_is, _as_it_is)
    return nullcontext()


@contextmanager
def _with_autograd() -> Iterator[None]:
    """Record the body's ops with autograd, on whichever thread, hidden from the user's hooks."""
    aside = _torch.as_on_another_thread()
    with aside, torch.enable_grad(), _torch.above_autograd(), unseen():
        yield


def _start(tensor: torch.Tensor, needs: bool) -> torch.Tensor:
    """`tensor` as a leaf of a new graph."""
    started = tensor.clone() if tensor.is_inference() else tensor.detach()
    return started.requires_grad_(needs)


def _graph(inputs: Inputs, layers: Layers, needs: Sequence[bool]) -> _Kept:
    with _with_autograd():
        starts = [_start(t, n) for t, n in zip(inputs.differentiable, needs, strict=True)]
        started = inputs.with_differentiable(starts)
        return _Kept(starts, run_layers(op_of(inputs, layers), started, layers))


def _forward(*args: Any) -> list[torch.Tensor]:
    inputs, layers, needs = Inputs(*args[:5]), Layers(*args[5:-1]), args[-1]
    ticket = torch.zeros(1, dtype=torch.int64)
    if not any(needs):
        with torch.set_grad_enabled(bool(needs)):  # the choice of kernels depends on it
            output, *hidden = run_layers(op_of(inputs, layers), inputs, layers)
            return [_with_layout(output, layers), *hidden, ticket]
    kept = _graph(inputs, layers, needs)
    setattr(ticket, _ATTRIBUTE, kept)
    KEPT.add(kept)
    # compilers may overwrite dead results, which the graph may have saved
    output, *hidden = [output.detach().clone() for output in kept.outputs]
    return [_with_layout(output, layers), *hidden, ticket]


def _backward(grads: list[torch.Tensor | None], ticket: torch.Tensor, *args: Any) -> Any:
    inputs, layers, needs = Inputs(*args[:5]), Layers(*args[5:-1]), args[-1]
    kept: _Kept | None = ticket.__dict__.pop(_ATTRIBUTE, None)
    if kept is None:
        kept = _graph(inputs, layers, needs)
    KEPT.discard(kept)
    wanted = [tensor for tensor, asked in zip(kept.inputs, needs, strict=True) if asked]
    with _with_autograd():
        found = gradients(kept.outputs, wanted, grads)
    filled = [torch.zeros_like(t) if g is None else g for g, t in zip(found, wanted, strict=True)]
    dense = [grad.detach().contiguous() for grad in filled[needs[0] :]]
    rows = [_with_layout(grad.detach(), layers) for grad in filled[: needs[0]]]
    return _apart([*rows, *dense], grads)


def gradients(
    outputs: Sequence[torch.Tensor],
    inputs: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor | None],
    create_graph: bool = False,
) -> Sequence[torch.Tensor | None]:
    """Gradients from those outputs that have a gradient; at least one has."""
    roots = [(o, g) for o, g in zip(outputs, grads, strict=True) if g is not None]
    ends, starts = zip(*roots, strict=True)
    return torch.autograd.grad(ends, inputs, starts, create_graph=create_graph, allow_unused=True)


def _apart(results: list[torch.Tensor], given: Sequence[Any]) -> list[torch.Tensor]:
    """`results`, each in memory of its own, as an op's results must be."""
    taken = {_torch.memory_of(tensor) for tensor in given if tensor is not None}
    for place, tensor in enumerate(results):
        if _torch.memory_of(tensor) in taken:
            results[place] = tensor.clone()
        taken.add(_torch.memory_of(results[place]))
    return results


def _with_layout(sequence: torch.Tensor, layers: Layers) -> torch.Tensor:
    """A sequence with eager's strides: time-major."""
    if layers.batch_first:
        return sequence.transpose(0, 1).contiguous().transpose(0, 1)
    return sequence.contiguous()


# -- types -------------------------------------------------------------------------------------


def _sequence(like: torch.Tensor, width: Any, layers: Layers) -> torch.Tensor:
    if layers.batch_first:
        return like.new_empty((like.shape[1], like.shape[0], width)).transpose(0, 1)
    return like.new_empty((*like.shape[:-1], width))


def _types_forward(*args: Any) -> list[torch.Tensor]:
    inputs, layers = Inputs(*args[:5]), Layers(*args[5:-1])
    output = _sequence(inputs.data, inputs.hx[0].shape[2] * layers.directions, layers)
    ticket = inputs.data.new_empty((1,), dtype=torch.int64)
    return [output, *(state.new_empty(state.shape) for state in inputs.hx), ticket]


def _types_backward(grads: Any, ticket: torch.Tensor, *args: Any) -> list[torch.Tensor]:
    inputs, layers, needs = Inputs(*args[:5]), Layers(*args[5:-1]), args[-1]
    rows, *others = inputs.differentiable
    wanted = zip(others, needs[1:], strict=True)
    dense = [tensor.new_empty(tensor.shape) for tensor, asked in wanted if asked]
    return [_sequence(rows, rows.shape[-1], layers), *dense] if needs[0] else dense


_library.impl("rnn", _forward, "CPU")
_library.impl("rnn_backward", _backward, "CPU")
_library._register_fake("rnn", _types_forward)
_library._register_fake("rnn_backward", _types_backward)

rnn = torch.ops.torpor.rnn.default
rnn_backward = torch.ops.torpor.rnn_backward.default
