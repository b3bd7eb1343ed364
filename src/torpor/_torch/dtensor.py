"""DTensor: one tensor sharded over several ranks."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

from torpor._torch.import_hooks import replace_function

_MODULE = "torch.distributed.tensor"


def is_dtensor(tensor: object) -> bool:
    """Whether `tensor` is a DTensor; does not import its module."""
    module = sys.modules.get(_MODULE)
    kind = getattr(module, "DTensor", None)  # another thread may be importing it
    return kind is not None and issubclass(type(tensor), kind)


def local_part(tensor: Any) -> Any:
    """This rank's shard of a DTensor; any other tensor itself."""
    if type(tensor) is torch.Tensor or not is_dtensor(tensor):
        return tensor
    return tensor._local_tensor


def of_local_part(tensor: Any, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    """A DTensor like `tensor`, whose shard on this rank is converted by `convert`."""
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
    """Make functional collectives return results, not wrappers that wait on first use.

    For tensors that are `is_ours`: their `wait` is recorded, and does not block.
    """

    def around(wrap: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def maybe_wrap(result: Any) -> Any:
            if is_ours(result):
                return torch.ops._c10d_functional.wait_tensor(result)
            return wrap(result)

        return maybe_wrap

    replace_function("torch.distributed._functional_collectives._maybe_wrap_tensor", around)
