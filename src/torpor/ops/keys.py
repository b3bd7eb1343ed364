"""Intern keys: the arguments of an op in schema order, made hashable and unambiguous.

In Python `1 == 1.0 == True`, `0.0 == -0.0`, and NaN differs from itself; keys must be exact. A
float other than zero and NaN is its own key; every other number is tagged with its type, zeros
with their sign, NaN with its name. Arguments whose schema fixes their Python type (a dimension, a
flag) are their own keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torpor.ir.node import Key, Node, PrivateNode, Types, Value, intern
from torpor.ops.spec import ArgKind, OpSpec

_NAN = ("float", "nan")
_NEGATIVE_ZERO = ("float", "-0.0")
_ZERO = ("float", "0.0")


def number_key(number: Any) -> Any:
    """The key of a Python number."""
    kind = type(number)
    if kind is float:
        if number != number:
            return _NAN
        if number == 0.0:
            return _ZERO if math.copysign(1.0, number) > 0 else _NEGATIVE_ZERO
        return number
    if kind is complex:
        return ("complex", number_key(number.real), number_key(number.imag))
    if kind is int or kind is bool:
        return (kind.__name__, number)
    return number  # None, a value, or another hashable object


def tensor_key(arg: Any) -> Any:
    """The key of a tensor argument: a value, a wrapped number, or None."""
    return arg if type(arg) is Value or arg is None else number_key(arg)


def argument_key(kind: ArgKind, arg: Any) -> Any:
    """The key of one argument."""
    if arg is None or kind is ArgKind.PLAIN:
        return arg
    if kind is ArgKind.TENSOR:
        return tensor_key(arg)
    if kind in (ArgKind.FLOAT, ArgKind.SCALAR):
        return number_key(arg)
    if kind in (ArgKind.TENSORS, ArgKind.PLAINS):
        return tuple(arg)
    return tuple(number_key(item) for item in arg)


def key_of(spec: OpSpec, bound: Sequence[Any]) -> Key:
    """The intern key of an op applied to `bound`, its arguments in schema order."""
    return tuple(
        argument_key(a.kind, value) for a, value in zip(spec.arguments, bound, strict=True)
    )


def node_of(spec: OpSpec, bound: Sequence[Any], types: Types, site: Any = None) -> Node:
    """The interned node of `spec` on `bound`, found or made."""
    return intern(spec.kind, key_of(spec, bound), lambda: (as_args(bound), types, site))


def private_node(spec: OpSpec, bound: Sequence[Any], types: Types, site: Any = None) -> Node:
    """A node of `spec` on `bound` that is not interned."""
    return PrivateNode(spec.kind, key_of(spec, bound), as_args(bound), tuple(types), site)


def as_args(bound: Sequence[Any]) -> tuple[Any, ...]:
    """Arguments in the form a node stores them: tuples instead of lists."""
    return tuple([tuple(arg) if isinstance(arg, list) else arg for arg in bound])
