"""The ways one sample is run. A variant takes an entered sample and returns all worth comparing.

Each is the same short program for eager and for the subject under test; what it returns (outputs,
inputs after the run, views taken before it, buffers behind `out=`) is compared leaf by leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing._internal.opinfo.core import OpInfo

from tests.ops.compare import equal
from tests.ops.samples import SEED, Entered, tensors_in

GARBAGE = 77
"""What an `out=` buffer holds before the op writes it."""


@dataclass(frozen=True)
class Variant:
    name: str
    run: Callable[[OpInfo, Entered, Any], dict[str, Any]]
    grad: bool = False
    """Whether the sample's tensors require their gradients."""


def forward(op: OpInfo, s: Entered, _: Any) -> dict[str, Any]:
    output = _call(op, s)
    return {
        "output": output,
        "input": tensors_in((s.args, s.kwargs)),
        "is_input": _which_inputs(output, s),
    }


def backward(op: OpInfo, s: Entered, _: Any) -> dict[str, Any]:
    output = _call(op, s)
    return {"output": output, "grad": _gradients(s.process(output), s)}


def in_place(op: OpInfo, s: Entered, _: Any) -> dict[str, Any]:
    """A view taken before the write must see it."""
    self = s.args[0]
    view = self.view(-1) if self.is_contiguous() else self[...]
    output = s.subject.call(op.inplace_variant, *s.args, **s.kwargs)
    return {
        "output": output,
        "view": view,
        "input": tensors_in(s.args),
        "returns_self": output is self,
    }


def in_place_on_view(op: OpInfo, s: Entered, _: Any) -> dict[str, Any]:
    """Writing through a view must reach its base, and only the viewed part."""
    base = torch.stack([s.args[0], s.args[0]])
    output = s.subject.call(op.inplace_variant, base[1], *s.args[1:], **s.kwargs)
    return {"output": output, "base": base}


def in_place_backward(op: OpInfo, s: Entered, _: Any) -> dict[str, Any]:
    output = s.subject.call(op.inplace_variant, s.args[0].clone(), *s.args[1:], **s.kwargs)
    return {"output": output, "grad": _gradients(s.process(output), s)}


def out(op: OpInfo, s: Entered, output: Any) -> dict[str, Any]:
    return _into(op, s, _buffers(output, s, lambda t: (_garbage(t.shape, t.dtype),) * 2))


def out_strided(op: OpInfo, s: Entered, output: Any) -> dict[str, Any]:
    """Every second element of a buffer: the others must stay as they were."""
    return _into(op, s, _buffers(output, s, _with_holes))


def out_resized(op: OpInfo, s: Entered, output: Any) -> dict[str, Any]:
    return _into(op, s, _buffers(output, s, lambda t: (_garbage((0,), t.dtype),) * 2))


def out_cast(op: OpInfo, s: Entered, output: Any) -> dict[str, Any]:
    """A buffer of another dtype: cast to, or refused, as eager does."""
    return _into(op, s, _buffers(output, s, lambda t: (_garbage(t.shape, _other(t.dtype)),) * 2))


def write_output(op: OpInfo, s: Entered, _: Any) -> dict[str, Any]:
    """What is written to an output reaches the inputs it is a view of, and no others."""
    output = _call(op, s)
    for tensor in tensors_in(output):
        tensor.fill_(3)
    return {"output": output, "input": tensors_in((s.args, s.kwargs))}


def write_input(op: OpInfo, s: Entered, _: Any) -> dict[str, Any]:
    """What is written to an input later reaches the outputs that are views of it, and no others."""
    output = _call(op, s)
    for tensor in tensors_in((s.args, s.kwargs)):
        tensor.fill_(3)
    return {"output": output, "input": tensors_in((s.args, s.kwargs))}


FORWARD = Variant("forward", forward)
BACKWARD = Variant("backward", backward, grad=True)
IN_PLACE = (Variant("in-place", in_place), Variant("in-place on a view", in_place_on_view))
IN_PLACE_BACKWARD = Variant("in-place backward", in_place_backward, grad=True)
OUT_STRIDED = Variant("out strided", out_strided)
OUT = (Variant("out", out), OUT_STRIDED, Variant("out resized", out_resized))
OUT_CAST = Variant("out cast", out_cast)
WRITES = (Variant("write output", write_output), Variant("write input", write_input))


