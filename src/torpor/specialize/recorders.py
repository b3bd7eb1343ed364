"""Recorders: the record path as a function for each op, specialised when it is called often."""

from __future__ import annotations

from types import FunctionType
from typing import Any, Final
from weakref import ref

import torch

from torpor import _torch, config
from torpor.execute.storage import BY_OPERATOR, TRACE, LazyStorage
from torpor.observe.site import site
from torpor.ops.keys import number_key
from torpor.ops.spec import OpSpec
from torpor.specialize.source import recorder_code
from torpor.trace.overlap import WritesPlain, all_lazy, apart, check_overlap, shares
from torpor.trace.recorder import (
    OPAQUE,
    Recording,
    finish,
    list_values,
    other_value,
    record,
    recording_of,
)
from torpor.trace.tensor import LazyTensor, View
from torpor.trace.values import value_of, write
from torpor.trace.wrap import set_bits, wrap_like, wrap_value

_NAMES: dict[str, Any] = {
    "LazyStorage": LazyStorage,
    "LazyTensor": LazyTensor,
    "View": View,
    "WritesPlain": WritesPlain,
    "all_lazy": all_lazy,
    "apart": apart,
    "check_overlap": check_overlap,
    "config": config,
    "draw": TRACE.draw,
    "enlist": TRACE.enlist,
    "finish": finish,
    "forget": TRACE.pending.pop,
    "grad_mode": torch.is_grad_enabled,
    "inference": torch.is_inference_mode_enabled,
    "list_values": list_values,
    "lock": BY_OPERATOR,
    "make_wrapper": _torch.make_wrapper,
    "number_key": number_key,
    "opaque": OPAQUE,
    "other_value": other_value,
    "pending": TRACE.pending,
    "ref": ref,
    "release": TRACE.lock.release,
    "set_bits": set_bits,
    "shares": shares,
    "site": site,
    "value_of": value_of,
    "wrap_like": wrap_like,
    "wrap_value": wrap_value,
    "write": write,
}
"""What the code of recorders uses."""


SPECIALISE_AFTER: Final = 100
"""Calls after which an op gets code of its own: to compile it takes as long as it saves by then."""


def make_recorder(spec: OpSpec, **other: Any) -> FunctionType:
    """The recorder of an op that becomes a node; `other` is what `recording_of` takes.

    Its attribute `recording` says how it records. It is `record`, until it is called often: then
    the same function gets code that is specialised. Where the native recorder is there, what comes
    to Python is seldom met again, and stays with `record`.
    """
    recording = recording_of(spec, **other)
    left = SPECIALISE_AFTER

    def start(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        nonlocal left
        left -= 1
        if left == 0:
            _specialise(recorder)
        return record(recording, args, kwargs)

    recorder = FunctionType(_begin.__code__, {"start": start}, "record")
    recorder.recording = recording  # type: ignore[attr-defined]  # functions have attributes
    return recorder


def _begin(*args: Any, **kwargs: Any) -> Any:
    return start(args, kwargs)  # type: ignore[name-defined]  # noqa: F821  # in the names of each copy


def specialised(spec: OpSpec, **other: Any) -> FunctionType:
    """`make_recorder` of an op that is called often from its first call on."""
    function = make_recorder(spec, **other)
    _specialise(function)
    return function


def _specialise(function: FunctionType) -> None:
    """Give a recorder the code of its signature. Another thread may be inside meanwhile."""
    recording: Recording = function.recording  # type: ignore[attr-defined]  # set by `make_recorder`
    signature = recording.signature
    names = _NAMES | {
        "calls": recording.calls,
        "cut": recording.cut,
        "make": recording.make,
        "nodes": recording.nodes,
        "numbered": recording.numbered,
        "signature": signature,
        "spec": signature.spec,
    }
    defaults = [(i, a) for i, a in enumerate(signature.spec.arguments) if a.has_default]
    for i, argument in defaults:
        if signature.kinds[i] == "n":
            names |= {f"d{i}": argument.default, f"n{i}": number_key(argument.default)}
    function.__globals__.update(names)
    function.__defaults__ = tuple(a.default for _, a in defaults if not a.keyword_only)
    function.__kwdefaults__ = {a.name: a.default for _, a in defaults if a.keyword_only}
    function.__code__ = recorder_code(signature)  # last: defaults mean nothing to `_begin`
