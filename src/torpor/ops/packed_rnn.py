"""Recurrent layers over packed sequences as one op forward and one op backward.

torch takes them apart into ops for each time step, whose sizes are those of one batch. The ops here
have sizes that depend on the number of rows alone, so one graph serves batches of any lengths. Their
kernels run eager's own form on plain tensors, with eager's autograd: its bits are eager's.

Forward leaves eager's autograd graph on one of its results, the ticket; backward uses it up. If it
is not there (the ticket was copied, or backward runs a second time), backward runs forward again.
What a ticket carries goes when backward has run, or with the ticket.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final, NamedTuple
from weakref import WeakSet

import torch
from torch.autograd.graph import saved_tensors_hooks

from torpor import _torch

_aten = torch.ops.aten
_library = torch.library.Library("torpor", "FRAGMENT")

CELLS: Final = {
    "lstm": _aten.lstm.data,
    "gru": _aten.gru.data,
    "rnn_tanh": _aten.rnn_tanh.data,
    "rnn_relu": _aten.rnn_relu.data,
}
"""The op of torch's that each kind of layer is."""

_INPUTS: Final = "Tensor data, Tensor batch_sizes, Tensor[] hx, Tensor[] params, Tensor[] masks"
_LAYERS: Final = "str cell, bool has_biases, int num_layers, bool bidirectional, bool[] needs"
_library.define(f"packed_rnn({_INPUTS}, {_LAYERS}) -> Tensor[]")
_library.define(
    f"packed_rnn_backward(Tensor?[] grads, Tensor ticket, {_INPUTS}, {_LAYERS}) -> Tensor[]"
)


class Layers(NamedTuple):
    """What a recurrent layer is but for its tensors."""

    cell: str
    has_biases: bool
    num_layers: int
    bidirectional: bool


Run = Callable[..., tuple[torch.Tensor, ...]]


def run_layers(
    run: Run,
    layers: Layers,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
) -> list[torch.Tensor]:
    """The outputs of torch's op, which `run` runs; `masks` are what dropout multiplies with.

    With dropout it runs layer by layer: the numbers were drawn when the op was recorded.
    """
    if not masks:
        return list(_run(run, layers, data, batch_sizes, hx, params))
    one = layers._replace(num_layers=1)
    of_layer = zip(*(state.split(2 if layers.bidirectional else 1) for state in hx), strict=True)
    count = len(params) // layers.num_layers
    states = []
    for layer, state in enumerate(of_layer):
        weights = params[layer * count : (layer + 1) * count]
        data, *last = _run(run, one, data, batch_sizes, state, weights)
        states.append(last)
        if layer < len(masks):
            data = data * masks[layer]
    return [data, *(torch.cat(parts) for parts in zip(*states, strict=True))]


def _run(
    run: Run,
    layers: Layers,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
) -> tuple[torch.Tensor, ...]:
    state = list(hx) if layers.cell == "lstm" else hx[0]
    how = (layers.has_biases, layers.num_layers, 0.0, False, layers.bidirectional)
    return run(data, batch_sizes, state, list(params), *how)


# -- kernels -----------------------------------------------------------------------------------


class _Kept:
    """Eager's autograd graph of one forward: where it starts, and where it ends."""

    def __init__(self, inputs: list[torch.Tensor], outputs: list[torch.Tensor]) -> None:
        self.inputs = inputs
        self.outputs = outputs


KEPT: Final[WeakSet[_Kept]] = WeakSet()
"""All graphs that wait for their backward."""

_ATTRIBUTE: Final = "_torpor_kept"


