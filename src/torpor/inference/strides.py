"""Strides of the results of elementwise kernels, as torch's TensorIterator chooses them.

The output has the inputs' order of dimensions in memory. If they disagree, the first one decides;
for dimensions that it leaves open (broadcast, or of size 1), the next.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import torch

from torpor.ir.node import Value
from torpor.ir.types import TensorType, Types, contiguous_strides
from torpor.ops.spec import ArgKind, OpSpec, ReturnKind

Ints = tuple[int, ...]
Layout = tuple[Ints, Ints]  # shape and strides

_LIKE_SELF: Final = frozenset(
    # allocated by `empty_like`: a dense tensor passes on its strides
    {"zeros_like", "ones_like", "full_like", "empty_like", "hardtanh", "nan_to_num", "deg2rad",
     "rad2deg", "sort", "flip", "frexp", "index_fill", "index_put", "_prelu_kernel"}
)  # fmt: skip

_OTHERWISE: Final = frozenset(
    # elementwise, but not a single kernel over all operands: uses `clone`, or several kernels
    {"clone", "_to_copy", "copy", "fill", "isinf", "ldexp", "masked_fill", "mvlgamma",
     "native_dropout_backward"}
)  # fmt: skip

FRESH: Final = frozenset(
    {"aten.pow.Scalar", "aten._foreach_pow.ScalarAndTensor", "aten.masked_fill.Scalar",
     "aten.masked_fill.Tensor", "aten.tril.default", "aten.triu.default", "aten.renorm.default",
     "aten.diag_embed.default", "aten._log_softmax_backward_data.default",
     "aten._softmax_backward_data.default", "aten.mse_loss_backward.default",
     "aten.smooth_l1_loss_backward.default", "aten.huber_loss_backward.default",
     "aten.native_layer_norm_backward.default"}
)  # fmt: skip
"""Ops whose results are contiguous, whatever their operands."""

_NUMBER_IS_NO_OPERAND: Final = frozenset({"aten.lerp.Scalar", "aten.pow.Tensor_Scalar"})


def restrided(spec: OpSpec, bound: list[Any], types: Types) -> Types:
    """`types` of results with eager's strides, which those of fake tensors only approximate."""
    if spec.name in FRESH:
        return tuple(t and TensorType.contiguous(t.shape, t.dtype, t.device) for t in types)
    if spec.mutated or spec.target.namespace != "aten":
        return types
    if len(types) > 1 and spec.target._opname not in _LIKE_SELF:
        return types  # not a single kernel over all operands
    if any(t is None or t.conj or t.neg for t in types):
        return types
    if any(returned.kind is not ReturnKind.FRESH for returned in spec.returns):
        return types
    return tuple(_restrided(spec, bound, t) for t in types if t is not None)


def _restrided(spec: OpSpec, bound: list[Any], type_: TensorType) -> TensorType:
    stride = eager_strides(spec, bound, type_)
    if stride is None:
        return type_
    return TensorType.of(type_.shape, stride, type_.dtype, type_.device, type_.offset)


def eager_strides(spec: OpSpec, bound: list[Any], type_: TensorType) -> Ints | None:
    """The strides of an op's result; None if they are not determined by TensorIterator."""
    if spec.target._opname in _LIKE_SELF:
        return _like_strides(bound)
    if torch.Tag.pointwise not in spec.target.tags or spec.target._opname in _OTHERWISE:
        return None
    operands = [v.type for v in bound if type(v) is Value and type(v.type) is TensorType]
    if operands and operands[0].dtype.is_complex and spec.target._opname in ("abs", "angle"):
        like_self = spec.target._opname == "abs"  # `angle` of complex numbers has another kernel
        return _like_strides(bound) if like_self else contiguous_strides(type_.shape)
    compared = operands[1:] if spec.name == "aten.where.self" else operands
    if any(t.conj or t.neg for t in operands):
        return None  # such operands are copied first, which changes strides
    if len({t.dtype for t in compared}) != 1 and not all(
        is_dense(t.shape, t.stride) for t in compared
    ):
        return None  # some are cast first: the copy keeps only dense strides
    layouts: list[Layout] = [(t.shape, t.stride) for t in operands]
    if spec.target._opname == "threshold_backward":
        layouts.reverse()
    if _takes_number(spec, bound):
        layouts.append(((), ()))
    return elementwise_strides(layouts, type_.shape)


def _like_strides(bound: list[Any]) -> Ints | None:
    """Strides of `empty_like` for the first argument."""
    source: TensorType = bound[0].type
    formats = [v for v in bound if type(v) is torch.memory_format]
    if formats and formats[0] is not torch.preserve_format:
        return None
    return like_strides(source.shape, source.stride)


def like_strides(shape: Ints, stride: Ints) -> Ints:
    """Strides that `empty_like` gives: the same if they are dense."""
    if is_dense(shape, stride):
        return stride
    shape = tuple(max(size, 1) for size in shape)
    return _sorted_strides([(shape, stride)], shape)


