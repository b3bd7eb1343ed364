"""Ops of a library, without kernels for fake tensors: one made by `custom_op`, one only defined."""

import torch


@torch.library.custom_op("torpor_internals::own", mutates_args=())
def own(x: torch.Tensor) -> torch.Tensor:
    return x + 1


_library = torch.library.Library("torpor_internals", "FRAGMENT")
_library.define("bare(Tensor x) -> Tensor")

OWN = torch.ops.torpor_internals.own.default
BARE = torch.ops.torpor_internals.bare.default
