"""Recorders: one function per op, written for its schema, that turns a call into a node.

A recorder reads the values of its tensors, builds the intern key and looks it up. On a hit that
is all, but for the result tensor. Recorders are generated from the ops' schemas, so that no
argument list is walked at run time: ATen's stand in `ops/_generated/recorders/`, others are
written when they are met (`ops.recorder_source`). Here they get the names that they use.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from types import CodeType, FunctionType
from typing import Any
from weakref import ref

import torch

from torpor import _torch, config, metrics
from torpor.backend.registry import get_backend
from torpor.errors import annotate
from torpor.execute import sync
from torpor.execute.storage import BY_OPERATOR, TRACE, LazyStorage
from torpor.ir.node import Node, Value
from torpor.ops.infer import NotRecordable
from torpor.ops.keys import key_of, number_key
from torpor.ops.recorders import kept_arguments, may_repeat, recorder_code
from torpor.ops.spec import ArgKind, OpSpec, Return, ReturnKind
from torpor.ops.storage_ops import window
from torpor.trace.offsets import LOOKS, node_at_offset
from torpor.trace.scalars import node_with_numbers, promotable_positions
from torpor.trace.site import site
from torpor.trace.tensor import LazyTensor, View
from torpor.trace.values import make_node, physical, root_value, value_of, view_value, write
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


class CutFirst(Exception):
    """The trace is as long as it may get: cut it, then record the op again."""


class ForeignTensor(Exception):
    """Another tensor subclass is among the arguments: let it have its turn."""


class WritesPlain(Exception):
    """A tensor that is not lazy would be written to or viewed: eager has to do it."""


# -- values of arguments that are not lazy tensors -------------------------------------------------


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


class LeavesDevice(Exception):
    """The op makes a tensor on a device where tensors are plain."""


def numbered(device: torch.device, tensor: Any) -> torch.device:
    """`device` with its number, which tensors on it have."""
    leaves = type(tensor) is LazyTensor and "lazy" == tensor.device.type != device.type
    if leaves or (device.type == "meta" and type(tensor) is LazyTensor):
        raise LeavesDevice
    if device.type == "lazy" and device.index is None:
        return torch.device("lazy", get_backend().default_device_ordinal)
    return device


def list_values(args: Any) -> tuple[Any, ...]:
    """What stands in a key for a list of tensors."""
    values = []
    for arg in args:
        if type(arg) is LazyTensor:
            storage = arg._lazy_storage
            value = storage.value
            view = arg._lazy_view
            if view is None:
                if value is None:
                    value = TRACE.leaf_value(storage)
            elif view.base is value:
                value = view.value
            else:
                value = view_value(view, storage, arg)
            values.append(value)
        else:
            values.append(other_value(arg))
    return tuple(values)


# -- misses ------------------------------------------------------------------------------------


def _make_miss(spec: OpSpec) -> Callable[[tuple[Any, ...], tuple[Any, ...]], Node]:
    """What a recorder calls when its key is not in the table."""
    kinds = tuple(a.kind for a in spec.arguments)
    has_offset = spec.target in LOOKS

    def miss(key: tuple[Any, ...], raw: tuple[Any, ...]) -> Node:
        if TRACE.misses > config.max_trace_nodes:
            raise CutFirst  # nothing of this op has happened yet
        bound = [as_bound(kind, k, r) for kind, k, r in zip(kinds, key, raw, strict=True)]
        positions = promotable_positions(spec, bound)
        if positions:
            return node_with_numbers(spec, key, bound, positions)
        moving = node_at_offset(spec, key, bound, make_node) if has_offset else None
        return make_node(spec, key, bound) if moving is None else moving

    return miss


def as_bound(kind: ArgKind, key: Any, raw: Any) -> Any:
    if kind is ArgKind.TENSOR:
        return key if type(key) is Value else raw
    if kind is ArgKind.TENSORS:
        if raw is None:
            return None
        return tuple(k if type(k) is Value else r for k, r in zip(key, raw, strict=True))
    if type(raw) is list:
        return tuple(raw)
    return raw


# -- results that need more than one line ----------------------------------------------------------


def finish(spec: OpSpec, node: Node, args: tuple[Any, ...]) -> Any:
    """Results of any op: fresh tensors, views, written arguments, lists of them."""
    outputs = iter(node.outputs)
    lengths = _list_length(spec, node, args)
    results: list[Any] = []
    for returned in spec.returns:
        results.append(_result(returned, node, outputs, args, lengths))
    for position in spec.mutated:
        written = args[position]
        for tensor in written if isinstance(written, (list, tuple)) else (written,):
            if tensor is not None:
                rewrite(tensor, next(outputs))
    if not spec.returns:
        return None
    return results[0] if len(results) == 1 else tuple(results)


def _list_length(spec: OpSpec, node: Node, args: tuple[Any, ...]) -> int:
    """How many outputs the op's one list-typed return takes."""
    others = sum(
        not r.is_list and r.kind in (ReturnKind.FRESH, ReturnKind.VIEW) for r in spec.returns
    )
    for position in spec.mutated:
        written = args[position]
        if isinstance(written, (list, tuple)):
            others += len(written)
        elif written is not None:
            others += 1
    return len(node.outputs) - others


