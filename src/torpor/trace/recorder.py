"""How a call of an op becomes a node.

`record` is the whole of it: bind the arguments, read their values, build the key, find or make the
node, make the results. It reads an op's signature (`ops.signature`), as the native recorder does.
Ops that are called often from Python do the same in code of their own (`ops.recorder_source`), so
that no argument list is walked.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Final
from weakref import ref

import torch

from torpor import _torch, config, metrics
from torpor.backend.registry import get_backend
from torpor.execute import sync
from torpor.execute.storage import BY_OPERATOR, TRACE, LazyStorage
from torpor.ir.node import Node, Value
from torpor.ops.infer import NotRecordable
from torpor.ops.keys import key_of, number_key
from torpor.ops.recorder_source import recorder_code
from torpor.ops.signature import NO_EXTRA, Extra, Make, Result, Signature, signature_of
from torpor.ops.spec import ArgKind, OpSpec
from torpor.trace.offsets import LOOKS, node_at_offset
from torpor.trace.overlap import (
    WritesPlain,
    all_lazy,
    apart,
    check_kept,
    check_overlap,
    check_written,
    shares,
)
from torpor.trace.scalars import node_with_numbers, promotable_positions
from torpor.trace.site import site
from torpor.trace.tensor import LazyTensor, View
from torpor.trace.values import make_node, root_value, value_of, write
from torpor.trace.wrap import (
    data_storage,
    is_traceable,
    resize,
    set_bits,
    wrap_like,
    wrap_value,
    wrap_view,
)

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
Key = tuple[Any, ...]


class CutFirst(Exception):
    """The trace is as long as it may get: cut it, then record the op again."""


class ForeignTensor(Exception):
    """Another tensor subclass is among the arguments: let it have its turn."""


class LeavesDevice(Exception):
    """The op makes a tensor on a device where tensors are plain."""


# -- one op, and the path that its calls take ------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recording:
    """One op as it is recorded: its signature, its nodes by key, and what makes a missing one."""

    signature: Signature
    nodes: dict[Key, Any]
    make: Callable[[Key, tuple[Any, ...]], Any]  # from the key, and the arguments as they came
    calls: list[int]
    numbered: Callable[[torch.device, Any], torch.device]
    cut: Callable[[], object] = sync.cut


def record(recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record one call of an op. Its results are lazy tensors."""
    signature = recording.signature
    spec = signature.spec
    recording.calls[0] += 1
    with TRACE.lock:
        bound = spec.bind(args, kwargs)
        key = key_of_call(recording, bound)
        node = recording.nodes.get(key)
        if node is None:
            node = recording.make(key, tuple(bound))
        if spec.may_fail:
            node.site = site()
        result = finish(signature, node, tuple(bound))
    if len(TRACE.pending) > config.max_trace_nodes:
        recording.cut()
    return result


def key_of_call(recording: Recording, bound: list[Any]) -> Key:
    """The intern key of an op on `bound`, its arguments in schema order."""
    signature = recording.signature
    check_kept(signature, bound)
    values = []
    for position, argument in enumerate(signature.spec.arguments):
        if position == signature.device and bound[position] is not None:
            bound[position] = recording.numbered(bound[position], bound[0])
        values.append(_value(argument.kind, bound[position]))
    check_written(signature, bound)
    return key_of(signature.spec, values) + _extra(signature.extra, bound)


def _extra(extra: Extra, bound: list[Any]) -> Key:
    """The part of a key that is no argument."""
    flags = [torch.is_grad_enabled()] if extra.grad_mode else []
    flags += [bound[position].requires_grad for position in extra.requires_grad]
    return ((tuple(flags),) if flags else ()) + ((TRACE.draw(),) if extra.draw else ())


# -- values of arguments ---------------------------------------------------------------------------


def _value(kind: ArgKind, arg: Any) -> Any:
    """What stands for an argument in a node."""
    if arg is None:
        return None
    if kind is ArgKind.TENSOR:
        return tensor_value(arg) if isinstance(arg, torch.Tensor) else arg
    if kind is ArgKind.TENSORS:
        return list_values(arg)
    if kind is ArgKind.OPAQUE:
        raise _OPAQUE
    return arg


_OPAQUE = NotRecordable("an argument cannot be part of a graph", fallback=True)


def tensor_value(arg: torch.Tensor) -> Value:
    """What stands in a key for a tensor."""
    return value_of(arg) if type(arg) is LazyTensor else other_value(arg)


def list_values(args: Any) -> tuple[Any, ...]:
    """What stands in a key for a list of tensors."""
    return tuple([value_of(a) if type(a) is LazyTensor else other_value(a) for a in args])


def other_value(arg: Any) -> Any:
    """What stands in a key for a tensor argument that is not a lazy tensor."""
    if arg is None:
        return None
    if not isinstance(arg, torch.Tensor):
        return number_key(arg)
    if type(arg) not in _PLAIN_TYPES:
        if type(arg) is LazyTensor:
            raise AssertionError("lazy tensors are read by the recorder itself")
        if _torch.has_own_dispatch(type(arg)):
            raise ForeignTensor
    if not is_traceable(arg) or arg.device.type == "meta":
        raise NotRecordable(f"an argument has layout {arg.layout} on {arg.device}", fallback=True)
    # its owner may write to it before the graph runs, and torpor would not know: take a copy
    storage = data_storage(_snapshot(arg), arg.device)
    return TRACE.leaf_value(storage)


