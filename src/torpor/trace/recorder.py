"""How a call of an op becomes a node.

`record` is the whole path: bind the arguments, read their values, build the key, find or make the
node, make the results. It is driven by the op's signature (`ops.signature`). So is the native
recorder, which handles cache hits where there is a C++ compiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch

from torpor import _torch, config, metrics
from torpor.backend.native_library import NATIVE
from torpor.backend.registry import get_backend
from torpor.execute import sync
from torpor.execute.storage import TRACE
from torpor.inference.infer import NotRecordable
from torpor.ir.node import Key, Node, Value
from torpor.observe.site import site
from torpor.ops.keys import number_key
from torpor.ops.signature import NO_EXTRA, Extra, Make, Result, Signature, signature_of
from torpor.ops.spec import ArgKind, OpSpec
from torpor.overrides.resize import resize
from torpor.symbols.offsets import LOOKS, node_at_offset
from torpor.symbols.scalars import node_with_numbers, promotable_positions
from torpor.trace.overlap import check_kept, check_written
from torpor.trace.tensor import LazyTensor, View
from torpor.trace.values import make_node, root_value, value_of, write
from torpor.trace.wrap import clone_plain, data_storage, is_traceable, wrap_value, wrap_view

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


class CutFirst(Exception):
    """The trace has reached its maximum length: cut it, then record the op again."""


class ForeignTensor(Exception):
    """An argument is of another tensor subclass: give its `__torch_dispatch__` a turn."""


class LeavesDevice(Exception):
    """The op makes a tensor on a device whose tensors are not lazy."""


# -- the recording path ----------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Recording:
    """How one op is recorded: its signature, its nodes by key, and how a missing node is made."""

    signature: Signature
    nodes: dict[Key, Any]
    make: Callable[[Key, tuple[Any, ...]], Any]  # takes the key and the arguments as passed
    readers: tuple[Callable[[Any], Any], ...]  # for each argument: maps it to its part of the key
    calls: list[int]
    numbered: Callable[[torch.device, Any], torch.device]
    cut: Callable[[], object] = sync.cut


def record(recording: Recording, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Record one call of an op and return its results as lazy tensors."""
    signature = recording.signature
    spec = signature.spec
    recording.calls[0] += 1
    with TRACE.lock:
        bound = spec.bind(args, kwargs)
        key = key_of_call(recording, bound)
        if signature.assigns and is_assignment(key):
            write(bound[0], key[1])
            return bound[0]
        node = recording.nodes.get(key)
        if node is None:
            node = recording.make(key, tuple(bound))
        if spec.may_fail:
            node.site = site()
        result = finish(signature, node, bound)
    if len(TRACE.pending) > config.max_trace_nodes:
        recording.cut()
    return result


def key_of_call(recording: Recording, bound: list[Any]) -> Key:
    """The intern key of an op on `bound`, its arguments in schema order."""
    signature = recording.signature
    if signature.kept:
        check_kept(signature, bound)
    try:
        key = [read(arg) for read, arg in zip(recording.readers, bound, strict=True)]
    finally:
        NATIVE.entered.clear()
    device = signature.device
    if device >= 0 and bound[device] is not None:
        bound[device] = key[device] = recording.numbered(bound[device], bound[0])
    if signature.written:
        check_written(signature, bound)
    return (*key, *_extra(signature.extra, bound)) if signature.extra else tuple(key)


def is_assignment(key: Key) -> bool:
    """A copy of this key needs no node: the target holds the source's value from now on."""
    target, source = key[0], key[1]
    same = type(source) is Value and source.type is target.type
    return same and bool(source.type.injective)


def _extra(extra: Extra, bound: list[Any]) -> Key:
    """The part of a key that comes after the arguments."""
    flags = [torch.is_grad_enabled()] if extra.grad_mode else []
    flags += [bound[position].requires_grad for position in extra.requires_grad]
    return ((tuple(flags),) if flags else ()) + ((TRACE.draw(),) if extra.draw else ())


# -- values of arguments ---------------------------------------------------------------------------


def tensor_value(arg: Any) -> Any:
    """The key of a tensor."""
    return value_of(arg) if type(arg) is LazyTensor else other_value(arg)


def list_values(args: Any) -> tuple[Any, ...] | None:
    """The key of a list of tensors."""
    return None if args is None else tuple([tensor_value(arg) for arg in args])


def other_value(arg: Any) -> Any:
    """The key of a tensor argument that is not a lazy tensor."""
    if arg is None:
        return None
    if not isinstance(arg, torch.Tensor):
        return number_key(arg)
    return NATIVE.once(arg, TRACE.epoch, snapshot_value)


def snapshot_value(tensor: torch.Tensor) -> Value:
    """A leaf with what a plain tensor holds now: its owner may write to it later."""
    assert type(tensor) is not LazyTensor, "lazy tensors are read by the recorder itself"
    if type(tensor) not in _PLAIN_TYPES and _torch.has_own_dispatch(type(tensor)):
        raise ForeignTensor
    if not is_traceable(tensor) or tensor.device.type == "meta":
        raise NotRecordable(
            f"an argument has layout {tensor.layout} on {tensor.device}", fallback=True
        )
    with _torch.without_torch_function():
        copy = clone_plain(tensor)
    return TRACE.leaf_value(data_storage(copy, tensor.device))


