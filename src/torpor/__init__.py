"""torpor: PyTorch's lazy tensor system, in Python."""

from __future__ import annotations

from torpor import backend, config, errors, ir, metrics
from torpor.backend.registry import backends, register, use
from torpor.backends import builtin as _builtin
from torpor.trace import is_lazy
from torpor.trace.api import sync, wait, is_pending

__version__ = "0.1.0"
