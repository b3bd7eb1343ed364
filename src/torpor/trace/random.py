"""Random ops: drawn when they are recorded, or recorded for a backend that draws itself.

Two draws are never one node, whatever their arguments: each carries its number in the trace. The
next step counts alike, and so meets the same nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torpor import config
from torpor.backend.registry import get_backend
from torpor.execute.storage import TRACE
from torpor.ir.node import Node
from torpor.ops.spec import OpSpec
from torpor.trace.eager import run_random
from torpor.trace.recorder import CutFirst, as_bound, make_recorder, numbered
from torpor.trace.values import make_node


def random_recorder(spec: OpSpec) -> Callable[..., Any]:
    """The recorder of a random op."""
    made: list[Callable[..., Any]] = []

    def record(*args: Any, **kwargs: Any) -> Any:
        if kwargs.get("device") is not None:
            kwargs["device"] = numbered(kwargs["device"], args[0] if args else None)
        if not get_backend().draws or kwargs.get("generator") is not None:
            return run_random(spec, args, kwargs)
        if not made:
            made.append(make_recorder(spec, also="draw()", draw=TRACE.draw, miss=_miss(spec)))
        return made[0](*args, **kwargs)

    return record


def _miss(spec: OpSpec) -> Callable[[tuple[Any, ...], tuple[Any, ...]], Node]:
    kinds = tuple(a.kind for a in spec.arguments)

    def miss(key: tuple[Any, ...], raw: tuple[Any, ...]) -> Node:
        if TRACE.misses > config.max_trace_nodes:
            raise CutFirst
        *arguments, _ = key
        return make_node(spec, key, list(map(as_bound, kinds, arguments, raw)))

    return miss