def _snapshot(tensor: torch.Tensor) -> torch.Tensor:
    with _torch.without_torch_function():
        return tensor.detach().clone()


def numbered(device: torch.device, tensor: Any) -> torch.device:
    """`device` with its number, which tensors on it have."""
    leaves = type(tensor) is LazyTensor and "lazy" == tensor.device.type != device.type
    if leaves or (device.type == "meta" and type(tensor) is LazyTensor):
        raise LeavesDevice
    if device.type == "lazy" and device.index is None:
        return torch.device("lazy", get_backend().default_device_ordinal)
    return device


def _as_it_is(device: torch.device, tensor: Any) -> torch.device:
    return device


# -- nodes that were not met before ----------------------------------------------------------------


def node_maker(spec: OpSpec) -> Callable[[Key, tuple[Any, ...]], Node]:
    """What makes the node of an op whose key is not in the table.

    Numbers and offsets that change become run-time inputs, if the op may have such.
    """
    kinds = tuple(a.kind for a in spec.arguments)
    has_offset = spec.target in LOOKS

    def make(key: Key, raw: tuple[Any, ...]) -> Node:
        if TRACE.misses > config.max_trace_nodes:
            raise CutFirst  # nothing of this op has happened yet
        bound = list(map(_as_bound, kinds, key, raw))  # the key may end with more
        positions = promotable_positions(spec, bound)
        if positions:
            return node_with_numbers(spec, key, bound, positions)
        moving = node_at_offset(spec, key, bound, make_node) if has_offset else None
        return make_node(spec, key, bound) if moving is None else moving

    return make


def _as_bound(kind: ArgKind, key: Any, raw: Any) -> Any:
    if kind is ArgKind.TENSOR:
        return key if type(key) is Value else raw
    if kind is ArgKind.TENSORS:
        if raw is None:
            return None
        return tuple(k if type(k) is Value else r for k, r in zip(key, raw, strict=True))
    if type(raw) is list:
        return tuple(raw)
    return raw


# -- results ---------------------------------------------------------------------------------------


def finish(signature: Signature, node: Node, args: tuple[Any, ...]) -> Any:
    """The results of a call: fresh tensors, views, written arguments, lists of them."""
    outputs = iter(node.outputs)
    length = _list_length(signature, node, args)
    results = [_result(each, node, outputs, args, length) for each in signature.results]
    for written in signature.written:
        for tensor in _tensors(args[written.argument]):
            rewrite(tensor, next(outputs))
    if not results:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _tensors(written: Any) -> list[Any]:
    """The tensors that an argument is: one, several or none."""
    several = written if isinstance(written, (list, tuple)) else (written,)
    return [tensor for tensor in several if tensor is not None]


def _list_length(signature: Signature, node: Node, args: tuple[Any, ...]) -> int:
    """How many outputs the op's one list-typed result takes."""
    alone = sum(not r.is_list and r.make < Make.ARGUMENT for r in signature.results)
    written = sum(len(_tensors(args[w.argument])) for w in signature.written)
    return len(node.outputs) - alone - written


def _result(result: Result, node: Node, outputs: Any, args: tuple[Any, ...], length: int) -> Any:
    if result.make is Make.ARGUMENT:
        return args[result.argument]
    if result.make is Make.LENGTH:
        return args[result.argument].shape[2]
    if result.is_list:
        return [_one(result, node, next(outputs), args) for _ in range(length)]
    return _one(result, node, next(outputs), args)


def _one(result: Result, node: Node, value: Value, args: tuple[Any, ...]) -> Any:
    if result.make is Make.FRESH or value.type is None:
        return wrap_value(value)
    viewed: LazyTensor = args[result.argument]
    storage, view = viewed._lazy_storage, viewed._lazy_view
    if result.make is Make.VIEW:
        view = View(view, node, value.index, root_value(storage), value)
    return wrap_view(storage, view, value.type, viewed)


def rewrite(tensor: LazyTensor, new: Value) -> None:
    """Write `new` to `tensor`, which takes another size first if the op resized it (`out=`)."""
    type_ = new.type
    restrided = type_.numel == 0 and tensor.stride() != type_.stride
    if tuple(tensor.shape) != type_.shape or restrided:
        resize(tensor, type_)
    write(tensor, new)


# -- recorders -------------------------------------------------------------------------------------


def recording_of(
    spec: OpSpec,
    *,
    extra: Extra = NO_EXTRA,
    lengths: Sequence[int] = (),
    nodes: dict[Key, Any] | None = None,
    make: Callable[[Key, tuple[Any, ...]], Any] | None = None,
    calls: list[int] | None = None,
    cut: Callable[[], object] = sync.cut,
    may_leave: bool = False,
) -> Recording:
    """How an op is recorded: like any other, but for what is given.

    With `may_leave`, a tensor on `lazy` may stay lazy on the physical device.
    """
    name = spec.target._schema.name.removeprefix("aten::")
    return Recording(
        signature=signature_of(spec, extra, lengths),
        nodes=spec.kind.nodes if nodes is None else nodes,
        make=node_maker(spec) if make is None else make,
        calls=metrics.op_cell(f"lazy::{name}", spec.name) if calls is None else calls,
        numbered=_as_it_is if may_leave else numbered,
        cut=cut,
    )


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
    "opaque": _OPAQUE,
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
