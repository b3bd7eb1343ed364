"""Hand-written type rules, for ops on which fake tensors are wrong, slow or too permissive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from torpor.ir.types import TensorType, Types, contiguous_strides

Rule = Callable[[list[Any]], Types | None]
CustomRule = Callable[[Any, list[Any], dict[Any, Any], Any], Types]

CUSTOM: Final[dict[str, CustomRule]] = {}
"""Rules for custom ops (`custom.registration`), by name.

Their arguments: spec, arguments, run-time numbers, and the mapping to physical devices."""


def _as_strided(bound: list[Any]) -> tuple[TensorType, ...] | None:
    source: TensorType = bound[0].type
    if min(bound[2], default=0) < 0:  # an error in eager
        return None
    offset = source.offset if bound[3] is None else bound[3]
    return (
        TensorType.of(
            tuple(bound[1]), tuple(bound[2]), source.dtype, source.device, offset,
            source.conj, source.neg,
        ),
    )  # fmt: skip


def _same_as_first(bound: list[Any]) -> tuple[TensorType, ...]:
    return (bound[0].type,)


def _as_strided_scatter(bound: list[Any]) -> tuple[TensorType, ...] | None:
    """The type of the written tensor; None if the window exceeds its memory."""
    source: TensorType = bound[0].type
    window = TensorType.of(
        tuple(bound[2]), tuple(bound[3]), source.dtype, source.device, bound[4] or 0
    )
    return (source,) if not window.numel or window.nbytes <= source.nbytes else None


def _view(bound: list[Any]) -> tuple[TensorType, ...] | None:
    """The type of `view`, with torch's strides; None if it is an error."""
    source: TensorType = bound[0].type
    shape = _full_size(source.numel, tuple(bound[1]))
    stride = None if shape is None else view_strides(source.shape, source.stride, shape)
    if shape is None or stride is None:
        return None
    return (
        TensorType.of(
            shape, stride, source.dtype, source.device, source.offset, source.conj, source.neg
        ),
    )


def _one_hot(bound: list[Any]) -> tuple[TensorType, ...] | None:
    source: TensorType = bound[0].type
    if source.dtype is not torch.int64 or bound[1] < 1:
        return None
    return (TensorType.contiguous((*source.shape, bound[1]), source.dtype, source.device),)


def _full_size(numel: int, size: tuple[int, ...]) -> tuple[int, ...] | None:
    """`size` with -1 resolved; None if it does not have `numel` elements."""
    known = 1
    for extent in size:
        if extent >= 0:
            known *= extent
    if size.count(-1) == 1 and known and numel % known == 0:
        size = tuple(numel // known if extent == -1 else extent for extent in size)
        known = numel
    return size if known == numel and min(size, default=0) >= 0 else None


def view_strides(
    old: tuple[int, ...], strides: tuple[int, ...], new: tuple[int, ...]
) -> tuple[int, ...] | None:
    """Strides of a view of size `new`; None if no strides can express it.

    Dimensions of the old size are grouped into runs that are contiguous in memory; each run must
    consist of whole dimensions of the new size.
    """
    if old == new and 0 in old:
        return strides
    if 0 in old or not old:
        return contiguous_strides(new)
    result = [0] * len(new)
    dim = len(new) - 1
    base, run, made = strides[-1], 1, 1
    for position in reversed(range(len(old))):
        run *= old[position]
        if position and (old[position - 1] == 1 or strides[position - 1] == run * base):
            continue
        while dim >= 0 and (made < run or new[dim] == 1):
            result[dim] = made * base
            made *= new[dim]
            dim -= 1
        if made != run:
            return None
        if position:
            base, run, made = strides[position - 1], 1, 1
    return tuple(result) if dim < 0 else None


RULES: Final[dict[str, Rule]] = {
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_scatter.default": _as_strided_scatter,
    "aten.detach.default": _same_as_first,
    "aten.alias.default": _same_as_first,
    "aten.lift_fresh.default": _same_as_first,
    "aten._unsafe_view.default": _view,
    "aten.one_hot.default": _one_hot,
    "aten.view.default": _view,
}

WHOLLY_KNOWN: Final = frozenset(
    {"aten._unsafe_view.default", "aten.one_hot.default", "aten.view.default"}
)
"""Ops whose rule covers all valid calls; their fake kernels accept invalid ones, too."""

TRIED: Final = frozenset(
    # fake kernels that give wrong sizes or strides, or reject what the real one accepts
    {
        "aten.mkldnn_rnn_layer.default",
        "torpor.mkldnn_rnn_layer_without_grad.default",
        "aten.max_unpool2d.default",
        "aten.max_unpool3d.default",
        "aten._embedding_bag.default",
        "aten._embedding_bag_forward_only.default",
        "aten._grouped_mm.default",
    }
)

TRIED_ON_GPUS: Final = frozenset(
    # the GPU's kernel decides whether results are channels-last; fake ones behave like the CPU's
    {"upsample_bilinear2d", "upsample_bicubic2d", "upsample_nearest2d", "_upsample_nearest_exact2d"}
)

TRIED_WHEN_MIXED: Final = frozenset(
    # fake kernels that give results the dtype of one operand, regardless of the others
    {
        "aten.native_batch_norm.default",
        "aten.native_batch_norm_backward.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_functional.default",
        "aten._native_batch_norm_legit_no_training.default",
        "aten._batch_norm_with_update.default",
        "aten._batch_norm_with_update_functional.default",
        "aten.native_group_norm.default",
        "aten.native_group_norm_backward.default",
        "aten.native_layer_norm.default",
        "aten.native_layer_norm_backward.default",
        "aten.threshold_backward.default",
    }
)

TRIED_WHEN_STRIDED: Final = frozenset(
    # the kernel decides how results lie in memory where an operand is not contiguous; fakes follow
    # the first operand
    {
        "aten.native_batch_norm.default",
        "aten.native_batch_norm_backward.default",
        "aten._native_batch_norm_legit.default",
        "aten._native_batch_norm_legit.no_stats",
        "aten._native_batch_norm_legit_functional.default",
        "aten._native_batch_norm_legit_no_training.default",
        "aten._batch_norm_with_update.default",
        "aten._batch_norm_with_update_functional.default",
        "aten.batch_norm_backward.default",
    }
)

UNCHECKED: Final = frozenset(
    # ops whose fake kernels accept dtypes, or mixtures of them, that the real ones reject
    {
        "mm",
        "bmm",
        "addmm",
        "addmv",
        "mv",
        "dot",
        "vdot",
        "baddbmm",
        "addbmm",
        "addr",
        "_softmax",
        "_log_softmax",
        "convolution",
        "index_add",
        "index_copy",
        "scatter_add",
        "cat",
        "arange",
        "complex",
        "masked_scatter",
    }
)

UNCHECKED_SIZES: Final = frozenset(
    # ops whose fake kernels accept sizes that the real ones reject
    {
        "index_add",
        "index_add_",
        "bucketize",
        "searchsorted",
    }
)