def _call(op: OpInfo, s: Entered) -> Any:
    if tensors_in((s.args, s.kwargs)):
        return s.subject.call(op.op, *s.args, **s.kwargs)
    with s.subject.factories():
        return s.subject.call(op.op, *s.args, **s.kwargs)


def _which_inputs(output: Any, s: Entered) -> list[int]:
    """For each output tensor, the input it is (the very object), or -1."""
    inputs = tensors_in((s.args, s.kwargs))
    return [next((i for i, t in enumerate(inputs) if t is o), -1) for o in tensors_in(output)]


def _gradients(output: Any, s: Entered) -> tuple[Tensor | None, ...]:
    outputs = [t for t in tensors_in(output) if t.requires_grad]
    inputs = [t for t in tensors_in((s.args, s.kwargs)) if t.requires_grad]
    if not outputs or not inputs:
        return ()
    generator = torch.Generator().manual_seed(SEED)
    cotangents = [
        s.subject.enter(torch.randn(t.shape, dtype=t.dtype, generator=generator)) for t in outputs
    ]
    return torch.autograd.grad(outputs, inputs, cotangents, allow_unused=True)


def _buffers(
    output: Any, s: Entered, make: Callable[[Tensor], tuple[Tensor, Tensor]]
) -> tuple[Any, list[Tensor]]:
    """`out=` for an op with that output, and the whole buffers behind it.

    `make` gives a plain buffer and the part of it that is passed as `out`.
    """
    whole, parts = [], []
    for template in tensors_in(output):
        buffer, part = make(template)
        entered = s.subject.enter(buffer)
        whole.append(entered)
        same = part is buffer
        parts.append(
            entered
            if same
            else entered.as_strided(part.size(), part.stride(), part.storage_offset())
        )
    return (parts[0] if isinstance(output, Tensor) else tuple(parts)), whole


def _into(op: OpInfo, s: Entered, prepared: tuple[Any, list[Tensor]]) -> dict[str, Any]:
    target, whole = prepared
    output = s.subject.call(op.op, *s.args, **s.kwargs, out=target)
    given, returned = tensors_in(target), tensors_in(output)
    same = [a is b for a, b in zip(given, returned, strict=False)]
    return {"output": output, "out": target, "buffer": whole, "returns_out": same}


def broken_out(leaves: list[tuple[str, Any]]) -> bool:
    """Whether a strided `out=` was not written in place: holes filled, or strides changed.

    A few eager kernels do that (`linear`, `avg_pool3d`, `geqrf`): then eager is no judge.
    """
    for where, leaf in leaves:
        if where.startswith(".buffer["):
            holes = _holes(leaf)
            if not equal(holes, _garbage(holes.shape, holes.dtype)):
                return True
        if where.startswith(".out") and isinstance(leaf, Tensor):
            given = _with_holes(torch.empty(leaf.shape, dtype=leaf.dtype))[1]
            if leaf.stride() != given.stride():
                return True
    return False


def _holes(buffer: Tensor) -> Tensor:
    return buffer[::2] if buffer.shape == (3,) else buffer[..., 1::2]


def _garbage(shape: Any, dtype: torch.dtype) -> Tensor:
    return torch.full(tuple(shape), GARBAGE, dtype=dtype)


def _with_holes(template: Tensor) -> tuple[Tensor, Tensor]:
    if template.dim() == 0:
        buffer = _garbage((3,), template.dtype)
        return buffer, buffer[1]
    buffer = _garbage((*template.shape[:-1], 2 * template.shape[-1]), template.dtype)
    return buffer, buffer[..., ::2]


def _other(dtype: torch.dtype) -> torch.dtype:
    if dtype.is_complex:
        return torch.complex128
    return torch.float64 if dtype.is_floating_point else torch.float32
