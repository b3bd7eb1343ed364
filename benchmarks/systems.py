"""The systems under test: how each takes a program in, ends a trace, and finishes its work.

torpor and `torch._lazy` both want torch's dispatch key `Lazy`, and torpor wraps
`nn.Module.__call__`: one process holds one system, which is imported where it is chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


def _nothing() -> None:
    """Eager has nothing to cut and nothing to wait for."""


def _no_counters() -> dict[str, int]:
    return {}


@dataclass(frozen=True)
class System:
    """What a benchmark needs to know of a system."""

    place: Callable[[Any], Any]  # puts a module or a tensor where the system sees it
    cut: Callable[[], object] = _nothing  # ends the trace and starts computing it
    wait: Callable[[], object] = _nothing  # until nothing runs on another thread
    counters: Callable[[], dict[str, int]] = _no_counters
    reset_counters: Callable[[], object] = _nothing


def eager() -> System:
    """PyTorch as it is."""
    return System(place=lambda thing: thing)


def torpor_virtual() -> System:
    """torpor on its virtual device `lazy`."""
    return _torpor(lambda thing: thing.to("lazy"))


def torpor_concrete() -> System:
    """torpor on the device the tensors are on already."""
    import torpor

    return _torpor(torpor.lazy)


def _torpor(place: Callable[[Any], Any]) -> System:
    import torpor

    torpor.config.cut_after_optimizer = False  # the cut is timed by itself
    metrics = torpor.metrics
    return System(place, torpor.sync, torpor.wait, metrics.counters, metrics.reset)


def torch_lazy() -> System:
    """PyTorch's own lazy tensors, on their TorchScript backend."""
    import torch._lazy.metrics
    import torch._lazy.ts_backend

    torch._lazy.ts_backend.init()
    metrics = torch._lazy.metrics

    def counters() -> dict[str, int]:
        return {name: metrics.counter_value(name) for name in metrics.counter_names()}

    return System(
        place=lambda thing: thing.to("lazy"),
        cut=torch._lazy.mark_step,
        wait=torch._lazy.wait_device_ops,
        counters=counters,
        reset_counters=metrics.reset,
    )


SYSTEMS: dict[str, Callable[[], System]] = {
    "eager": eager,
    "torpor": torpor_virtual,
    "torpor-concrete": torpor_concrete,
    "torch-lazy": torch_lazy,
}