def _result(returned: Return, node: Node, outputs: Any, args: tuple[Any, ...], length: int) -> Any:
    if returned.kind is ReturnKind.ARGUMENT:
        return args[returned.argument]
    if returned.is_list:
        return [_one(returned, node, next(outputs), args) for _ in range(length)]
    return _one(returned, node, next(outputs), args)


def _one(returned: Return, node: Node, value: Value, args: tuple[Any, ...]) -> Any:
    if returned.kind is ReturnKind.FRESH or value.type is None:
        return wrap_value(value)
    return view_of(args[returned.argument], node, value)


def view_of(tensor: LazyTensor, node: Node, value: Value) -> LazyTensor:
    """A tensor that views `tensor` by `node`."""
    storage = tensor._lazy_storage
    view = View(tensor._lazy_view, node, value.index, root_value(storage), value)
    return wrap_view(storage, view, tensor)


def rewrite(tensor: LazyTensor, new: Value) -> None:
    """Write `new` to `tensor`, which takes another size first if the op resized it (`out=`)."""
    type_ = new.type
    restrided = type_.numel == 0 and tensor.stride() != type_.stride
    if tuple(tensor.shape) != type_.shape or restrided:
        resize(tensor, type_)
    write(tensor, new)


def all_lazy(tensors: Any) -> None:
    """Make sure that a list of tensors the op writes to is lazy, and each on memory of its own."""
    storages = set()
    for tensor in tensors:
        if type(tensor) is not LazyTensor:
            if tensor is not None:
                raise WritesPlain
        else:
            storages.add(tensor._lazy_storage)
    if len(storages) < len(tensors) and None not in tensors:
        raise NotRecordable("tensors written to share their memory", fallback=True)


def apart(written: Any, read: Any) -> None:
    """Make sure that an op on lists reads nothing that it has written for another item before.

    Eager goes through its lists item by item; a node reads all of them first.
    """
    if len(written) == 1:
        return
    storages = {t._lazy_storage for t in written if type(t) is LazyTensor}
    for place, tensor in enumerate(read):
        if type(tensor) is LazyTensor and tensor._lazy_storage in storages:
            beside = written[place] if place < len(written) else None
            if type(beside) is LazyTensor and beside._lazy_storage is not tensor._lazy_storage:
                raise NotRecordable("tensors are read that are written before", fallback=True)


def shares(storage: LazyStorage, tensors: Any) -> bool:
    """One of `tensors` is on `storage`."""
    return tensors is not None and any(
        type(t) is LazyTensor and t._lazy_storage is storage for t in tensors
    )


