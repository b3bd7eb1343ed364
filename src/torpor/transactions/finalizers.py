"""Garbage collections, in which finalizers may use lazy tensors that are garbage themselves.

Python clears the weak references to all garbage before it runs the first finalizer. A storage that
is garbage would leave the trace then, and keep a value of that trace when another one has begun.
"""

from __future__ import annotations

import gc
import operator
from collections.abc import Callable
from typing import Any

from torpor.execute.storage import TRACE, LazyStorage


def _holder() -> Callable[[str, Any], None]:
    """Keeps every storage of the trace from being garbage until the collection is over."""
    held: list[LazyStorage | None] = []
    pending, dereference = TRACE.pending, operator.call  # globals are gone when Python ends

    def hold(phase: str, info: Any) -> None:
        held[:] = map(dereference, list(pending)) if phase == "start" else ()

    return hold


gc.callbacks.append(_holder())
