"""DTensor: one tensor over several ranks, each of which holds a part of it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from torpor._torch.import_hooks import replace_function

_MODULE = "torch.distributed.tensor"


def is_dtensor(tensor: object) -> bool:
    """`tensor` is a DTensor; its module is not imported for the answer."""
    module = sys.modules.get(_MODULE)
    return module is not None and issubclass(type(tensor), module.DTensor)


def local_part(tensor: Any) -> Any:
    """The tensor that this rank holds of a DTensor; anything else is its own."""
    if type(tensor) is torch.Tensor or not is_dtensor(tensor):
        return tensor
    return tensor._local_tensor


def of_local_part(tensor: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A DTensor like `tensor`, of which this rank holds what `convert` makes of its part."""
    part = tensor._local_tensor if tensor.is_leaf else tensor.to_local()
    local = convert(part)
    made: torch.Tensor = tensor
    if local is part:
        return made
    made = type(tensor).from_local(
        local, tensor.device_mesh, tensor.placements,
        run_check=False, shape=tensor.shape, stride=tensor.stride(),
    )  # fmt: skip
    if isinstance(tensor, torch.nn.Parameter):
        return torch.nn.Parameter(made, tensor.requires_grad)
    return made.requires_grad_(tensor.requires_grad) if tensor.is_leaf else made


def wait_at_once(is_ours: Callable[[Any], bool]) -> None:
    """Functional collectives return their results, not tensors that wait when they are used.

    For tensors that are `is_ours`: their `wait` is recorded, nobody waits.
    """

    def around(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def maybe_wrap(result: Any) -> Any:
            if is_ours(result):
                return torch.ops._c10d_functional.wait_tensor(result)
            return wrap(result)

        return maybe_wrap

    replace_function("torch.distributed._functional_collectives._maybe_wrap_tensor", around)
