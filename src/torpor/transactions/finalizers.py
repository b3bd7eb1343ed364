"""Garbage collections, in which finalizers may use lazy tensors that are garbage themselves.

Python clears the weak references to all garbage before it runs the first finalizer. A storage that
is garbage would leave the trace then, and keep a value of that trace when another one has begun.
"""

from __future__ import annotations

import functools
import gc
import operator
from typing import Any

from torpor.execute.storage import TRACE


class _Held:
    """Keeps every storage of the trace from being garbage until the collection is over.

    A collection sets `start`, then `stop`. No Python code runs at its end: a signal that arrived in
    it would be handled there, and what its handler raises is lost.
    """

    stop: Any

    def _hold(
        self, info: Any, pending: Any = TRACE.pending, dereference: Any = operator.call
    ) -> None:  # defaults: globals are gone when Python ends
        self.stop = list(map(dereference, list(pending)))  # one step for other threads

    start = property(None, _hold)


gc.callbacks.append(functools.partial(setattr, _Held()))
