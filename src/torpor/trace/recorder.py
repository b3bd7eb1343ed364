"""Recorders: one function per op, written for its schema, that turns a call into a node.

A recorder reads the values of its tensors, builds the intern key and looks it up. On a hit that
is all, but for the result tensor. The source of every recorder is generated here from the op's
schema, so that no argument list is walked at run time; `python -m torpor.trace.recorder
aten.add.Tensor` shows one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from weakref import ref

import torch

from torpor import _torch, config, metrics
from torpor.backend.registry import get_backend
from torpor.errors import annotate
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.ir.node import Node, Value
from torpor.ops.infer import NotRecordable
from torpor.ops.keys import number_key
from torpor.ops.spec import ArgKind, OpSpec, Return, ReturnKind
from torpor.ops.storage_ops import window
from torpor.trace.scalars import node_with_numbers, promotable_positions
from torpor.trace.site import site
from torpor.trace.tensor import LazyTensor, View
from torpor.trace.values import make_node, physical, root_value, view_value, write
from torpor.trace.wrap import (
    data_storage,
    is_traceable,
    resize,
    set_bits,
    wrap_like,
    wrap_value,
    wrap_view,
)

_ALIASES = frozenset({"aten.alias.default", "aten.detach.default", "aten.lift_fresh.default"})
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
                value = view_value(view, storage)
            values.append(value)
        else:
            values.append(other_value(arg))
    return tuple(values)


# -- misses ------------------------------------------------------------------------------------


def _make_miss(spec: OpSpec) -> Callable[[tuple[Any, ...], tuple[Any, ...]], Node]:
    """What a recorder calls when its key is not in the table."""
    kinds = tuple(a.kind for a in spec.arguments)

    def miss(key: tuple[Any, ...], raw: tuple[Any, ...]) -> Node:
        if TRACE.misses > config.max_trace_nodes:
            raise CutFirst  # nothing of this op has happened yet
        bound = [_bound(kind, k, r) for kind, k, r in zip(kinds, key, raw, strict=True)]
        positions = promotable_positions(spec, bound)
        if positions:
            return node_with_numbers(spec, key, bound, positions)
        return make_node(spec, key, bound)

    return miss


def _bound(kind: ArgKind, key: Any, raw: Any) -> Any:
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


def shares(storage: LazyStorage, tensors: Any) -> bool:
    """One of `tensors` is on `storage`."""
    return tensors is not None and any(
        type(t) is LazyTensor and t._lazy_storage is storage for t in tensors
    )


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
            if "memory location" in str(error):
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


# -- source ------------------------------------------------------------------------------------

_READ = """\
        if type({a}) is LazyTensor:
            s{i} = {a}._lazy_storage
            {k} = s{i}.value
            w{i} = {a}._lazy_view
            if w{i} is None:
                if {k} is None:
                    {k} = leaf_value(s{i})
            elif w{i}.base is {k}:
                {k} = w{i}.value
            else:
                {k} = view_value(w{i}, s{i})
        else:
            {k} = other_value({a})
"""


def _parameters(spec: OpSpec) -> tuple[str, list[str]]:
    """The recorder's parameter list and the names in schema order."""
    names: list[str] = []
    parts: list[str] = []
    starred = False
    for position, argument in enumerate(spec.arguments):
        name = argument.name if argument.keyword_only else f"a{position}"
        if argument.keyword_only and not starred:
            parts.append("*")
            starred = True
        names.append(name)
        parts.append(f"{name}=d{position}" if argument.has_default else name)
    return ", ".join(parts), names


