"""Values of tensors: reading them, making nodes, writing through views.

Everything here runs under the trace's lock.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from torpor import metrics
from torpor.backend.registry import get_backend
from torpor.execute import sync
from torpor.execute.storage import TRACE, LazyStorage
from torpor.inference.infer import forget as forget_inferences
from torpor.inference.infer import infer, work_on
from torpor.ir.memo import Memo, forget_memos
from torpor.ir.node import TABLE, Node, Value, intern
from torpor.ir.types import TensorType
from torpor.observe.scope import scope
from torpor.observe.site import site
from torpor.ops.keys import key_of
from torpor.ops.spec import OpSpec, spec_of
from torpor.ops.view_rules import INVERSES
from torpor.overrides.storage_ops import scatter_anywhere
from torpor.symbols.expressions import Symbol, forget_conditions
from torpor.symbols.leaves import SIZES
from torpor.symbols.offsets import LOOKS, node_at_offset
from torpor.symbols.symbolic_nodes import Call, are_own, sized_node, symbols_met
from torpor.symbols.symbolic_types import forget as forget_sizes
from torpor.trace.tensor import InThisTrace, LazyTensor, View

aten = torch.ops.aten


def physical(device: torch.device) -> torch.device:
    """The torch device that backs `device`."""
    return get_backend().backend_device(device).torch_device


work_on(physical)


# -- nodes -------------------------------------------------------------------------------------


def make_node(
    spec: OpSpec,
    key: tuple[Any, ...],
    bound: list[Any],
    sample: dict[Value, Any] | None = None,
    again: bool = False,
) -> Node:
    """Make a node on a cache miss: infer its types and note the user's line.

    `again`: the call is a replay of one recorded earlier on other values, not made by the user.
    """
    TRACE.misses += 1
    if SIZES.active and TABLE.find(spec.kind, key) is None:
        call = Call(spec, key, bound, sample or {}, physical, lambda: (site(), scope()), again)
        sized = sized_node(call)
        if sized is not None:
            return sized

    def make() -> tuple[Any, ...]:
        types = infer(spec, key, bound, sample or {}, physical)
        metrics.count_node(spec.name)
        return tuple(bound), types, site(), scope()

    return intern(spec.kind, key, make)


def finish() -> None:
    """Compute everything pending, before a change of how op types are inferred."""
    sync.cut()
    sync.wait()


def forget_types() -> None:
    """Drop every node and memoized inference, after a change of how op types are inferred."""
    with TRACE.lock:
        TABLE.clear()
        forget_inferences()
        forget_sizes()
        forget_conditions()
        forget_memos()


def apply(target: Any, bound: list[Any]) -> Node:
    """The node of an op on values, found or made."""
    spec = spec_of(target)
    key = key_of(spec, bound)
    found = spec.kind.nodes.get(key)
    if found is None and target in LOOKS:
        found = node_at_offset(spec, key, bound, make_node)
    return found or make_node(spec, key, bound)


# -- reading -----------------------------------------------------------------------------------


def root_value(storage: LazyStorage) -> Value:
    """The value of the contents of `storage` in this trace."""
    value = storage.value
    return TRACE.leaf_value(storage) if value is None else value


def value_of(tensor: LazyTensor) -> Value:
    """The value of the contents of `tensor` in this trace."""
    root = root_value(tensor._lazy_storage)
    view = tensor._lazy_view
    if view is None:
        return root
    return view.value if view.shows(root) else replay(view, root)


def replay(view: View, root: Value) -> Value:
    """Bring a stale view, and the views between it and its storage, up to date."""
    if SIZES.active and _had_other_sizes(view, root):
        return _look_again(view, root)
    stale: list[View] = []
    current: View | None = view
    while current is not None and not current.shows(root):
        stale.append(current)
        current = current.parent
    value = root if current is None else current.value
    for link in reversed(stale):
        node = link.node
        source = _view_operand(node)
        if value.type is not node.args[source].type:
            value = _look_again(link, root)
            continue
        key = (*node.key[:source], value, *node.key[source + 1 :])
        bound = [*node.args[:source], value, *node.args[source + 1 :]]
        node = node.op.nodes.get(key) or make_node(spec_of(node.op.target), key, bound, again=True)
        value = node.outputs[link.index]
        if value.type.concrete is link.type:
            link.move(root, value)
        else:
            value = _look_again(link, root)
    return value


def _had_other_sizes(view: View, root: Value) -> bool:
    """Whether the view, or a parent, has symbols that may have had other values when made."""
    base = view.base
    if type(base) is InThisTrace and base.epoch == TRACE.epoch:
        return False
    met: set[Symbol] = set()
    link: View | None = view
    while link is not None:
        if link.value.type.concrete is not link.type:  # its own sizes have changed
            return True
        node = link.node
        met |= symbols_met(node.args, [v.type for v in node.outputs], node.conditions)
        link = link.parent
    if not met:
        return False
    return node.args[_view_operand(node)].type is not root.type or not are_own(met, root.type)


def _look_again(view: View, root: Value) -> Value:
    """Replace the ops of `view` by a window onto `root` with the sizes that its tensor has."""
    found = window_onto(root, view.type)
    view.base = None  # invalid, in case the next lines are interrupted
    view.parent, view.index, view.node = found.parent, 0, found.node
    view.move(root, found.value)
    return found.value


def window_onto(root: Value, type_: TensorType) -> View:
    """A view of a storage's contents with any dtype, sizes, strides and conj or neg bits."""
    calls: list[tuple[Any, ...]] = []
    if type_.dtype != root.type.dtype:
        parts = max(type_.dtype.itemsize // root.type.dtype.itemsize, 1)
        whole = root.type.span // parts * parts
        calls += [(aten.as_strided.default, (whole,), (1,), 0), (aten.view.dtype, type_.dtype)]
    calls.append((aten.as_strided.default, type_.shape, type_.stride, type_.offset))
    calls += [(aten._conj.default,)] * type_.conj + [(aten._neg_view.default,)] * type_.neg
    view: View | None = None
    for target, *args in calls:
        node = apply(target, [root if view is None else view.value, *args])
        view = View(view, node, 0, root, node.outputs[0])
    assert view is not None, "there is always a window"
    return view


def _view_operand(node: Node) -> int:
    return spec_of(node.op.target).views


# -- writing -----------------------------------------------------------------------------------


def write(tensor: LazyTensor, new: Value) -> None:
    """Make `new` the contents of `tensor`; every tensor on the same storage sees the change.

    The old contents are registered as a leaf, so that they can be restored if the step fails. An
    interrupt between any two lines leaves the storage with either the old or the new contents.
    """
    storage = tensor._lazy_storage
    view = tensor._lazy_view
    before = root_value(storage)
    root, written = (new, []) if view is None else scatter(before, view, new)
    if not storage.listed:
        TRACE.enlist(storage)
    storage.data = None
    storage.value = root
    for link, value in written:
        if value.type is link.value.type:  # otherwise it is replayed, to keep its tensor's type
            _move_on(link, root, value)


def _move_on(view: View, root: Value, new: Value) -> None:
    """`new` was written through `view`: update it; if valid in this trace only, it remains so."""
    transient = type(view.base) is InThisTrace
    view.move(root, new)
    if transient:
        view.base = InThisTrace(root, TRACE.epoch)


def scatter(root: Value, view: View, new: Value) -> tuple[Value, list[tuple[View, Value]]]:
    """The contents of a storage after `new` was written through `view`.

    Also returned: the views that the write went through, each with its new value.
    """
    if not view.shows(root):
        replay(view, root)
    links = [view]
    while links[-1].parent is not None:
        links.append(links[-1].parent)
    is_plain = new.type is view.value.type and all(link.base is root for link in links)
    if SIZES.active or not is_plain:
        found = _scattered(root, links, new)
    else:
        key = (root, new, *[link.node.outputs[link.index] for link in links])
        found = SCATTERS.find(key) or SCATTERS.add(key, _scattered(root, links, new))
    return found[-1], list(zip(links, found[:-1]))


SCATTERS: Final[Memo[tuple[Value, ...]]] = Memo()
"""What the views that a write goes through show after it, then what the storage holds: by what that
held, what was written, and what the views show by their own nodes. The native recorder, which knows
no rule for writing through a view, looks them up here."""


def _scattered(root: Value, links: list[View], new: Value) -> tuple[Value, ...]:
    """What is in `SCATTERS`; `links` are a view and those that it is of."""
    found = [new]
    for link in links:
        parent = link.parent
        upper = None
        if parent is None or parent.shows(root):  # or it was looked at when all was different
            upper = _invert(link, root if parent is None else parent.value, found[-1])
        if upper is None:
            return *found, scatter_anywhere(apply, root, link.value.type, found[-1])
        found.append(upper)
    return tuple(found)


def _invert(view: View, base: Value, new: Value) -> Value | None:
    rule = INVERSES.get(view.node.op.name)
    call = rule(base, new, view.node.args, view.index) if rule else None
    if call is None:
        return None
    target, bound = call
    if target is None:
        return new
    try:
        value = apply(target, bound).outputs[0]
    except Exception:  # this inverse does not support these strides; the general one does
        return None
    return value if value.type is base.type else None
