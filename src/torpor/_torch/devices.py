"""Devices and the process: device checks in torch that must accept `lazy`, attention, CUDA.

Uses those checks, process-wide settings, `torch._lazy`, and CUDA's streams and allocator.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import _C
from torch._ops import OpOverload

from torpor._torch.dispatch import without_torch_function


def register_device_module(name: str, module: Any) -> None:
    """Register `module` as the device module `torch.<name>`."""
    if not hasattr(torch, name):
        torch._register_device_module(name, module)


def accept_lazy_autocast() -> None:
    """Make `torch.is_autocast_enabled("lazy")` return False where torch raises."""
    original = torch.is_autocast_enabled

    @functools.wraps(original)
    def is_autocast_enabled(*args: Any) -> bool:
        return False if args and args[0] == "lazy" else original(*args)

    torch.is_autocast_enabled = is_autocast_enabled  # type: ignore[assignment]  # overloads


def accept_lazy_attention() -> None:
    """Enable the fused path of `nn.MultiheadAttention` on the device `lazy`."""
    from torch.nn.modules import activation

    original = activation._check_arg_device
    activation._check_arg_device = lambda x: (
        original(x) or (x is not None and x.device.type == "lazy")
    )


def accept_lazy_losses(
    physical: Callable[[torch.device], torch.device], prepare: Callable[[OpOverload], None]
) -> None:
    """Make `linear_cross_entropy` choose for the device `lazy` what it does for the physical one.

    `prepare` is called with the underlying op before its first use.
    """
    name = "torch.nn.modules.linear_cross_entropy"
    if importlib.util.find_spec(f"{name}_options") is None:  # torch 2.11 does not have it
        return
    options = importlib.import_module(f"{name}_options").LinearCrossEntropyOptions
    original = options._adjust

    @functools.cache
    def first_use() -> None:
        importlib.import_module(name)
        prepare(torch.ops.torch_nn._linear_cross_entropy_batch_chunked_no_reduction.default)

    @functools.wraps(original)
    def adjust(self: Any, *args: Any, device: torch.device | None = None, **kwargs: Any) -> Any:
        first_use()
        if device is not None and device.type == "lazy":
            device = physical(device)
        return original(self, *args, device=device, **kwargs)

    options._adjust = adjust


def attention_switches() -> tuple[Any, ...]:
    """The process-wide switches that determine the choice of attention kernel."""
    return (
        _C._get_flash_sdp_enabled(),
        _C._get_math_sdp_enabled(),
        _C._get_overrideable_sdp_enabled(),
        _C._get_mem_efficient_sdp_enabled(),
        _C._get_cudnn_sdp_enabled(),
        tuple(_C._get_sdp_priority_order()),
        _C._get_deterministic_algorithms(),
        _C._get_deterministic_algorithms_warn_only(),
    )


def attention_choice(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    p: float,
    causal: bool,
    scale: float | None,
) -> int:
    """The number of the attention kernel that torch chooses for plain tensors like these."""
    with without_torch_function():
        return int(torch._fused_sdp_choice(query, key, value, None, p, causal, scale=scale))


def on_default_dtype(finish: Callable[[], None], changed: Callable[[], None]) -> None:
    """Call `finish` before the default dtype changes, and `changed` afterwards.

    It is an implicit input of type inference, both when an op is recorded and when it runs.
    """

    def watch(name: str) -> None:
        original = getattr(torch, name)

        @functools.wraps(original)
        def set_default(value: Any) -> None:
            before = torch.get_default_dtype()
            if value is not before:
                finish()
            original(value)
            if torch.get_default_dtype() is not before:
                changed()

        setattr(torch, name, set_default)

    watch("set_default_dtype")
    watch("set_default_tensor_type")


def is_data_worker() -> bool:
    """Whether this process is a `DataLoader` worker."""
    worker = sys.modules.get("torch.utils.data._utils.worker")
    return worker is not None and worker._worker_info is not None


def finish_gpu() -> None:
    """Wait for the GPUs, if this process uses any."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()


def cuda_stream(device: int) -> int:
    """The address of the stream on which this thread's kernels run, without making an object."""
    stream: int = _C._cuda_getCurrentRawStream(device)  # only in CUDA builds
    return stream


def end_allocating_to_pool(device: int, pool: Any) -> None:
    """Stop allocating from the pool of a CUDA graph, after a failed capture."""
    _C._cuda_endAllocateToPool(device, pool)
    _C._cuda_releasePool(device, pool)


def forget_cublas_workspaces() -> None:
    """Free cuBLAS's per-stream workspaces, some of which are in the memory of CUDA graphs."""
    if torch.cuda.is_initialized():
        _C._cuda_clearCublasWorkspaces()


def torch_lazy_system() -> tuple[Callable[[], Any], Callable[[], Any], Callable[[], int]]:
    """Start PyTorch's own lazy tensors (without torpor): cut, wait, and the number of compiles."""
    import torch._lazy.metrics
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()

    def compiles() -> int:
        return int(torch._lazy.metrics.counter_value("UncachedCompile") or 0)

    return torch._lazy.mark_step, torch._lazy.wait_device_ops, compiles