_ABOUT_MEMORY = re.compile("memory location|doesn't match the broadcast shape")
"""What eager says of memory that is read and written, or would have to grow while it is read."""


def check_overlap(spec: OpSpec, args: tuple[Any, ...]) -> None:
    """Let eager judge an op that writes to memory it also reads, on zeros that overlap alike."""
    memories: dict[LazyStorage, torch.Tensor] = {}
    made: dict[int, Any] = {}  # the same argument is the same stand-in
    real = [made.setdefault(id(arg), _stand_in(arg, memories, made)) for arg in args]
    positional, keywords = spec.call_arguments(real)
    with _torch.kernels():
        try:
            spec.target(*positional, **keywords)
        except RuntimeError as error:
            if _ABOUT_MEMORY.search(str(error)):
                raise annotate(error, spec.name, str(site())) from None


def _stand_in(arg: Any, memories: dict[LazyStorage, torch.Tensor], made: dict[int, Any]) -> Any:
    if isinstance(arg, (list, tuple)):
        return [made.setdefault(id(item), _stand_in(item, memories, made)) for item in arg]
    if type(arg) is not LazyTensor:
        return physical(arg) if type(arg) is torch.device else arg
    storage = arg._lazy_storage
    memory = memories.get(storage)
    if memory is None:
        type_ = storage.type
        memory = memories[storage] = torch.zeros(
            (max(type_.nbytes, 1),), dtype=torch.uint8, device=physical(type_.device)
        )
    return window(memory, arg.dtype, arg.shape, arg.stride(), int(arg.storage_offset()))


# -- recorders ---------------------------------------------------------------------------------


def _cell(spec: OpSpec) -> list[int]:
    """Where the calls of an op are counted."""
    name = spec.target._schema.name.removeprefix("aten::")
    return metrics.op_cell(f"lazy::{name}", spec.name)


def make_recorder(
    spec: OpSpec, may_leave: bool = False, also: str = "", **other: Any
) -> Callable[..., Any]:
    """The recorder of an op that becomes a node.

    With `may_leave`, a tensor on `lazy` may stay lazy on the physical device. `also` is a further
    part of its key; `other` replaces names it uses.
    """
    names: dict[str, Any] = {
        "LazyStorage": LazyStorage,
        "LazyTensor": LazyTensor,
        "View": View,
        "WritesPlain": WritesPlain,
        "all_lazy": all_lazy,
        "apart": apart,
        "also": also,
        "check_overlap": check_overlap,
        "cell": _cell(spec),
        "enlist": TRACE.enlist,
        "finish": finish,
        "inference": torch.is_inference_mode_enabled,
        "leaf_value": TRACE.leaf_value,
        "list_values": list_values,
        "make_wrapper": _torch.make_wrapper,
        "miss": _make_miss(spec),
        "nodes": spec.kind.nodes,
        "number_key": number_key,
        "numbered": (lambda device, tensor: device) if may_leave else numbered,
        "opaque": NotRecordable("an argument cannot be part of a graph", fallback=True),
        "other_value": other_value,
        "config": config,
        "cut": sync.cut,
        "forget": TRACE.pending.pop,
        "listed": TRACE.pending,
        "lock": BY_OPERATOR,
        "ref": ref,
        "release": TRACE.lock.release,
        "set_bits": set_bits,
        "shares": shares,
        "site": site,
        "spec": spec,
        "view_value": view_value,
        "wrap_like": wrap_like,
        "wrap_value": wrap_value,
        "write": write,
    }
    for i, argument in enumerate(spec.arguments):
        if argument.has_default and argument.kind in (ArgKind.FLOAT, ArgKind.SCALAR):
            names |= {f"d{i}": argument.default, f"n{i}": number_key(argument.default)}
    return _function(spec, recorder_code(spec, also), names | other)