def _itself(arg: Any) -> Any:
    return arg


def _tuple(args: Any) -> tuple[Any, ...] | None:
    return None if args is None else tuple(args)


def _numbers(args: Any) -> tuple[Any, ...] | None:
    return None if args is None else tuple(map(number_key, args))


def _nothing(arg: Any) -> None:
    if arg is not None:
        raise NotRecordable("an argument cannot be part of a graph", fallback=True)


READERS: Final = {
    "t": tensor_value, "T": list_values, "p": _itself, "P": _tuple, "n": number_key,
    "N": _numbers, "o": _nothing,
}  # fmt: skip
"""Maps an argument to its part of the key, by its kind in the signature."""


def numbered(device: torch.device, tensor: Any) -> torch.device:
    """`device` with an explicit index, as tensors report it."""
    leaves = type(tensor) is LazyTensor and "lazy" == tensor.device.type != device.type
    if leaves or (device.type == "meta" and type(tensor) is LazyTensor):
        raise LeavesDevice
    if device.type == "lazy" and device.index is None:
        return torch.device("lazy", get_backend().default_device_ordinal)
    return device


# -- cache misses ----------------------------------------------------------------------------------


def node_maker(spec: OpSpec) -> Callable[[Key, tuple[Any, ...]], Node]:
    """A function that makes the node of an op on a cache miss.

    Numbers and offsets that change become run-time inputs, if the op supports that.
    """
    kinds = tuple(a.kind for a in spec.arguments)
    has_offset = spec.target in LOOKS

    def make(key: Key, raw: tuple[Any, ...]) -> Node:
        if TRACE.misses > config.max_trace_nodes:
            raise CutFirst  # safe: this op has had no effect yet
        bound = list(map(_as_bound, kinds, key, raw))  # the key may be longer (`Extra`)
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


def finish(signature: Signature, node: Node, args: Sequence[Any]) -> Any:
    """The results of a call: fresh tensors, views, written arguments, lists of them."""
    if signature.is_plain:
        return wrap_value(node.outputs[0])
    if signature.bumps:  # before anything is written: it refuses inference tensors
        torch.autograd.graph.increment_version(_tensors(args[signature.written[0].argument]))
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
    """The tensors of an argument: one, several or none."""
    several = written if isinstance(written, (list, tuple)) else (written,)
    return [tensor for tensor in several if tensor is not None]


def _list_length(signature: Signature, node: Node, args: Sequence[Any]) -> int:
    """How many outputs the op's one list-typed result takes."""
    alone = sum(not r.is_list and r.make < Make.ARGUMENT for r in signature.results)
    written = sum(len(_tensors(args[w.argument])) for w in signature.written)
    return len(node.outputs) - alone - written


def _result(result: Result, node: Node, outputs: Any, args: Sequence[Any], length: int) -> Any:
    if result.make is Make.ARGUMENT:
        return args[result.argument]
    if result.make is Make.LENGTH:
        return args[result.argument].shape[2]
    if result.is_list:
        return [_one(result, node, next(outputs), args) for _ in range(length)]
    return _one(result, node, next(outputs), args)


def _one(result: Result, node: Node, value: Value, args: Sequence[Any]) -> Any:
    if result.make is Make.FRESH or value.type is None:
        return wrap_value(value)
    viewed: LazyTensor = args[result.argument]
    storage, view = viewed._lazy_storage, viewed._lazy_view
    if result.make is Make.VIEW:
        view = View(view, node, value.index, root_value(storage), value)
    return wrap_view(storage, view, value.type, viewed)


def rewrite(tensor: LazyTensor, new: Value) -> None:
    """Write `new` to `tensor`, first resizing it if the op did (`out=`)."""
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
    """How an op is recorded: the generic way, except for what the keyword arguments replace.

    With `may_leave`, the result may be on the physical device and still be lazy.
    """
    name = spec.target._schema.name.removeprefix("aten::")
    signature = signature_of(spec, extra, lengths)
    return Recording(
        signature=signature,
        nodes=spec.kind.nodes if nodes is None else nodes,
        make=node_maker(spec) if make is None else make,
        readers=tuple([READERS[kind] for kind in signature.kinds]),
        calls=metrics.op_cell(f"lazy::{name}", spec.name) if calls is None else calls,
        numbered=(lambda device, _: device) if may_leave else numbered,
        cut=cut,
    )


def make_recorder(spec: OpSpec, **other: Any) -> Callable[..., Any]:
    """The recorder of an op that becomes a node; `other` is passed on to `recording_of`.

    Its attribute `recording` is the `Recording`, for the native recorder and for tools.
    """
    recording = recording_of(spec, **other)

    def recorder(*args: Any, **kwargs: Any) -> Any:
        return record(recording, args, kwargs)

    recorder.recording = recording  # type: ignore[attr-defined]  # a function attribute
    return recorder
