"""Type rules written by hand, where fake tensors are wrong, slow or know less than we do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torpor.ir.types import TensorType

Rule = Callable[[list[Any]], tuple[TensorType | None, ...] | None]


def _as_strided(bound: list[Any]) -> tuple[TensorType, ...]:
    source: TensorType = bound[0].type
    offset = source.offset if bound[3] is None else bound[3]
    return (
        TensorType.of(
            tuple(bound[1]), tuple(bound[2]), source.dtype, source.device, offset,
            source.conj, source.neg,
        ),
    )  # fmt: skip


def _same_as_first(bound: list[Any]) -> tuple[TensorType, ...]:
    return (bound[0].type,)


RULES: Final[dict[str, Rule]] = {
    "aten.as_strided.default": _as_strided,
    "aten.as_strided_scatter.default": _same_as_first,
    "aten.detach.default": _same_as_first,
    "aten.alias.default": _same_as_first,
    "aten.lift_fresh.default": _same_as_first,
}

TRIED: Final = frozenset(
    # fake kernels that are wrong about sizes or strides, or refuse what the real one takes
    {
        "aten.mkldnn_rnn_layer.default",
        "aten.max_unpool2d.default",
        "aten.max_unpool3d.default",
        "aten._embedding_bag.default",
        "aten._embedding_bag_forward_only.default",
        "aten._grouped_mm.default",
    }
)

UNCHECKED: Final = frozenset(
    # ops whose fake kernels accept dtypes, or mixtures of them, that the real ones refuse
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
    }
)
