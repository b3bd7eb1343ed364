"""The virtual device `lazy`, on which torch's factories make lazy tensors."""

from __future__ import annotations

from typing import Any

import torch

from torpor import _torch
from torpor.backend.registry import get_backend
from torpor.overrides.special import FOR_TRANSFER, copy_from, item
from torpor.trace.tensor import LazyTensor

_library = torch.library.Library("aten", "IMPL")


def lazy_device(device: Any = None) -> torch.device:
    """`device` with an index, if it is a lazy device; other devices unchanged."""
    asked = torch.device("lazy") if device is None else torch.device(device)
    if asked.type != "lazy":
        return asked
    index = get_backend().backend_device(asked).ordinal  # raises for an invalid index
    return torch.device("lazy", index)


def _factory(op: Any) -> Any:
    def make(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("layout", torch.strided) not in (None, torch.strided):
            raise NotImplementedError(
                f"{op}: a lazy tensor is strided; make the {kwargs['layout']} tensor on the CPU"
            )
        kwargs["device"] = lazy_device(kwargs.get("device"))
        kwargs.pop("pin_memory", None)
        transfer = kwargs.pop("layout", None) is not None and _is_transfer(op, kwargs)
        tensor = LazyTensor.__torch_dispatch__(op, (), args, kwargs)
        if transfer:
            setattr(tensor, FOR_TRANSFER, True)
        return tensor

    return make


def _is_transfer(op: Any, kwargs: dict[str, Any]) -> bool:
    """Whether this is the call torch makes for `plain.to("lazy")`, which specifies everything."""
    return op is torch.ops.aten.empty.memory_format and kwargs.get("memory_format") is not None


def register_device() -> None:
    """Register kernels for the dispatch key `Lazy`."""
    for op in _torch.factory_ops():
        _library.impl(op, _factory(op), "Lazy")
    _library.impl("_copy_from", copy_from, "Lazy")
    _library.impl("_local_scalar_dense", item, "Lazy")
    for op in _torch.composite_ops_with_cpu_kernels():
        _library.impl(op, _recorded(op), "Lazy")


def _recorded(op: Any) -> Any:
    """A kernel for `Lazy`, which prevents torch from decomposing the op on this device."""

    def record(*args: Any, **kwargs: Any) -> Any:
        return LazyTensor.__torch_dispatch__(op, (), args, kwargs)

    return record
