"""The `op_db` entries the sweep leaves out: at most 12, each with its reason."""

LIMIT = 12

EXCLUSIONS: dict[str, str] = {
    "jiterator_unary": "eager itself refuses: jiterator is for CUDA only",
    "jiterator_binary": "eager itself refuses: jiterator is for CUDA only",
    "jiterator_4inputs_with_extra_args": "eager itself refuses: jiterator is for CUDA only",
    "jiterator_binary_return_by_ref": "eager itself refuses: jiterator is for CUDA only",
    "jiterator_2inputs_2outputs": "eager itself refuses: jiterator is for CUDA only",
    "torch_ops_aten__flash_attention_forward": "op_db lists no dtype for it on the CPU",
    "torch_ops_aten__efficient_attention_forward": "op_db lists no dtype for it on the CPU",
    "nn_functional_batch_norm_without_cudnn": "op_db lists no dtype for it on the CPU",
}
