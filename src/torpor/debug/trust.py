"""Decides which graphs from untrusted files may be run: those whose kernels check their arguments.

Many of torch's kernels trust their callers: fused optimizers assume that gradients are as long as
parameters, backward ops use indices that their forward saved. A file may contain anything there. So
its ops are only run if they are known to check sizes and indices themselves (`CHECKED`, elementwise
ops, views), or if the same graph computes what they rely on (`FORWARDS`). All others need `trust`,
which is for the user's own files.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from torpor.errors import GraphError
from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value
from torpor.ir.types import TensorType
from torpor.ops.spec import Mode, OpSpec, ReturnKind, spec_of

MOST_ELEMENTS: Final = 1 << 32
"""The most elements of a tensor, even if its strides need little memory."""

CHECKED: Final = frozenset(
    """
    sum mean prod amax amin max min argmax argmin any all var std var_mean std_mean norm aminmax
    linalg_vector_norm logsumexp cumsum cumprod logcumsumexp nansum median nanmedian mode
    kthvalue count_nonzero _cummax_helper cummax cummin sort topk argsort msort

    mm bmm addmm baddbmm addbmm addmv mv dot vdot addr linear matmul

    arange full full_like zeros zeros_like ones ones_like new_zeros new_ones new_full new_empty
    new_empty_strided empty empty_like empty_strided eye linspace logspace scalar_tensor
    tril_indices triu_indices rand rand_like randn randn_like randint randint_like randperm uniform
    normal bernoulli exponential native_dropout native_dropout_backward dropout_mask multinomial

    cat stack flip roll rot90 repeat constant_pad_nd reflection_pad1d reflection_pad2d
    reflection_pad3d replication_pad1d replication_pad2d replication_pad3d tril triu clone copy fill
    zero _to_copy contiguous pixel_shuffle pixel_unshuffle channel_shuffle lift_fresh_copy
    lift_fresh diag_embed block_diag trace unfold_copy resolve_conj resolve_neg reshape
    slice_scatter select_scatter diagonal_scatter slice_backward select_backward diagonal_backward
    as_strided as_strided_copy as_strided_scatter storage_scatter

    index index_put index_select index_add index_copy index_fill gather scatter scatter_add
    scatter_reduce take put masked_scatter masked_fill embedding searchsorted bucketize where

    _softmax _log_softmax _softmax_backward_data _log_softmax_backward_data native_layer_norm
    native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training convolution
    nll_loss_forward nll_loss2d_forward mse_loss mse_loss_backward smooth_l1_loss
    smooth_l1_loss_backward huber_loss huber_loss_backward binary_cross_entropy
    binary_cross_entropy_backward binary_cross_entropy_with_logits max_pool2d_with_indices
    max_pool3d_with_indices avg_pool1d avg_pool2d avg_pool3d avg_pool2d_backward
    _adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d
    upsample_nearest2d upsample_bilinear2d _cdist_forward _pdist_forward im2col col2im
    grid_sampler_2d
    _scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_attention_math

    _fft_r2c _fft_c2c linalg_cholesky_ex linalg_qr linalg_inv_ex linalg_eigh _linalg_eigh
    _linalg_svd _linalg_det _linalg_slogdet _linalg_solve_ex linalg_solve_triangular linalg_cross
    linalg_matrix_exp cholesky linalg_lu_factor_ex
    """.split()
)
"""Ops, including in-place variants, whose kernels check sizes and indices themselves."""

Condition = Callable[[Mapping[str, Any]], bool]


def _numel(argument: Any) -> int:
    return argument.type.numel if isinstance(argument, Value) else -1


def _group_norm(named: Mapping[str, Any]) -> bool:
    sizes = [named[name] for name in ("N", "C", "HxW", "group")]
    if not all(type(size) is int and size >= 0 for size in sizes) or not sizes[3]:
        return False
    whole = math.prod(sizes[:3]) == _numel(named["input"])
    affine = all(named[n] is None or _numel(named[n]) == sizes[1] for n in ("weight", "bias"))
    return whole and affine and sizes[1] % sizes[3] == 0


def _real_fft(named: Mapping[str, Any]) -> bool:
    dims, length = named["dim"], named["last_dim_size"]
    if not dims or not all(type(number) is int for number in (*dims, length)):
        return False
    shape: tuple[int, ...] = named["self"].type.shape
    last: int = dims[-1]
    return -len(shape) <= last < len(shape) and shape[last] == int(length) // 2 + 1


CONDITIONS: Final[dict[str, Condition]] = {
    "embedding_dense_backward": lambda named: named["scale_grad_by_freq"] is False,
    "native_group_norm": _group_norm,
    "_fft_c2r": _real_fft,
}
"""Ops that check their arguments under a condition on them."""


@dataclass(frozen=True, slots=True)
class Forward:
    """What a backward op relies on: results of its forward, on the same arguments."""

    names: tuple[str, ...]  # of forward ops
    saved: Mapping[str, int]  # backward argument -> index of the forward's result
    same: tuple[str, ...]  # arguments common to both
    gradient: str | None = None  # the argument with the type of the forward's first result


_POOL: Final = ("self", "kernel_size", "stride", "padding", "dilation", "ceil_mode")
_LOSS: Final = ("self", "target", "weight", "reduction", "ignore_index")
_CONVOLUTION: Final = (
    "input", "weight", "stride", "padding", "dilation", "transposed", "output_padding", "groups",
)  # fmt: skip
_BATCH_NORMS: Final = ("native_batch_norm", "_native_batch_norm_legit")

FORWARDS: Final = {
    "nll_loss_backward": Forward(("nll_loss_forward",), {"total_weight": 1}, _LOSS),
    "nll_loss2d_backward": Forward(("nll_loss2d_forward",), {"total_weight": 1}, _LOSS),
    "native_layer_norm_backward": Forward(
        ("native_layer_norm",),
        {"mean": 1, "rstd": 2},
        ("input", "normalized_shape", "weight"),
        "grad_out",
    ),
    "native_group_norm_backward": Forward(
        ("native_group_norm",),
        {"mean": 1, "rstd": 2},
        ("input", "weight", "N", "C", "HxW", "group"),
        "grad_out",
    ),
    "native_batch_norm_backward": Forward(
        _BATCH_NORMS, {"save_mean": 1, "save_invstd": 2}, ("input", "weight"), "grad_out"
    ),
    "max_pool2d_with_indices_backward": Forward(
        ("max_pool2d_with_indices",), {"indices": 1}, _POOL, "grad_output"
    ),
    "max_pool3d_with_indices_backward": Forward(
        ("max_pool3d_with_indices",), {"indices": 1}, _POOL, "grad_output"
    ),
    "convolution_backward": Forward(("convolution",), {}, _CONVOLUTION, "grad_output"),
    "_scaled_dot_product_flash_attention_for_cpu_backward": Forward(
        ("_scaled_dot_product_flash_attention_for_cpu",),
        {"out": 0, "logsumexp": 1},
        ("query", "key", "value", "dropout_p", "is_causal", "attn_mask", "scale"),
        "grad_out",
    ),
}


def check_graph(graph: Graph, trust: bool) -> None:
    """Raise `GraphError` for ops that must not run; with `trust`, only if they are invalid."""
    for value in (*graph.inputs, *(output for node in graph.nodes for output in node.outputs)):
        _check_size(value, trust)
    memory: dict[Value, int] = {}
    forwards: dict[str, list[Node]] = {}
    for node in graph.nodes:
        spec = spec_of(node.op.target)
        if not trust and not _may_run(node, spec, forwards):
            raise GraphError(
                f"{spec.name} is not run from a file of a stranger's: it does not check all that "
                "it is given; trust=True (--trust) runs it, for a file of your own"
            )
        _check_window(node, spec, memory)
        forwards.setdefault(_name(spec), []).append(node)


def _check_size(value: Value, trust: bool) -> None:
    type_ = value.type
    if not trust and isinstance(type_, TensorType) and type_.numel > MOST_ELEMENTS:
        raise GraphError(f"{type_!r} has {type_.numel} elements; {MOST_ELEMENTS} are allowed")


def _name(spec: OpSpec) -> str:
    return spec.target._opname.removesuffix("_")


def _named(node: Node, spec: OpSpec) -> dict[str, Any]:
    return {a.name: value for a, value in zip(spec.arguments, node.args, strict=True)}


def _may_run(node: Node, spec: OpSpec, forwards: Mapping[str, list[Node]]) -> bool:
    name = _name(spec)
    if spec.target.namespace not in ("aten", "torpor"):
        return True  # explicitly allowed, or it would not have been parsed
    if name.startswith(("_unsafe", "_reshape_alias", "_fused")):
        return name == "_unsafe_view"  # which is a view
    if name in CONDITIONS:
        return CONDITIONS[name](_named(node, spec))
    if name in FORWARDS:
        return _has_forward(node, spec, FORWARDS[name], forwards)
    known = name in CHECKED or name.removeprefix("_foreach_") in CHECKED
    return known or torch.Tag.pointwise in spec.target.tags or _on_elements(name) or _is_view(spec)


def _on_elements(name: str) -> bool:
    """Whether it is an op on lists whose single-tensor variant is elementwise."""
    packet = getattr(torch.ops.aten, name.removeprefix("_foreach_"), None)
    if not name.startswith("_foreach_") or packet is None:
        return False
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    return any(torch.Tag.pointwise in overload.tags for overload in overloads)


def _is_view(spec: OpSpec) -> bool:
    return spec.mode is Mode.VIEW and not spec.mutated


def _has_forward(
    node: Node, spec: OpSpec, forward: Forward, forwards: Mapping[str, list[Node]]
) -> bool:
    """Whether the graph computes what a backward op relies on, from the same arguments."""
    given = _named(node, spec)
    made = (one for name in forward.names for one in forwards.get(name, ()))
    return any(_belongs(given, forward, one) for one in made)


def _belongs(given: Mapping[str, Any], forward: Forward, node: Node) -> bool:
    taken = _named(node, spec_of(node.op.target))
    saved = all(given[name] is node.outputs[place] for name, place in forward.saved.items())
    same = all(given[name] == taken[name] for name in forward.same)
    gradient = forward.gradient
    shaped = gradient is None or given[gradient].type.shape == node.outputs[0].type.shape
    return saved and same and shaped


# -- windows on memory -------------------------------------------------------------------------


def _check_window(node: Node, spec: OpSpec, memory: dict[Value, int]) -> None:
    """Check that a view by sizes, strides and offset stays within its tensor's memory."""
    views = [r.argument for r in spec.returns if r.kind is ReturnKind.VIEW]
    source = node.args[views[0]] if views and views[0] is not None else None
    for output in node.outputs:
        if isinstance(source, Value):
            memory[output] = _bytes(source, memory)
        elif isinstance(output.type, TensorType):
            memory[output] = output.type.nbytes
    if _name(spec) in ("as_strided", "as_strided_copy", "as_strided_scatter", "storage_scatter"):
        _check_bounds(_named(node, spec), spec.name, memory)


def _bytes(value: Value, memory: Mapping[Value, int]) -> int:
    own = value.type.nbytes if isinstance(value.type, TensorType) else 0
    return memory.get(value, own)


def _check_bounds(named: Mapping[str, Any], name: str, memory: Mapping[Value, int]) -> None:
    tensor = named["self"]
    offset = named.get("offset", named.get("storage_offset"))
    numbers = (*named["size"], *named["stride"], tensor.type.offset if offset is None else offset)
    if not all(type(number) is int for number in numbers):
        raise GraphError(f"{name} with sizes that are not known")
    size, stride = named["size"], named["stride"]
    if any(number < 0 for number in numbers) or len(size) != len(stride):
        raise GraphError(f"{name} with sizes, strides or an offset below 0")
    dtype = named.get("dtype", tensor.type.dtype)
    last = sum((n - 1) * s for n, s in zip(size, stride)) + numbers[-1]
    needed = (last + 1) * dtype.itemsize if 0 not in size else 0
    have = _bytes(tensor, memory)
    if needed > have:
        raise GraphError(f"{name} reaches byte {needed} of a memory of {have}")
