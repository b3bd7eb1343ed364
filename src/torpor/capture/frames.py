"""Where TorchDynamo meets a lazy tensor: the frame is captured as a region of the trace.

Whatever backend the user has named, the ops of the function join those before and after it in one
graph, which torpor's backend compiles. What TorchDynamo cannot capture is recorded op by op. What
was compiled for plain tensors stays compiled for them.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import MethodType
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torpor import _torch, metrics
from torpor.capture import modules
from torpor.capture.captured_program import CapturedProgram
from torpor.capture.derivatives import Differentiable
from torpor.capture.region import Backward, Region
from torpor.frontend.foreign import as_plain, in_mode, tensors_of
from torpor.ir.types import TensorType
from torpor.observe.phases import COMPILING, phase
from torpor.observe.site import Site
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import set_bits

_AT_MOST = 64
"""How many items of a container are looked at before TorchDynamo does."""

_sources: Any = WeakIdKeyDictionary()  # by code: TorchDynamo makes some that has no hash
"""Where a function holds lazy tensors that its arguments and closure do not show at once."""


def _meets_lazy(frame: Any) -> bool:
    """TorchDynamo would meet a lazy tensor in this frame, as far as can be told without tracing."""
    return any(map(_holds_lazy, frame.f_locals.values())) or in_mode() or _in_known_place(frame)


def _holds_lazy(thing: Any, depth: int = 2) -> bool:
    if isinstance(thing, torch.Tensor):
        return isinstance(thing, LazyTensor)
    if isinstance(thing, torch.nn.Module):
        return any(isinstance(table[name], LazyTensor) for table, name in tensors_of(thing))
    if isinstance(thing, MethodType):
        return isinstance(thing.__self__, torch.nn.Module) and _holds_lazy(thing.__self__)
    if depth and isinstance(thing, (list, tuple, dict)):
        items = thing.values() if isinstance(thing, dict) else thing
        return any(_holds_lazy(item, depth - 1) for item in itertools.islice(items, _AT_MOST))
    return False


def _in_known_place(frame: Any) -> bool:
    """A lazy tensor is where TorchDynamo has met one in this code before."""
    sources = _sources.get(frame.f_code, ())
    return any(isinstance(_look_up(source, frame), LazyTensor) for source in sources)


def _look_up(source: str, frame: Any) -> Any:
    try:
        return eval(source, {"L": frame.f_locals, "G": frame.f_globals})  # TorchDynamo's expression
    except Exception:
        return None  # the way does not lead there any more


def _remember(frame: Any, source: str) -> None:
    if source:
        _sources.setdefault(frame.f_code, set()).add(source)


_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_NOT_OURS = (
    _OURS + "_torch" + os.sep + "modules.py",  # calls modules
    _OURS + "frontend" + os.sep + "hooks.py",
    _OURS + "testing" + os.sep,  # programs of the kit
    _OURS + "bench" + os.sep,
)

_OPTIMIZERS = os.path.dirname(os.path.abspath(torch.optim.__file__)) + os.sep
"""They do other sums where they are compiled, with other bits."""

_refused: Any = WeakIdKeyDictionary()
"""Code that could not be captured, and how often that was tried."""

MOST_TRIALS = 2

MOST_VARIANTS = 16
"""Backward graphs of one graph, each for other results that are not used."""


def _may_capture(frame: Any) -> bool:
    """Neither an optimizer nor what was tried in vain."""
    code = frame.f_code
    if in_mode() or _refused.get(code, 0) >= MOST_TRIALS:
        return False
    return not code.co_filename.startswith(_OPTIMIZERS) and modules.may_capture(code)


def _is_ours(frame: Any) -> bool:
    file: str = frame.f_code.co_filename
    return file.startswith(_OURS) and not file.startswith(_NOT_OURS)


def _not_captured(frame: Any, reason: str) -> None:
    """A frame could not be captured: its ops are recorded one by one."""
    code = frame.f_code
    _refused[code] = _refused.get(code, 0) + 1
    reason = reason.strip().partition("\n")[0]
    metrics.count_line("NotCaptured", f"{Site(code, code.co_firstlineno)}: {reason}")


def _region(captured: _torch.Captured) -> Region:
    program = CapturedProgram(captured.module)
    metrics.count_line("CapturedRegions", program.line())
    return Region(program, captured.shown, captured.resumes, _backward_of(captured))


def _backward_of(captured: _torch.Captured) -> Backward | None:
    uses, left = captured.uses, itertools.count(MOST_VARIANTS, -1)
    gradients = _torch.gradients_of_results(captured.module.graph)
    if uses is None or not gradients:
        return None

    def without(unused: frozenset[int]) -> CapturedProgram | None:
        module = _torch.without_results(captured.module, unused) if next(left) > 0 else None
        uses.is_refused |= module is None
        return None if module is None else CapturedProgram(module)

    types = tuple([TensorType.of_tensor(one.meta["val"]) for one in gradients])
    return Backward(types, without)


def _coerce(tensor: LazyTensor, metadata: Any, expected: type | None = None) -> Any:
    """A gradient on its way into the backward of a compiled function: plain, where that was."""
    return as_plain(tensor) if expected is torch.Tensor else tensor


LazyTensor.__coerce_same_metadata_as_tangent__ = _coerce  # type: ignore[attr-defined]  # AOTAutograd asks for it


# -- fake tensors see the type of a lazy tensor, and compute nothing -------------------------------


class _Types(threading.local):
    """Tensors on `meta` that stand for lazy ones, by those, while something is captured."""

    def __init__(self) -> None:
        self.known: Any = WeakIdKeyDictionary()


_types = _Types()


def _type_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor on `meta` with the type of a lazy one: the same one each time while that lasts."""
    if not isinstance(tensor, LazyTensor):
        return None
    type_ = TensorType.of_tensor(tensor)
    known = _types.known.get(tensor)
    if known is None or known[0] is not type_ or known[1].requires_grad != tensor.requires_grad:
        known = _types.known[tensor] = type_, _on_meta(tensor, type_)
    return known[1]  # type: ignore[no-any-return]  # the dictionary has no types