def _key_lines(spec: OpSpec, names: list[str]) -> tuple[list[str], list[str]]:
    """Lines that read each argument, and the expression that stands for it in the key."""
    lines: list[str] = []
    keys: list[str] = []
    for i, (argument, name) in enumerate(zip(spec.arguments, names, strict=True)):
        k = f"k{i}"
        if argument.kind is ArgKind.TENSOR:
            lines.append(_READ.format(a=name, k=k, i=i))
        elif argument.kind is ArgKind.TENSORS:
            lines.append(f"        {k} = None if {name} is None else list_values({name})\n")
        elif argument.kind in (ArgKind.FLOAT, ArgKind.SCALAR):
            test = f"type({name}) is float and {name} == {name} and {name} != 0.0"
            lines.append(f"        {k} = {name} if {test} else number_key({name})\n")
        elif argument.kind is ArgKind.PLAINS:
            lines.append(f"        {k} = tuple({name}) if type({name}) is list else {name}\n")
        elif argument.kind in (ArgKind.FLOATS, ArgKind.SCALARS):
            lines.append(
                f"        {k} = None if {name} is None else tuple(map(number_key, {name}))\n"
            )
        elif argument.kind is ArgKind.OPAQUE:
            lines.append(f"        if {name} is not None:\n            raise opaque\n")
            k = "None"
        else:
            if name == "device":
                tensor = names[0] if spec.arguments[0].kind is ArgKind.TENSOR else "None"
                lines.append(
                    "        if device is not None:\n"
                    f"            device = numbered(device, {tensor})\n"
                )
            k = name
        keys.append(k)
    return lines, keys


_FRESH = """\
        v = {value}
        t = v.type
        s = LazyStorage(t, v, None)
        s.listed = True
        pending(ref(s))
        r{n} = make_wrapper(LazyTensor, *t.wrapper)
        r{n}._lazy_storage = s
        r{n}._lazy_view = None
"""

_VIEW = """\
        v = node.outputs[0]
        t = v.type
        r = wrap_like({tensor}, t) if inference() else make_wrapper(LazyTensor, *t.wrapper)
        r._lazy_storage = s0
        r._lazy_view = {view}
        if t.conj or t.neg:
            set_bits(r, t)
        return r
"""

_WRITE = """\
        v = node.outputs[0]
        if w0 is None:
            s0.value = v
            s0.data = None
            if not s0.listed:
                enlist(s0)
        else:
            write({tensor}, v)
        return {result}
"""

_WRITE_LIST = """\
        for x, v in zip({tensors}, node.outputs):
            if x._lazy_view is None:
                s = x._lazy_storage
                s.value = v
                s.data = None
                if not s.listed:
                    enlist(s)
            else:
                write(x, v)
        return {result}
"""


def _result_lines(spec: OpSpec, names: list[str]) -> str:
    """Lines that make the results of a hit; one form for each common kind of op."""
    kinds = [(r.kind, r.is_list) for r in spec.returns]
    only = kinds[0] if len(kinds) == 1 else None
    if not spec.mutated and kinds and all(kind == (ReturnKind.FRESH, False) for kind in kinds):
        return _fresh_lines(len(kinds))
    if only == (ReturnKind.FRESH, True) and not spec.mutated:
        return "        return [wrap_value(v) for v in node.outputs]\n"
    if only == (ReturnKind.VIEW, False) and spec.returns[0].argument == 0:
        alias = spec.name in _ALIASES
        view = "w0" if alias else "View(w0, node, 0, s0.value, v)"
        return _VIEW.format(tensor=names[0], view=view)
    if spec.mutated == (0,) and not _resizes(spec):
        is_list = spec.arguments[0].kind is ArgKind.TENSORS
        if is_list and not kinds:
            return _WRITE_LIST.format(tensors=names[0], result="None")
        if not is_list and only == (ReturnKind.ARGUMENT, False):
            return _WRITE.format(tensor=names[0], result=names[0])
    tuple_ = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    return f"        return finish(spec, node, {tuple_})\n"


_TRIM = """\
        if len(listed) > config.max_trace_nodes:
            trim()
"""


def _fresh_lines(number: int) -> str:
    if number == 1:
        return _FRESH.format(value="node.outputs[0]", n=0) + _TRIM + "        return r0\n"
    lines = "        outputs = node.outputs\n"
    for n in range(number):
        made = "    ".join(_FRESH.format(value=f"outputs[{n}]", n=n).splitlines(keepends=True))
        lines += f"        if outputs[{n}].type is None:\n            r{n} = None\n"
        lines += f"        else:\n    {made}"
    return lines + _TRIM + f"        return ({', '.join(f'r{n}' for n in range(number))})\n"


def _resizes(spec: OpSpec) -> bool:
    return any(spec.arguments[i].keyword_only for i in spec.mutated)


def _kept_arguments(spec: OpSpec) -> list[int]:
    """Arguments that live on in the results: written ones, and those that are viewed."""
    viewed = {r.argument for r in spec.returns if r.kind is ReturnKind.VIEW}
    return sorted({*spec.mutated, *viewed})


