"""A small graph as compilers get it."""

from typing import Any

import torch
from torch.fx.experimental.proxy_tensor import make_fx

from torpor import _torch


def traced_sine() -> tuple[torch.fx.GraphModule, list[torch.Tensor], Any]:
    """The graph, its fake inputs, and their fake-tensor mode."""
    mode = _torch.new_fake_mode()
    with mode:
        inputs = [torch.empty(3, 4).t()]
        module = make_fx(lambda x: (x.sin() + 1,))(*inputs)
    return module, inputs, mode
