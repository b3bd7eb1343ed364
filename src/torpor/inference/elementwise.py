"""Types of elementwise ops on ordinary floating-point tensors, without fake tensors.

Most ops of a training step are of this kind: one floating dtype, one device, no conj bits. Their
results have the broadcast size, the dtype of the operands (or bool), and the strides that
`inference.strides` computes. Everything else, errors included, is left to fake tensors.

`inference/_generated/elementwise.py` lists the ops: those that torch implements with TensorIterator
and whose kernels accept all numbers, and the `_foreach_` variants that apply them to the items of
lists.
"""

from __future__ import annotations

from typing import Any, Final

import torch

from torpor.inference.strides import FRESH, Ints, eager_strides, elementwise_strides
from torpor.ir.node import Value
from torpor.ir.types import ScalarType, TensorType, Types
from torpor.ops.spec import ArgKind, Argument, OpSpec

try:
    from torpor.inference._generated.elementwise import RESULT_OF, TAKES_NUMBERS
except ImportError:  # while it is being generated
    RESULT_OF, TAKES_NUMBERS = {}, frozenset()


_DTYPES: Final = (torch.float32, torch.float64)
_NUMBERS: Final = (ArgKind.SCALAR, ArgKind.FLOAT)


def elementwise_types(spec: OpSpec, bound: list[Any]) -> Types | None:
    """The output types of an elementwise op; None if fake tensors are needed."""
    result = RESULT_OF.get(spec.name)
    if result is None:
        return None
    if not all(map(_is_ordinary, spec.arguments, bound)):
        return None
    if spec.name not in TAKES_NUMBERS and _has_wrapped_number(spec, bound):
        return None
    if result == "items":
        return _types_of_items(spec, bound)
    operands = [v.type for v in bound if type(v) is Value and type(v.type) is TensorType]
    shape = _common_size(operands)
    if shape is None:
        return None
    first = operands[0]
    if spec.mutated:
        return (first,) if shape == first.shape and first.is_injective else None
    dtype = torch.bool if result == "bool" else first.dtype
    stride = eager_strides(spec, bound, TensorType.contiguous(shape, dtype, first.device))
    return None if stride is None else (TensorType.of(shape, stride, dtype, first.device),)


def _is_ordinary(argument: Argument, value: Any) -> bool:
    """Whether it is a floating-point tensor, a real number, or the argument's default."""
    if type(value) is Value:
        return _is_ordinary_type(value.type)
    if argument.kind is ArgKind.TENSORS:
        return type(value) is tuple and all(
            type(v) is Value and _is_ordinary_type(v.type) for v in value
        )
    if argument.kind is ArgKind.SCALARS:
        return type(value) is tuple and all(map(_is_number, value))
    if argument.kind is ArgKind.TENSOR or argument.kind in _NUMBERS:
        return _is_number(value)
    return argument.has_default and value is argument.default


def _has_wrapped_number(spec: OpSpec, bound: list[Any]) -> bool:
    """Whether a number is passed as a tensor, which only some ops support."""
    return any(
        argument.kind is ArgKind.TENSOR
        and not (type(value) is Value and type(value.type) is TensorType)
        for argument, value in zip(spec.arguments, bound, strict=True)
    )


def _is_number(value: Any) -> bool:
    if type(value) is Value:
        return type(value.type) is ScalarType and value.type.kind in (int, float)
    return type(value) in (int, float)


def _is_ordinary_type(type_: Any) -> bool:
    if type(type_) is ScalarType:
        return type_.kind in (int, float)
    return type_.dtype in _DTYPES and not type_.conj and not type_.neg


def _common_size(types: list[TensorType]) -> Ints | None:
    """The common broadcast size; None if there is none, or if dtypes or devices differ."""
    if not types:
        return None
    shape = types[0].shape
    for type_ in types:
        if type_.dtype is not types[0].dtype or type_.device != types[0].device:
            return None
        if type_.shape != shape:
            common = _broadcast(shape, type_.shape)
            if common is None:
                return None
            shape = common
    return None if 0 in shape else shape


def _broadcast(one: Ints, other: Ints) -> Ints | None:
    if len(one) < len(other):
        one, other = other, one
    missing = len(one) - len(other)
    sizes = list(one)
    for dim, size in enumerate(other, missing):
        if sizes[dim] == 1:
            sizes[dim] = size
        elif size not in (1, sizes[dim]):
            return None
    return tuple(sizes)


def _types_of_items(spec: OpSpec, bound: list[Any]) -> Types | None:
    """Types of an op on the items of lists, if all items of a position have the same type."""
    kinds = [argument.kind for argument in spec.arguments]
    lists = [v for v, kind in zip(bound, kinds, strict=True) if kind is ArgKind.TENSORS]
    numbers = [v for v, kind in zip(bound, kinds, strict=True) if kind is ArgKind.SCALARS]
    if ArgKind.TENSOR in kinds or any(len(v) != len(lists[0]) for v in (*lists, *numbers)):
        return None
    for items in zip(*lists, strict=True):
        type_ = items[0].type.at_offset(0)
        if not type_.numel or any(item.type.at_offset(0) is not type_ for item in items):
            return None
        if elementwise_strides([(type_.shape, type_.stride)], type_.shape) != type_.stride:
            return None
    own = [item.type for item in lists[0]]
    if spec.name in FRESH:
        return tuple(TensorType.contiguous(t.shape, t.dtype, t.device) for t in own)
    return tuple(own) if spec.mutated else tuple(type_.at_offset(0) for type_ in own)
