"""Recording: lazy tensors, and how every torch op on them becomes a node."""

from torpor.trace.devices import register_device
from torpor.trace.tensor import LazyTensor, is_lazy

register_device()

__all__ = ["LazyTensor", "is_lazy"]
