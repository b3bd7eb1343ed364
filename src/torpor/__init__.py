"""torpor: PyTorch's lazy tensor system, in Python.

A PyTorch program runs on it unchanged; its operations are recorded as a graph, the graph is handed
to a compiler backend, and compiled graphs are reused step after step.
"""

from __future__ import annotations

from torpor import backend, config, errors, ir, metrics, ops
from torpor.backend import registry as _registry
from torpor.backend.registry import use
from torpor.backends import builtin as _builtin  # noqa: F401  # registers the backends
from torpor.execute.closures import at_step_end
from torpor.trace.api import (
    graph,
    is_pending,
    manual_seed,
    memory,
    seed_state,
    sync,
    using,
    wait,
)
from torpor.trace.mode import disable, eager, enable, lazy, mode
from torpor.trace.tensor import is_lazy

backends = _registry.backends  # after the package of that name has been imported

__version__ = "0.1.0"

__all__ = [
    "at_step_end",
    "backend",
    "backends",
    "config",
    "disable",
    "eager",
    "enable",
    "errors",
    "graph",
    "ir",
    "is_lazy",
    "is_pending",
    "lazy",
    "manual_seed",
    "memory",
    "metrics",
    "mode",
    "ops",
    "seed_state",
    "sync",
    "use",
    "using",
    "wait",
]
