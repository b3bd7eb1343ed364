"""torpor: PyTorch's lazy tensor system, in Python.

It runs PyTorch programs unchanged: operations are traced into a graph, the graph is handed to a
compiler backend, and compiled graphs are cached and reused from step to step.
"""

from __future__ import annotations

import atexit as _atexit
import sys as _sys
from typing import TYPE_CHECKING as _TYPE_CHECKING

from torpor import backend, config, errors, ir, metrics, ops
from torpor.backend import failures as _failures
from torpor.backend.registry import use
from torpor.backends import builtin as _builtin  # noqa: F401  # registers the backends
from torpor.frontend import install as _install  # noqa: F401  # the device, kernels, hooks
from torpor.frontend.api import (
    graph,
    is_pending,
    manual_seed,
    mark_dynamic,
    memory,
    no_sync,
    pad,
    seed_state,
    sync,
    using,
    wait,
)
from torpor.frontend.enable import disable, enable
from torpor.frontend.mode import eager, lazy, mode
from torpor.trace.tensor import is_lazy
from torpor.transactions.closures import at_step_end

if _TYPE_CHECKING:
    import os as _os
    from collections.abc import Collection as _Collection
    from pathlib import Path as _Path
    from typing import Any as _Any

    from torpor.backends import CallablePackage as _CallablePackage
    from torpor.debug.check import Check
    from torpor.debug.explain import Explanation
    from torpor.debug.record import RecordingSession
    from torpor.debug.replay import Replay

backends: _CallablePackage  # the package, imported above; type checkers know no callable modules

__version__ = "0.1.0"

__all__ = [
    "at_step_end",
    "backend",
    "backends",
    "check",
    "config",
    "disable",
    "eager",
    "enable",
    "errors",
    "explain",
    "graph",
    "ir",
    "is_lazy",
    "is_pending",
    "lazy",
    "manual_seed",
    "mark_dynamic",
    "memory",
    "metrics",
    "mode",
    "no_sync",
    "ops",
    "pad",
    "record",
    "replay",
    "seed_state",
    "sync",
    "use",
    "using",
    "wait",
]


def record(
    path: str | _os.PathLike[str],
    data: bool = True,
    results: bool = False,
    max_bytes: int = 8 << 30,
) -> RecordingSession:
    """Write every graph that runs inside a `with` block to one file, to be replayed anywhere.

    `data=False` stores statistics of tensors instead of their contents; `results=True` stores the
    results too, not only their checksums. Recording ends before the file exceeds `max_bytes`.
    Without a `with` block, call `start()` and `stop()` of the returned object. Each of several
    ranks writes its own file: `path` followed by `.rank0` and so on.
    """
    from torpor.debug.record import RecordingSession

    return RecordingSession(path, data, results, max_bytes)


def replay(
    path: str | _os.PathLike[str],
    backend: str | None = None,
    graph: int | None = None,
    data: bool = True,
    allow: _Collection[str] = (),
    trust: bool = False,
) -> Replay:
    """Run every graph of a record file (or the one that ran `graph`-th) and compare the results.

    `backend` is a name, or `package.module:factory`; by default, the one that was recorded. With
    `data=False`, and for a file without data, leaves get random numbers with the same statistics,
    and results are compared with the reference backend's. Ops of other namespaces than torch's own
    run only if `allow` names them; torch's own ops that do not validate all their arguments run
    only with `trust`, which is for your own files.
    """
    from torpor.debug.load import open_record
    from torpor.debug.replay import chosen, replay_record

    with open_record(path, allow, trust) as record:
        return replay_record(record, backend, chosen(record, graph), data)


def check(backend: str | None = None, on_difference: str = "raise", **options: _Any) -> Check:
    """Run every graph of a `with` block on the reference backend too, and compare the results.

    `backend` (made with `options`) is used inside; by default, the active one. A `DifferenceError`
    names the first node that differs, when its result is read; with `on_difference="warn"`, a
    warning at the end of the block does.
    """
    from torpor.debug.check import Check

    return Check(backend, on_difference, **options)


def explain() -> Explanation:
    """Why graphs were compiled, where the program waited, and what to change; most costly first.

    Print the result, or use its fields: `findings`, `graphs`, `balance`; `to_json()` has all.
    """
    from torpor.debug.explain import explain as answer

    return answer()


def _write_failure(failure: _failures.CompileFailure) -> _Path:
    from torpor.debug.failure import write

    return write(failure)


_failures.on_failure(_write_failure)


def _explain_at_exit() -> None:
    if config.explain:
        print(explain(), file=_sys.stderr)  # noqa: T201  # what was asked for


_atexit.register(_explain_at_exit)


def _view_from_the_start() -> None:
    if config.view:
        from torpor.debug.view.live import start

        start()


_view_from_the_start()
