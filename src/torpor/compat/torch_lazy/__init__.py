"""The API of `torch._lazy` on top of torpor, with the same signatures.

A program written for `torch._lazy` runs on torpor once its imports are changed:

    import torpor.compat.torch_lazy as lazy    # was: import torch._lazy as lazy
    lazy.ts_backend.init()
    ...
    lazy.mark_step()

Submodules have the same names as torch's (`metrics`, `debug`, `computation`, ...) and are all
imported here. `docs/torch_lazy_names.md` says what each name does here and where torpor differs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

import torpor
from torpor import _torch
from torpor import metrics as _core_metrics
from torpor.compat.torch_lazy import (
    closure,
    computation,
    config,
    debug,
    device_context,
    extract_compiled_graph,
    ir_cache,
    metrics,
    tensor_factory_functions,
    tensor_ids,
    ts_backend,
)
from torpor.compat.torch_lazy.closure import add_step_closure, run_step_closures
from torpor.compat.torch_lazy.debug import _get_tensors_text as _get_tensors_text

__all__ = [
    "add_step_closure",
    "closure",
    "computation",
    "config",
    "debug",
    "device_context",
    "extract_compiled_graph",
    "get_tensor_id",
    "ir_cache",
    "mark_step",
    "metrics",
    "run_step_closures",
    "save",
    "sync_multi",
    "tensor_factory_functions",
    "to_cpu",
    "ts_backend",
    "wait_device_ops",
]


def mark_step(device: str = "", wait: bool = False) -> None:
    """Cut the trace: everything live is compiled, if needed, and queued; then closures run.

    With `wait=True` it returns when the results are available.
    """
    _core_metrics.count(metrics.MARK_STEP_CALLS)
    debug.save_graph()
    torpor.sync(wait=wait, device=device or None)
    run_step_closures()


def wait_device_ops(devices: Sequence[str] | None = None) -> None:
    """Block until the queues of `devices` (default: all) are empty."""
    for device in devices or (None,):
        torpor.wait(device)


def sync_multi(tensors: Sequence[torch.Tensor], devices: Sequence[str]) -> None:
    """Compute these tensors and nothing they do not need, and wait for them.

    `devices` is only for compatibility: a graph runs on the device of its tensors.
    """
    strangers = [t for t in tensors if not isinstance(t, torch.Tensor)]
    if strangers:
        raise TypeError(f"expected tensors, got {type(strangers[0]).__name__}")
    if tensors:
        debug.save_graph()
        torpor.sync(*tensors, wait=True)


def get_tensor_id(tensor: torch.Tensor) -> int:
    """A unique, permanent number for a lazy tensor."""
    return tensor_ids.id_of(tensor)


def to_cpu(tensors: Any, devices: Sequence[str] | None = None) -> Any:
    """The tensors on the CPU, computed together; recurses into lists, tuples and dicts.

    Other objects are returned unchanged.
    """
    lazy = [t for t in _torch.tree_leaves(tensors) if torpor.is_lazy(t)]
    sync_multi(lazy, devices or ["lazy"])
    return _torch.tree_map(_on_cpu, tensors)


def _on_cpu(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    return torpor.eager(leaf.to("cpu"))  # `to` leaves a lazy tensor on the CPU lazy


def save(tensors: Any, *args: Any, **kwargs: Any) -> None:
    """`torch.save` of the tensors on the CPU: the file contains nothing lazy."""
    torch.save(to_cpu(tensors), *args, **kwargs)
