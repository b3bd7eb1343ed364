"""Recording: lazy tensors, and how every torch op on them becomes a node.

`dispatch` gets an op from torch, `recorder` makes it a node, `values` and `wrap` convert between
tensors and values. Other hooks into torch are in `frontend`, special recorders in `overrides`. All
packages outside the engine may import it; `ir`, `ops`, `backend`, `execute` and backends may not.
"""

from torpor.trace.tensor import LazyTensor, is_lazy

__all__ = ["LazyTensor", "is_lazy"]