def _on_meta(tensor: LazyTensor, type_: TensorType) -> torch.Tensor:
    with _torch.without_modes():
        memory = torch.empty((type_.offset + type_.span,), dtype=type_.dtype, device="meta")
        made = torch.empty(0, dtype=type_.dtype, device="meta")
        made.set_(memory.untyped_storage(), type_.offset, type_.shape, type_.stride)
        set_bits(made, type_)
        if getattr(tensor, "_is_param", False):
            return torch.nn.Parameter(made, tensor.requires_grad)
        return made.requires_grad_(tensor.requires_grad)


@contextmanager
def _capture() -> Iterator[None]:
    """Something is captured in the body; no tensor is referred to weakly after it."""
    answers = nullcontext() if modules.is_asked() else _torch.as_if_not_compiled()
    with modules.CAPTURES, phase(COMPILING), answers:
        try:
            yield
        finally:
            _types.known.clear()


def install() -> None:
    """Watch what TorchDynamo is given, from when it is imported."""
    _torch.make_fakes_with(_type_of)
    _torch.make_fx_takes(LazyTensor)
    _torch.keep_lazy_tangents(_is_lazy)
    _torch.take_ops_apart_as_eager_does()
    _torch.detach_what_has_no_gradient()
    backend = _torch.region_backend(_region, Differentiable)
    _torch.on_dynamo_frame(
        _torch.LazyFrames(
            _is_ours,
            _meets_lazy,
            _is_lazy,
            _remember,
            _may_capture,
            backend,
            _not_captured,
            _capture,
        )
    )


def _is_lazy(value: object) -> bool:
    return type(value) is LazyTensor