def _check_line(spec: OpSpec, names: list[str], position: int) -> str:
    name = names[position]
    if spec.arguments[position].kind is ArgKind.TENSORS:
        return f"        all_lazy({name})\n"
    return (
        f"        if type({name}) is not LazyTensor and {name} is not None:\n"
        "            raise WritesPlain\n"
    )


def _overlap_line(spec: OpSpec, names: list[str]) -> str:
    """A line that notices when a written tensor shares its storage with another argument."""
    tensors = [i for i, a in enumerate(spec.arguments) if a.kind is ArgKind.TENSOR]
    pairs = [(i, j) for i in spec.mutated if i in tensors for j in tensors if i != j]
    tests = []
    for i, j in pairs:
        if j in spec.mutated and j < i:
            continue
        test = f"type({names[j]}) is LazyTensor and {names[i]} is not None and s{j} is s{i}"
        if not spec.arguments[i].keyword_only:  # `x.add_(x)` is what everybody writes
            test += f" and {names[j]} is not {names[i]}"
        tests.append(test)
    lists = [i for i, a in enumerate(spec.arguments) if a.kind is ArgKind.TENSORS]
    tests += [
        f"{names[i]} is not None and shares(s{i}, {names[j]})"
        for i in spec.mutated
        if i in tensors
        for j in lists
    ]
    if not tests or spec.name == "aten.copy_.default":
        return ""
    condition = " or ".join(f"({test})" for test in tests)
    raw = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    return f"        if {condition}:\n            check_overlap(spec, {raw})\n"


_NOTE_LINE = "        node.site = site()\n"


def source(spec: OpSpec, also: str = "") -> str:
    """The recorder of an op, as Python source; `also` is a further part of its key."""
    parameters, names = _parameters(spec)
    key_lines, keys = _key_lines(spec, names)
    if also:
        keys.append(also)
    checks = "".join(_check_line(spec, names, i) for i in _kept_arguments(spec))
    key = f"({', '.join(keys)}{',' if len(keys) == 1 else ''})"
    raw = f"({', '.join(names)}{',' if len(names) == 1 else ''})"
    return (
        f"def record({parameters}):\n"
        "    cell[0] += 1\n"
        "    acquire()\n"
        "    try:\n"
        f"{checks}"
        f"{''.join(key_lines)}"
        f"{_overlap_line(spec, names)}"
        f"        key = {key}\n"
        "        node = nodes.get(key)\n"
        "        if node is None:\n"
        f"            node = miss(key, {raw})\n"
        f"{_NOTE_LINE if spec.may_fail else ''}"
        f"{_result_lines(spec, names)}"
        "    finally:\n"
        "        release()\n"
    )


def make_recorder(
    spec: OpSpec, may_leave: bool = False, also: str = "", **other: Any
) -> Callable[..., Any]:
    """Compile the recorder of an op that becomes a node.

    With `may_leave`, a tensor on `lazy` may stay lazy on the physical device. `also` is a further
    part of its key; `other` replaces names it uses.
    """
    names: dict[str, Any] = {
        "LazyStorage": LazyStorage,
        "LazyTensor": LazyTensor,
        "View": View,
        "WritesPlain": WritesPlain,
        "all_lazy": all_lazy,
        "acquire": TRACE.lock.acquire,
        "check_overlap": check_overlap,
        "cell": metrics.op_cell(
            f"lazy::{spec.target._schema.name.removeprefix('aten::')}", spec.name
        ),
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
        "listed": TRACE.pending,
        "pending": TRACE.pending.append,
        "ref": ref,
        "release": TRACE.lock.release,
        "set_bits": set_bits,
        "shares": shares,
        "site": site,
        "spec": spec,
        "trim": sync.trim,
        "view_value": view_value,
        "wrap_like": wrap_like,
        "wrap_value": wrap_value,
        "write": write,
    }
    names |= {f"d{i}": a.default for i, a in enumerate(spec.arguments)} | other
    exec(compile(source(spec, also), f"<torpor recorder {spec.name}>", "exec"), names)
    return names["record"]  # type: ignore[no-any-return]  # made by exec


if __name__ == "__main__":
    import sys

    from torpor.ops.spec import spec_of
    from torpor.ops.text import find_op

    print(source(spec_of(find_op(sys.argv[1]))))  # noqa: T201  # run as a command
