"""The factory functions of torch.

`extract_compiled_graph` gives them a lazy device if they have none. Functions that the installed
torch lacks are omitted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

_NAMES = (
    "_cudnn_init_dropout_state", "_efficientzerotensor", "_empty_affine_quantized", "arange",
    "bartlett_window", "blackman_window", "empty_strided", "eye", "from_file", "full",
    "hamming_window", "hann_window", "kaiser_window", "linspace", "logspace", "ones", "rand",
    "randint", "randn", "randperm", "range", "scalar_tensor", "tensor", "tril_indices",
    "triu_indices", "zeros",
)  # fmt: skip

tensor_factory_functions: tuple[Callable[..., Any], ...] = tuple(
    getattr(torch, name) for name in _NAMES if hasattr(torch, name)
)
