"""Where TorchDynamo meets a lazy tensor: the function runs uncompiled, recorded op by op.

That is what torpor is for: the ops of the function join those before and after it in one graph,
which torpor's backend compiles. What was compiled for plain tensors stays compiled for them.
"""

from __future__ import annotations

import itertools
from types import CodeType, MethodType
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.utils.weak import WeakIdKeyDictionary

from torpor import _torch
from torpor.frontend.foreign import as_plain, in_mode, tensors_of
from torpor.ir.types import TensorType
from torpor.observe.site import warn_once
from torpor.trace.tensor import LazyTensor
from torpor.trace.wrap import set_bits

_AT_MOST = 64
"""How many items of a container are looked at before TorchDynamo does."""

_sources: WeakKeyDictionary[CodeType, set[str]] = WeakKeyDictionary()
"""Where a function holds lazy tensors that its arguments and closure do not show at once."""


def _meets_lazy(frame: Any) -> bool:
    """TorchDynamo would meet a lazy tensor in this frame, as far as can be told without tracing."""
    found = any(map(_holds_lazy, frame.f_locals.values())) or in_mode() or _in_known_place(frame)
    if found:
        _tell(frame.f_code)
    return found


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
    _tell(frame.f_code)


def _tell(code: CodeType) -> None:
    warn_once(
        "torch.compile",
        f"torch.compile: {code.co_name} meets lazy tensors, so it is not compiled by TorchDynamo: "
        "its ops are recorded one by one and compiled by torpor together with the rest of the "
        "step. Leave torch.compile away, or call the function with plain tensors "
        "(`torpor.eager`)",
    )


def _coerce(tensor: LazyTensor, metadata: Any, expected: type | None = None) -> Any:
    """A gradient on its way into the backward of a compiled function: plain, where that was."""
    return as_plain(tensor) if expected is torch.Tensor else tensor


LazyTensor.__coerce_same_metadata_as_tangent__ = _coerce  # type: ignore[attr-defined]  # AOTAutograd asks for it


# -- fake tensors see the type of a lazy tensor, and compute nothing -------------------------------

_types: Any = WeakIdKeyDictionary()


def _type_of(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor on `meta` with the type of a lazy one: the same one each time while that lasts."""
    if not isinstance(tensor, LazyTensor):
        return None
    type_ = TensorType.of_tensor(tensor)
    known = _types.get(tensor)
    if known is None or known[0] is not type_ or known[1].requires_grad != tensor.requires_grad:
        known = _types[tensor] = type_, _on_meta(tensor, type_)
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


def install() -> None:
    """Watch what TorchDynamo is given, from when it is imported."""
    _torch.make_fakes_with(_type_of)
    _torch.on_dynamo_frame(_meets_lazy, lambda value: isinstance(value, LazyTensor), _remember)
