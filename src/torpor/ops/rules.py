"""Hand-written facts about single ops that are missing from, or wrong in, their schemas."""

from __future__ import annotations

from typing import Final

HIDDEN_MUTATIONS: Final[dict[str, tuple[str, ...]]] = {
    # declared as not mutating the running statistics, but their kernels do
    "aten.native_batch_norm.default": ("running_mean", "running_var"),
    "aten.cudnn_batch_norm.default": ("running_mean", "running_var"),
    "aten.miopen_batch_norm.default": ("running_mean", "running_var"),
    "aten._batch_norm_impl_index.default": ("running_mean", "running_var"),
}

HIDDEN_VIEWS: Final = frozenset(
    # declared as returning fresh memory, but their kernels return views, and torch's own composite
    # ops write through them
    {
        "aten._unsafe_view.default",
        "aten.unsafe_split.Tensor",
        "aten.unsafe_split_with_sizes.default",
    }
)

METADATA_OPS: Final = frozenset(
    {"aten.set_.source_Tensor", "aten.set_.source_Tensor_storage_offset", "aten.set_data.default",
     "aten.set_.source_Storage", "aten.set_.source_Storage_storage_offset", "aten.set_.default",
     "aten.resize_.default", "aten.resize_as_.default", "aten.shallow_copy_data_.default"}
)  # fmt: skip

EAGER_OPS: Final = frozenset(
    {
        # ops that return Python numbers, or nothing
        "aten._local_scalar_dense.default", "aten.item.default", "aten.equal.default",
        "aten.is_nonzero.default", "aten.allclose.default", "aten._assert_async.default",
        "aten._assert_async.msg", "aten._linalg_check_errors.default",
        # quantized tensors are never lazy
        "aten.quantize_per_tensor.default", "aten.quantize_per_tensor.tensor_qparams",
        "aten.quantize_per_tensor.tensors", "aten.quantize_per_tensor_dynamic.default",
        "aten.quantize_per_channel.default", "aten._make_per_tensor_quantized_tensor.default",
        "aten._make_per_channel_quantized_tensor.default",
    }
)  # fmt: skip

NOT_RANDOM: Final = frozenset(
    {
        # tagged as random because of a dropout that their CPU kernels do not implement
        "aten._scaled_dot_product_flash_attention_for_cpu.default",
        # tagged as random, but their seed is an argument: the one that forward drew
        "aten._scaled_dot_product_cudnn_attention_backward.default",
        "aten._scaled_dot_product_efficient_attention_backward.default",
    }
)

DROPOUT_AT: Final = {
    # ops that are random only because of dropout, and the position of their dropout probability
    "aten._scaled_dot_product_flash_attention.default": 3,
    "aten._scaled_dot_product_efficient_attention.default": 5,
    "aten._scaled_dot_product_cudnn_attention.default": 5,
}

SHAPE_ONLY: Final = frozenset(
    # ops that overwrite their tensor with random numbers, or use only its type; overloads with more
    # tensors do use the contents of the others
    {"bernoulli_", "uniform_", "normal_", "random_", "exponential_", "geometric_", "cauchy_",
     "log_normal_", "rand_like", "randn_like", "randint_like", "empty_like", "zeros_like",
     "ones_like", "full_like", "new_empty", "new_empty_strided", "new_zeros", "new_ones",
     "new_full"}
)  # fmt: skip

INDEXING: Final = frozenset(
    # aten ops that read or write at given indices
    {"embedding", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "scatter_reduce",
     "scatter_reduce_", "index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index",
     "_unsafe_index_put", "index_select", "index_add", "index_add_", "index_copy", "index_copy_",
     "index_fill", "index_fill_", "index_reduce", "index_reduce_", "take", "put", "put_"}
)  # fmt: skip

MAY_FAIL: Final = INDEXING | frozenset(
    # aten ops whose kernels reject some contents: indices out of range, integer division by 0
    {"embedding_dense_backward", "_embedding_bag", "_embedding_bag_forward_only",
     "one_hot", "nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward",
     "nll_loss2d_backward", "multi_margin_loss", "multilabel_margin_loss_forward",
     "max_unpool2d", "max_unpool3d", "bincount", "histc", "binary_cross_entropy",
     "binary_cross_entropy_backward", "floor_divide", "floor_divide_", "remainder", "remainder_",
     "fmod", "fmod_", "_ctc_loss", "repeat_interleave"}
)  # fmt: skip

NOT_PROMOTABLE: Final = frozenset(
    # compilers specialize on these numbers: exponents, steps, probabilities and bounds
    {"pow", "pow_", "float_power", "float_power_", "_foreach_pow", "_foreach_pow_", "arange",
     "linspace", "logspace", "range", "scalar_tensor", "full", "norm", "linalg_vector_norm",
     "_foreach_norm", "linalg_matrix_norm", "renorm", "renorm_", "dist", "cdist",
     "_cdist_forward", "_cdist_backward", "histc"}
)  # fmt: skip

PROMOTABLE_FLOATS: Final = frozenset(
    # float-typed arguments that programs change from step to step
    {"momentum", "lr"}
)