def _function(spec: OpSpec, code: CodeType, names: dict[str, Any]) -> FunctionType:
    """The function of that code, with the op's defaults."""
    defaults = [a for a in spec.arguments if a.has_default]
    positional = tuple(a.default for a in defaults if not a.keyword_only)
    function = FunctionType(code, names, code.co_name, positional)
    function.__kwdefaults__ = {a.name: a.default for a in defaults if a.keyword_only}
    return function


def generic_recorder(spec: OpSpec) -> Callable[..., Any]:
    """A recorder that walks its arguments by the op's spec: slow, and short enough to be believed.

    It gives the nodes that the generated recorder gives; tests and benchmarks compare the two.
    """
    cell = _cell(spec)
    miss = _make_miss(spec)
    kept = kept_arguments(spec)

    def record(*args: Any, **kwargs: Any) -> Any:
        cell[0] += 1
        with TRACE.lock:
            bound = spec.bind(args, kwargs)
            key = generic_key(spec, bound, kept)
            node = spec.kind.nodes.get(key)
            if node is None:
                node = miss(key, tuple(bound))
            if spec.may_fail:
                node.site = site()
            result = finish(spec, node, tuple(bound))
        if len(TRACE.pending) > config.max_trace_nodes:
            sync.cut()
        return result

    return record


def generic_key(spec: OpSpec, bound: list[Any], kept: list[int]) -> tuple[Any, ...]:
    """The intern key of an op on `bound`, its arguments in schema order.

    Makes sure of what every recorder does: arguments that are `kept` (`kept_arguments`) are lazy,
    and what is written to does not overlap with what is read.
    """
    for position in kept:
        tensors = bound[position]
        all_lazy(tensors if spec.arguments[position].kind is ArgKind.TENSORS else [tensors])
    _place(spec, bound)
    _go_apart(spec, bound)
    key = key_of(spec, [_value(a.kind, v) for a, v in zip(spec.arguments, bound)])
    if _overlaps(spec, bound):
        check_overlap(spec, tuple(bound))
    return key


def _go_apart(spec: OpSpec, bound: list[Any]) -> None:
    """`apart` for the lists of an op on lists."""
    if not spec.name.startswith("aten._foreach_"):
        return
    lists = [i for i, a in enumerate(spec.arguments) if a.kind is ArgKind.TENSORS]
    for written in spec.mutated:
        for read in lists:
            if written in lists and read not in spec.mutated:
                apart(bound[written], bound[read])


def _place(spec: OpSpec, bound: list[Any]) -> None:
    """Give a `device` argument its number."""
    for position, argument in enumerate(spec.arguments):
        if argument.name == "device" and bound[position] is not None:
            bound[position] = numbered(bound[position], bound[0])


def _value(kind: ArgKind, arg: Any) -> Any:
    """What stands for an argument in a node."""
    if arg is None:
        return None
    if kind is ArgKind.TENSOR:
        return value_of(arg) if type(arg) is LazyTensor else _untagged(arg)
    if kind is ArgKind.TENSORS:
        return list_values(arg)
    if kind is ArgKind.OPAQUE:
        raise NotRecordable("an argument cannot be part of a graph", fallback=True)
    return arg


def _untagged(arg: Any) -> Any:
    """A number as it is; anything else as `other_value` sees it."""
    return other_value(arg) if isinstance(arg, torch.Tensor) else arg


def _overlaps(spec: OpSpec, bound: list[Any]) -> bool:
    """A tensor that is written to shares its storage with another argument."""
    if spec.name == "aten.copy_.default":
        return False
    for position in spec.mutated:
        written = bound[position]
        if type(written) is not LazyTensor:
            continue
        repeats = may_repeat(spec, position)
        for other, argument in zip(bound, spec.arguments):
            if argument.kind is ArgKind.TENSORS and shares(written._lazy_storage, other):
                return True
            if argument is spec.arguments[position] or type(other) is not LazyTensor:
                continue
            if other._lazy_storage is written._lazy_storage and not (repeats and other is written):
                return True
    return False
