"""Fused GPU kernels that may draw random numbers: dropout and attention.

Their random part runs when recorded, like all random ops, or later at its turn (`overrides.draws`).
The rest is recorded, so that a step with dropout remains one graph.
"""

from __future__ import annotations

from typing import Any

import torch

from torpor import _torch
from torpor.backend.native_library import NATIVE
from torpor.backend.registry import get_backend
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.types import TensorType
from torpor.ops.spec import OpSpec, ReturnKind, spec_of
from torpor.overrides import draws
from torpor.overrides.cudnn_weights import packed
from torpor.overrides.random import random_recorder
from torpor.trace.dispatch import special
from torpor.trace.recorder import make_recorder, tensor_value
from torpor.trace.tensor import LazyTensor
from torpor.trace.values import apply, physical, root_value
from torpor.trace.wrap import data_storage, wrap_data, wrap_storage, wrap_value

aten = torch.ops.aten
_dropout = random_recorder(spec_of(aten.native_dropout.default))


@special("aten.native_dropout.default")
def native_dropout(input: LazyTensor, p: float, train: bool | None) -> Any:
    """The kernel's mask, drawn immediately; the product with the input is recorded."""
    type_ = TensorType.of_tensor(input)
    device = physical(input.device)
    apart = device.type == "cuda" and not get_backend().draws
    if not (apart and train is not False and draws.has_a_mask(type_, p)):
        return _dropout(input, p, train)
    with _torch.kernels():
        drawn = aten.native_dropout.default(alike(type_, device), p, train)[1]
    mask = wrap_data(drawn, input.device)
    return aten.native_dropout_backward.default(input, mask, draws.scale_of(p, type_.dtype)), mask


def alike(type_: TensorType, device: torch.device) -> torch.Tensor:
    """A tensor with the same strides and offset: what a kernel draws also depends on alignment."""
    memory = torch.empty((type_.offset + type_.span,), dtype=type_.dtype, device=device)
    return memory.as_strided(type_.shape, type_.stride, type_.offset)


# -- attention -------------------------------------------------------------------------------------

_rnn = spec_of(aten._cudnn_rnn.default)
_rnn_at_once = random_recorder(_rnn)


def _record_attention(op: Any, drawing: draws.DrawingOp | None = None) -> None:
    """Record an attention kernel; with dropout too, if its turn can be reserved."""
    spec = spec_of(op)
    at_once = random_recorder(spec)
    recorded = make_recorder(spec, lengths=_LENGTHS)

    @special(spec.name, usual=recorded)  # dropout does not go through `recorded`
    def attention(*args: Any, **kwargs: Any) -> Any:
        bound = spec.bind(args, kwargs)
        if not spec.draws(bound):
            return recorded(*args, **kwargs)
        if drawing is None or not _TURNS.can_be_reserved(spec, bound):
            return at_once(*args, **kwargs)
        return _recorded_in_turn(spec, bound, drawing)


_LENGTHS = (0, 1)
"""The arguments whose sequence lengths are among the results: queries and keys."""


def _length(tensor: torch.Tensor) -> int:
    return tensor.shape[2]


def _recorded_in_turn(spec: OpSpec, bound: list[Any], drawing: draws.DrawingOp) -> tuple[Any, ...]:
    """Record the variant that draws at a reserved turn."""
    return _record_at(_TURNS.storages(spec, bound), spec, bound, drawing)


def _record_at(
    turn: tuple[LazyStorage, LazyStorage], spec: OpSpec, bound: list[Any], drawing: draws.DrawingOp
) -> tuple[Any, ...]:
    numbers = (_length(bound[position]) for position in _LENGTHS)
    results: list[Any] = [
        next(numbers) if returned.kind is ReturnKind.OTHER else None for returned in spec.returns
    ]
    with TRACE.lock:
        try:
            values = [tensor_value(a) if isinstance(a, torch.Tensor) else a for a in bound]
        finally:
            NATIVE.entered.clear()
        node = apply(drawing.target, [*map(root_value, turn), *values])
        for place, output in zip(drawing.tensors, node.outputs, strict=True):
            results[place] = wrap_value(output)
    return tuple(results)


