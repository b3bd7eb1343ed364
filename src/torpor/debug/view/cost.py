"""The cost of a node, estimated from its types: arithmetic, and bytes read and written."""

from __future__ import annotations

from typing import Any, Final

from torch.utils.flop_counter import flop_registry

from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.ops.spec import Mode, spec_of

_NOT_COUNTED: Final = (
    TypeError, ValueError, IndexError, KeyError, AttributeError, AssertionError,
    NotImplementedError,
)  # fmt: skip


def flops(node: Node) -> int:
    """Arithmetic operations: by torch's formula if there is one, else one per result element."""
    if is_view(node):
        return 0
    count = flop_registry.get(getattr(node.op.target, "overloadpacket", None))
    if count is not None:
        shapes, named = _shapes(node)
        made = [None if value.type is None else _shape(value) for value in node.outputs]
        try:
            return int(count(*shapes, **named, out_val=made[0] if len(made) == 1 else made))
        except _NOT_COUNTED:  # an overload that torch's formula does not cover
            return _elements(node)
    return _elements(node)


def traffic(node: Node) -> int:
    """Bytes of the tensors that a node reads and writes; none for a view."""
    if is_view(node):
        return 0
    return sum(map(size, dict.fromkeys((*node.operands, *node.outputs))))


def size(value: Value) -> int:
    """Bytes of a tensor's elements."""
    type_ = value.type
    return type_.numel * type_.dtype.itemsize if isinstance(type_, TensorType) else 0


def _elements(node: Node) -> int:
    return sum(v.type.numel for v in node.outputs if isinstance(v.type, TensorType))


def is_view(node: Node) -> bool:
    """Whether the node is a view."""
    return node.op.target is not None and spec_of(node.op.target).mode is Mode.VIEW


def _shapes(node: Node) -> tuple[list[Any], dict[str, Any]]:
    """The arguments of a node as torch's formulas take them: shapes, positional and by name."""
    by_place, by_name = [], {}
    for parameter, arg in zip(node.op.parameters, node.args, strict=True):
        if parameter.keyword_only:
            by_name[parameter.name] = _shape(arg)
        else:
            by_place.append(_shape(arg))
    return by_place, by_name


def _shape(arg: Any) -> Any:
    if type(arg) is Value:
        return arg.type.shape if isinstance(arg.type, TensorType) else arg
    return tuple(map(_shape, arg)) if type(arg) is tuple else arg
