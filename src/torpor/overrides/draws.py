"""Random ops that run later than they were recorded, yet draw the same numbers as in eager.

The generator of a CUDA device is a seed and an offset, and a kernel that draws advances the offset
by an amount that depends on its sizes only. So such an op can be recorded: its turn is reserved
(`reserve`), which advances the generator, and when the op runs it draws from there (`at_turn`). A
turn is two CPU tensors, seed and offset, which are ordinary graph inputs.

A graph that runs as a whole in program order needs no turns, only an order among its random ops:
each takes a result of the previous one as an argument (`IN_ORDER`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

import torch

from torpor.ir.types import TensorType

DRAWING: Final = threading.RLock()
"""Held while an op that may draw runs immediately, and while a generator's state is swapped."""

_ALL: Final = (1 << 64) - 1
_HALF: Final = 1 << 63


def generator_of(device: torch.device) -> torch.Generator:
    """The default generator of a CUDA device."""
    torch.cuda.init()
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]


@contextmanager
def drawing_from(generator: torch.Generator, device: torch.device) -> Iterator[None]:
    """Make kernels on `device` draw from `generator`."""
    default = generator_of(device)
    with DRAWING:
        own = default.graphsafe_get_state()
        default.graphsafe_set_state(generator)
        try:
            yield
        finally:
            default.graphsafe_set_state(own)


# -- turns -----------------------------------------------------------------------------------------


def reserve(device: torch.device, numbers: int) -> tuple[int, int]:
    """Advance the generator of `device`; returns the seed and offset to draw from later."""
    generator = generator_of(device)
    with DRAWING:
        seed, offset = generator.initial_seed(), generator.get_offset()
        generator.set_offset(offset + numbers)
    return seed, offset


def as_int64(seed: int) -> int:
    """An unsigned seed as the int64 that a tensor can hold."""
    return seed - (_ALL + 1) if seed >= _HALF else seed


def set_turn(generator: torch.Generator, seed: torch.Tensor, offset: torch.Tensor) -> None:
    """Set `generator` to a reserved turn."""
    generator.manual_seed(int(seed) & _ALL)
    generator.set_offset(int(offset))


class CapturedGenerators(threading.local):
    """Generators registered with the CUDA graph this thread is capturing, by offset address."""

    def __init__(self) -> None:
        self.generators: dict[int, torch.Generator] = {}


CAPTURED: Final = CapturedGenerators()


@contextmanager
def at_turn(seed: torch.Tensor, offset: torch.Tensor, device: torch.device) -> Iterator[None]:
    """Make kernels on `device` draw from a reserved turn.

    During a capture, they draw from the generator registered with the CUDA graph.
    """
    generator = CAPTURED.generators.get(offset.data_ptr())
    if generator is None:
        generator = torch.Generator(device)
        set_turn(generator, seed, offset)
    with drawing_from(generator, device):
        yield


def numbers_drawn(
    op: Any, arguments: Sequence[Any], keywords: dict[str, Any], device: torch.device
) -> int:
    """By how much `op` advances the generator of `device`; found by running it."""
    trial = torch.Generator(device)
    with drawing_from(trial, device):
        op(*arguments, **keywords)
        return trial.get_offset()


# -- ops that draw in their turn -------------------------------------------------------------------


@dataclass(frozen=True)
class DrawingOp:
    """A random op of torch's, and a variant that takes its turn or its predecessor as arguments."""

    original: Any
    target: Any
    tensors: tuple[int, ...]  # indices of the original's results that are kept


_library = torch.library.Library("torpor", "FRAGMENT")


def _define(original: Any, name: str, arguments: str, tensors: tuple[int, ...]) -> DrawingOp:
    """A variant of `original` that takes its turn."""

    def run(
        seed: torch.Tensor, offset: torch.Tensor, query: torch.Tensor, *rest: Any, **names: Any
    ) -> Any:
        with at_turn(seed, offset, query.device):
            return original(query, *rest, **names)

    def types(seed: Any, offset: Any, *args: Any, **names: Any) -> Any:
        return original(*args, **names)

    turn = "Tensor seed, Tensor offset"
    return _defined(original, name, f"{turn}, {arguments}", tensors, run, types)