class _Turns:
    """Reserves turns for attention kernels."""

    def __init__(self) -> None:
        self.numbers: dict[tuple[Any, ...], int] = {}  # generator offset per kernel and sizes
        self.seed: tuple[int, LazyStorage] | None = None  # the last one: it rarely changes
        self.recurrent = False
        """Whether a cuDNN RNN has used dropout. Setting the generator's offset makes those draw
        an extra number."""

    def can_be_reserved(self, spec: OpSpec, bound: list[Any]) -> bool:
        arguments = dict(zip([a.name for a in spec.arguments], bound, strict=True))
        usual = arguments.get("compute_log_sumexp", True) and not arguments["return_debug_mask"]
        on_cuda = physical(bound[0].device).type == "cuda"
        return on_cuda and usual and not (self.recurrent or get_backend().draws)

    def next(self, spec: OpSpec, bound: list[Any]) -> tuple[int, int]:
        """The seed and offset of the next turn."""
        device = physical(bound[0].device)
        kind = (spec.name, device, *(_kind(argument) for argument in bound))
        numbers = self.numbers.get(kind)
        if numbers is None:
            numbers = self.numbers[kind] = _numbers_drawn(spec, bound, device)
        return draws.reserve(device, numbers)

    def storages(self, spec: OpSpec, bound: list[Any]) -> tuple[LazyStorage, LazyStorage]:
        """The next turn as data: seed and offset."""
        seed, offset = self.next(spec, bound)
        if self.seed is None or self.seed[0] != seed:
            self.seed = seed, _number(seed)
        return self.seed[1], _number(offset)


_TURNS = _Turns()


def _kind(argument: Any) -> Any:
    """The part of an argument that determines how many numbers are drawn."""
    is_tensor = isinstance(argument, (torch.Tensor, TensorType))
    return (tuple(argument.shape), argument.dtype) if is_tensor else argument


def _numbers_drawn(spec: OpSpec, bound: list[Any], device: torch.device) -> int:
    with _torch.kernels():
        types = [TensorType.of_tensor(a) if isinstance(a, torch.Tensor) else a for a in bound]
        real = [alike(a, device) if isinstance(a, TensorType) else a for a in types]
        return draws.numbers_drawn(spec.target, *spec.call_arguments(real), device)


def _number(number: int) -> LazyStorage:
    """A number as data."""
    with _torch.kernels():
        tensor = torch.tensor(draws.as_int64(number))
    return data_storage(tensor, tensor.device)


# -- the same in a captured graph, where arguments are types ---------------------------------------

_IN_TURN = {one.original: one for one in (draws.FLASH_ATTENTION, draws.CUDNN_ATTENTION)}


def turn_apart(target: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """A function that reserves an attention kernel's turn, and one that records it at a turn.

    Takes types in place of tensors. (None, None) if the turn cannot be reserved.
    """
    spec = spec_of(target)
    bound = spec.bind(args, kwargs)
    if target not in _IN_TURN or not _TURNS.can_be_reserved(spec, bound):
        return None, None

    def draw() -> list[LazyTensor]:
        return [wrap_storage(storage) for storage in _TURNS.storages(spec, bound)]

    def record(turn: list[LazyTensor], *args: Any, **kwargs: Any) -> tuple[Any, ...]:
        at = turn[0]._lazy_storage, turn[1]._lazy_storage
        return _record_at(at, spec, spec.bind(args, kwargs), _IN_TURN[target])

    return draw, record


@special("aten._cudnn_rnn.default")
def cudnn_rnn(*args: Any, **kwargs: Any) -> Any:
    """Runs immediately, like all random ops."""
    names = [argument.name for argument in _rnn.arguments]
    bound = dict(zip(names, _rnn.bind(args, kwargs), strict=True))
    _TURNS.recurrent |= bound["dropout"] > 0
    weights = bound["weight"]
    if bound["weight_buf"] is None and all(isinstance(w, LazyTensor) for w in weights):
        how = [bound["weight_stride0"], bound["input"].shape[-1]]
        how += [bound[name] for name in _RNN_LAYOUT]
        bound["weight_buf"] = packed(weights, *how)
    return _rnn_at_once(*bound.values())


_RNN_LAYOUT = "mode hidden_size proj_size num_layers batch_first bidirectional".split()


_record_attention(draws.FLASH_ATTENTION.original, draws.FLASH_ATTENTION)
_record_attention(draws.CUDNN_ATTENTION.original, draws.CUDNN_ATTENTION)
_record_attention(aten._scaled_dot_product_efficient_attention.default)