def _takes_number(spec: OpSpec, bound: list[Any]) -> bool:
    """Whether a number is an operand: passed as a tensor, or in an overload for numbers."""
    is_operand = (
        "scalar" in spec.target._overloadname.lower() and spec.name not in _NUMBER_IS_NO_OPERAND
    )
    for argument, value in zip(spec.arguments, bound, strict=True):
        is_number = value is not None and (
            type(value) is not Value or type(value.type) is not TensorType
        )
        if is_number and (
            argument.kind is ArgKind.TENSOR or (is_operand and argument.kind is ArgKind.SCALAR)
        ):
            return True
    return False


def elementwise_strides(operands: Sequence[Layout], shape: Ints) -> Ints:
    """Strides of the output, of size `shape`, of an elementwise kernel on `operands`."""
    same = _strides_alike(operands, shape)
    return _sorted_strides(operands, shape) if same is None else same


def _strides_alike(operands: Sequence[Layout], shape: Ints) -> Ints | None:
    """The fast path: operands of the same size that are all contiguous or have equal strides."""
    if any(size != shape for size, _ in operands):
        return None
    if all(_is_contiguous(shape, stride, range(len(shape))) for _, stride in operands):
        return contiguous_strides(shape)
    if len(shape) == 4 and all(_is_contiguous(shape, s, _CHANNELS_LAST) for _, s in operands):
        return _packed(shape, _CHANNELS_LAST)
    first = operands[0][1]
    if is_dense(shape, first) and all(stride == first for _, stride in operands):
        return first
    return None


_CHANNELS_LAST: Final = (0, 2, 3, 1)


def _is_contiguous(shape: Ints, stride: Ints, order: Sequence[int]) -> bool:
    """Whether the dimensions have this order in memory, the last one fastest; torch's own check."""
    expected = 1
    if 0 in shape:
        return True
    for dim in reversed(order):
        if shape[dim] != 1:
            if stride[dim] != expected:
                return False
            expected *= shape[dim]
    return True


def has_free_strides(type_: TensorType) -> bool:
    """Whether a dimension of size 1 has an unusual stride, which kernels treat differently."""
    usual = contiguous_strides(type_.shape)
    return any(
        size == 1 and stride != expected
        for size, stride, expected in zip(type_.shape, type_.stride, usual, strict=True)
    )


def is_dense(shape: Ints, stride: Ints) -> bool:
    """Whether no two elements overlap, and there are no holes; torch's own check."""
    if len(shape) == 1:
        return shape[0] < 2 or stride[0] == 1
    order = sorted(range(len(shape)), key=lambda dim: (shape[dim] < 2, stride[dim]))
    expected = 1
    for dim in order:
        if shape[dim] < 2:
            return True
        if stride[dim] != expected:
            return False
        expected *= shape[dim]
    return True


def overlaps_in_part(one: TensorType, other: TensorType) -> bool:
    """Whether two tensors on one storage overlap, but not fully; torch's own check.

    Like torch's, it considers only dense tensors; for others it is False.
    """
    if not (one.numel and other.numel):
        return False
    if not (is_dense(one.shape, one.stride) and is_dense(other.shape, other.stride)):
        return False
    (begin, end), (other_begin, other_end) = _bytes_of(one), _bytes_of(other)
    if (begin, end) == (other_begin, other_end):
        return one.stride != other.stride
    return begin < other_end and other_begin < end


def _bytes_of(type_: TensorType) -> tuple[int, int]:
    begin = type_.offset * type_.dtype.itemsize
    return begin, begin + type_.numel * type_.dtype.itemsize


def _packed(shape: Ints, order: Sequence[int]) -> Ints:
    """Dense strides, with the last dimension of `order` fastest."""
    result = [0] * len(shape)
    step = 1
    for dim in reversed(order):
        result[dim] = step
        step *= shape[dim]
    return tuple(result)


def _sorted_strides(operands: Sequence[Layout], shape: Ints) -> Ints:
    """The slow path: sort the dimensions by the operands' strides, fastest first."""
    rank = len(shape)
    aligned = [_aligned(size, stride, shape) for size, stride in operands]
    order = list(range(rank - 1, -1, -1))
    for position in range(1, rank):
        moving = position
        for other in range(position - 1, -1, -1):
            comparison = _compare(order[other], order[moving], aligned, shape)
            if comparison > 0:
                order[other], order[moving] = order[moving], order[other]
                moving = other
            elif comparison < 0:
                break
    if order == list(range(rank - 1, -1, -1)):
        return contiguous_strides(shape)
    return _packed(shape, order[::-1])


def _aligned(size: Ints, stride: Ints, shape: Ints) -> Ints:
    """Strides for the dimensions of `shape`; 0 where the operand is broadcast."""
    missing = len(shape) - len(size)
    return (0,) * missing + tuple(
        0 if size[dim] == 1 != shape[dim + missing] else stride[dim] for dim in range(len(size))
    )


def _compare(dim0: int, dim1: int, strides: Sequence[Ints], shape: Ints) -> int:
    """1 if `dim0` is the slower dimension, -1 if `dim1` is, 0 if no operand decides."""
    for stride in strides:
        if stride[dim0] == 0 or stride[dim1] == 0:
            continue
        if stride[dim0] != stride[dim1]:
            return -1 if stride[dim0] < stride[dim1] else 1
        if shape[dim0] > shape[dim1]:
            return 1
    return 0