def _as_it_is(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@contextmanager
def _with_autograd() -> Iterator[None]:
    """Autograd records the ops of the body, wherever the graph runs, and nobody sees it."""
    aside, unseen = _torch.as_on_another_thread(), saved_tensors_hooks(_as_it_is, _as_it_is)
    with aside, torch.enable_grad(), _torch.above_autograd(), unseen:
        yield


def _start(tensor: torch.Tensor, needs: bool) -> torch.Tensor:
    """`tensor` as the start of a graph."""
    started = tensor.clone() if tensor.is_inference() else tensor.detach()
    return started.requires_grad_(needs)


def _graph(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: Sequence[torch.Tensor],
    params: Sequence[torch.Tensor],
    masks: Sequence[torch.Tensor],
    layers: Layers,
    needs: Sequence[bool],
) -> _Kept:
    with _with_autograd():
        started = [_start(t, n) for t, n in zip((data, *hx, *params), needs, strict=True)]
        states, weights = started[1 : 1 + len(hx)], started[1 + len(hx) :]
        given = (started[0], batch_sizes, states, weights, masks)
        return _Kept(started, run_layers(CELLS[layers.cell], layers, *given))


def _forward(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    masks: list[torch.Tensor],
    cell: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    needs: list[bool],
) -> list[torch.Tensor]:
    layers = Layers(cell, has_biases, num_layers, bidirectional)
    ticket = torch.zeros(1, dtype=torch.int64)
    if not any(needs):
        with torch.set_grad_enabled(bool(needs)):  # kernels may look at it
            given = (data, batch_sizes, hx, params, masks)
            return [*run_layers(CELLS[cell], layers, *given), ticket]
    kept = _graph(data, batch_sizes, hx, params, masks, layers, needs)
    setattr(ticket, _ATTRIBUTE, kept)
    KEPT.add(kept)
    # compilers write over results that nobody needs any more; the graph may need them
    return [*(output.detach().clone() for output in kept.outputs), ticket]


def _backward(
    grads: list[torch.Tensor | None],
    ticket: torch.Tensor,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    masks: list[torch.Tensor],
    cell: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    needs: list[bool],
) -> list[torch.Tensor]:
    layers = Layers(cell, has_biases, num_layers, bidirectional)
    kept: _Kept | None = ticket.__dict__.pop(_ATTRIBUTE, None)
    if kept is None:
        kept = _graph(data, batch_sizes, hx, params, masks, layers, needs)
    KEPT.discard(kept)
    roots = [(o, g) for o, g in zip(kept.outputs, grads, strict=True) if g is not None]
    outputs, given = zip(*roots, strict=True)
    wanted = [tensor for tensor, asked in zip(kept.inputs, needs, strict=True) if asked]
    with _with_autograd():
        found = torch.autograd.grad(outputs, wanted, given, allow_unused=True)
    return _apart([_dense(g, t) for g, t in zip(found, wanted, strict=True)], grads)


def _dense(grad: torch.Tensor | None, of: torch.Tensor) -> torch.Tensor:
    if grad is None:
        return torch.zeros(of.shape, dtype=of.dtype, device=of.device)
    return grad.detach().contiguous()


def _apart(
    results: list[torch.Tensor], given: Sequence[torch.Tensor | None]
) -> list[torch.Tensor]:
    """`results`, each in memory of its own, as the results of an op have to be."""
    taken = {_torch.memory_of(tensor) for tensor in given if tensor is not None}
    for place, tensor in enumerate(results):
        if _torch.memory_of(tensor) in taken:
            results[place] = tensor.clone()
        taken.add(_torch.memory_of(results[place]))
    return results


# -- types -------------------------------------------------------------------------------------


def _types_forward(
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    masks: list[torch.Tensor],
    cell: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    needs: list[bool],
) -> list[torch.Tensor]:
    width = hx[0].shape[2] * (2 if bidirectional else 1)
    rows = data.new_empty((data.shape[0], width))
    ticket = data.new_empty((1,), dtype=torch.int64)
    return [rows, *(data.new_empty(state.shape) for state in hx), ticket]


def _types_backward(
    grads: list[torch.Tensor | None],
    ticket: torch.Tensor,
    data: torch.Tensor,
    batch_sizes: torch.Tensor,
    hx: list[torch.Tensor],
    params: list[torch.Tensor],
    masks: list[torch.Tensor],
    cell: str,
    has_biases: bool,
    num_layers: int,
    bidirectional: bool,
    needs: list[bool],
) -> list[torch.Tensor]:
    inputs = zip((data, *hx, *params), needs, strict=True)
    return [data.new_empty(tensor.shape) for tensor, asked in inputs if asked]


_library.impl("packed_rnn", _forward, "CPU")
_library.impl("packed_rnn_backward", _backward, "CPU")
_library._register_fake("packed_rnn", _types_forward)
_library._register_fake("packed_rnn_backward", _types_backward)

packed_rnn = torch.ops.torpor.packed_rnn.default
packed_rnn_backward = torch.ops.torpor.packed_rnn_backward.default