def _define_in_order(
    original: Any, name: str, arguments: str, tensors: tuple[int, ...]
) -> DrawingOp:
    """A variant of `original` that takes a result of the previous random op."""

    def run(after: torch.Tensor | None, *args: Any, **names: Any) -> Any:
        return original(*args, **names)

    return _defined(original, name, f"Tensor? after, {arguments}", tensors, run, run)


def _defined(
    original: Any,
    name: str,
    arguments: str,
    tensors: tuple[int, ...],
    run: Callable[..., Any],
    types: Callable[..., Any],
) -> DrawingOp:
    results = ", ".join(["Tensor"] * len(tensors))
    _library.define(f"{name}({arguments}) -> ({results})")

    def kept(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **names: Any) -> tuple[torch.Tensor, ...]:
            results = function(*args, **names)
            return tuple(results[place] for place in tensors)

        return call

    _library.impl(name, kept(run), "CUDA")
    _library._register_fake(name, kept(types))
    return DrawingOp(original, getattr(torch.ops.torpor, name).default, tensors)


_TENSORS: Final = "Tensor query, Tensor key, Tensor value"
_SWITCHES: Final = "float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None"
_FLASH: Final = (f"{_TENSORS}, {_SWITCHES}", (0, 1, 6, 7, 8))
_CUDNN: Final = (
    f"{_TENSORS}, Tensor? attn_bias, bool compute_log_sumexp, {_SWITCHES}",
    (0, 1, 6, 7),
)
_flash = torch.ops.aten._scaled_dot_product_flash_attention.default
_cudnn = torch.ops.aten._scaled_dot_product_cudnn_attention.default

FLASH_ATTENTION: Final = _define(_flash, "flash_attention", *_FLASH)
CUDNN_ATTENTION: Final = _define(_cudnn, "cudnn_attention", *_CUDNN)
IN_TURN: Final = frozenset({FLASH_ATTENTION.target, CUDNN_ATTENTION.target})
"""Ops whose first two arguments are a turn."""


# -- ops that draw in the order of their graph -----------------------------------------------------

ATTENTION_IN_ORDER: Final = {
    one.original: one
    for one in (
        _define_in_order(_flash, "flash_attention_after", *_FLASH),
        _define_in_order(_cudnn, "cudnn_attention_after", *_CUDNN),
    )
}


def _define_mask() -> Any:
    """The mask of `native_dropout`, computed without the input."""
    memory = "SymInt[] size, SymInt[] stride, ScalarType dtype, Device device"
    _library.define(f"dropout_mask(Tensor? after, {memory}, float p) -> Tensor")

    def run(
        after: torch.Tensor | None, size: Any, stride: Any, dtype: Any, device: Any, p: float
    ) -> torch.Tensor:
        like = torch.empty_strided(size, stride, dtype=dtype, device=device)
        mask: torch.Tensor = torch.ops.aten.native_dropout.default(like, p, True)[1]
        return mask

    def types(
        after: Any, size: Any, stride: Any, dtype: Any, device: Any, p: float
    ) -> torch.Tensor:
        return torch.empty_strided(size, stride, dtype=torch.bool, device=device)

    _library.impl("dropout_mask", run, "CompositeExplicitAutograd")
    _library._register_fake("dropout_mask", types)
    return torch.ops.torpor.dropout_mask.default


DROPOUT_MASK: Final = _define_mask()
IN_ORDER: Final = frozenset({DROPOUT_MASK, *(one.target for one in ATTENTION_IN_ORDER.values())})
"""Random ops whose first argument is a result of the previous one."""


def has_a_mask(type_: TensorType, p: float) -> bool:
    """Whether `native_dropout` draws a mask, and the input is dense, so that the mask is too."""
    return 0 < p < 1 and type_.numel > 0 and type_.is_dense


def scale_of(p: float, dtype: torch.dtype) -> float:
    """1 / (1 - p), rounded like the kernel of `native_dropout`."""
    kept = torch.tensor(1.0 - p, dtype=torch.float64 if dtype is torch.float64 else torch.float32)
    return kept.reciprocal().item()
