"""Random ops: run when recorded, or recorded for a backend that draws itself.

Two draws must never be interned as one node: each carries its number within the trace. The next
step counts alike, so it hits the same nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor.backend.registry import get_backend
from torpor.ops.signature import Extra
from torpor.ops.spec import OpSpec
from torpor.overrides.eager import run_random
from torpor.trace.recorder import make_recorder, numbered


def random_recorder(spec: OpSpec) -> Callable[..., Any]:
    """The recorder of a random op."""
    made: list[Callable[..., Any]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = numbered(kwargs["device"], args[0] if args else None)
        if not get_backend().draws or kwargs.get("generator") is not None:
            return run_random(spec, args, kwargs)
        if not made:
            made.append(make_recorder(spec, extra=Extra(draw=True)))
        return made[0](*args, **kwargs)

    return record
