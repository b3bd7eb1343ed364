"""Intern keys: the arguments of an op in schema order, made hashable and unambiguous.

Python says `1 == 1.0 == True` and `0.0 == -0.0`, and that NaN is not itself. A key must not. A
float that is neither zero nor NaN stands for itself; every other number is tagged with its type,
zeros with their sign and NaN with its name. Arguments whose schema fixes their Python type (a
dimension, a flag) stand for themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torpor.ir.node import TABLE, Node, Value
from torpor.ir.types import TensorType
from torpor.ops.spec import ArgKind, OpSpec

_NAN = ("float", "nan")
_NEGATIVE_ZERO = ("float", "-0.0")
_ZERO = ("float", "0.0")


def number_key(number: Any) -> Any:
    """What stands for a Python number in a key."""
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
    return number  # None, a value, or something hashable of its own


def tensor_key(arg: Any) -> Any:
    """What stands for a tensor argument: a value, a wrapped number, or None."""
    return arg if type(arg) is Value or arg is None else number_key(arg)


def argument_key(kind: ArgKind, arg: Any) -> Any:
    """What stands for one argument."""
    if arg is None or kind is ArgKind.PLAIN:
        return arg
    if kind is ArgKind.TENSOR:
        return tensor_key(arg)
    if kind in (ArgKind.FLOAT, ArgKind.SCALAR):
        return number_key(arg)
    if kind in (ArgKind.TENSORS, ArgKind.PLAINS):
        return tuple(arg)
    return tuple(number_key(item) for item in arg)


def key_of(spec: OpSpec, bound: Sequence[Any]) -> tuple[Any, ...]:
    """The intern key of an op applied to `bound`, its arguments in schema order."""
    return tuple(
        argument_key(a.kind, value) for a, value in zip(spec.arguments, bound, strict=True)
    )


def intern(
    spec: OpSpec, bound: Sequence[Any], types: tuple[TensorType | None, ...], site: Any = None
) -> Node:
    """The node of `spec` on `bound`, found or made."""
    key = key_of(spec, bound)
    args = tuple(tuple(a) if isinstance(a, list) else a for a in bound)
    return TABLE.find(spec.kind, key) or TABLE.add(spec.kind, key, args, types, site)  # type: ignore[arg-type]  # None: no tensor
