"""Variants, without gradients, of ops whose kernels depend on the grad mode.

A graph runs later and on another thread than it was recorded, with gradients on. oneDNN's recurrent
layer uses another kernel without gradients, with different rounding.
"""

from __future__ import annotations

from typing import Any

import torch

_aten = torch.ops.aten
_library = torch.library.Library("torpor", "FRAGMENT")
_, _, _signature = str(_aten.mkldnn_rnn_layer.default._schema).partition("layer")
_library.define(f"mkldnn_rnn_layer_without_grad{_signature}")


def _without_grad(*args: Any) -> Any:
    with torch.no_grad():
        return _aten.mkldnn_rnn_layer.default(*args)


_library.impl("mkldnn_rnn_layer_without_grad", _without_grad, "CPU")
_library._register_fake("mkldnn_rnn_layer_without_grad", _aten.mkldnn_rnn_layer.default)

mkldnn_rnn_layer_without_grad = torch.ops.torpor.mkldnn_rnn_layer_without_grad.default
