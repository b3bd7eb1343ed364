"""All errors and warnings that torpor raises.

    TorporError                     base of all of torpor's own errors
    ├── GraphError                  a graph that breaks the rules of the IR (verifier, parser)
    ├── BackendError                a backend misbehaved: unknown, unavailable, wrong results
    │   └── CompileError            a backend could not compile a graph
    ├── RegistrationError           a custom op's registration is incomplete, duplicate or wrong
    ├── NativeError                 the native recorder cannot be built or used
    ├── UnsupportedError            a lazy tensor does not support this; says what to do instead
    ├── StepError                   a graph failed while running, and eager has no error type for it
    ├── DivergenceError             ranks are about to run different collectives
    ├── RankError                   a rank is gone, late, or has left its step
    ├── RecompileError              a graph would be recompiled, which config.on_recompile forbids
    ├── HiddenSync                  a tensor was read inside torpor.no_sync()
    ├── RecordFileError             a record file is damaged, foreign or hostile
    └── DifferenceError             a backend computed other numbers than the reference backend

    TorporWarning                   the program goes on, but slower, or not as requested
    └── PerformanceWarning          a part of it runs eagerly, because recording is slower

An operation that eager PyTorch rejects raises the same exception type in torpor: `annotate` adds
the recorded line and the graph line to the exception, and leaves its type alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TorporError(RuntimeError):
    """Base of all errors that only torpor raises."""


class GraphError(TorporError):
    """A graph breaks a rule of the IR; the message names the node."""


class BackendError(TorporError):
    """A backend is unknown, unavailable or returned something invalid."""


class CompileError(BackendError):
    """A backend could not compile a graph."""

    failure: object = None  # the graph, or the part of it, that reproduces the error


class RegistrationError(TorporError):
    """The registration of a custom op is incomplete, duplicate or wrong."""

    node: object = None  # the node for which that was detected, if there is one


class NativeError(TorporError):
    """The native recorder cannot be built or used; the message says why."""


class UnsupportedError(TorporError):
    """A lazy tensor does not support this; the message says what to do instead."""


class StepError(TorporError):
    """A recorded graph failed while running."""


class DivergenceError(TorporError):
    """Ranks would run different collectives; the message has the source lines of both."""


class RankError(TorporError):
    """Another rank has died, timed out, or left its step."""


class RecordFileError(TorporError):
    """A record file cannot be read: the message says what is wrong, and where in the file."""


class DifferenceError(TorporError):
    """A backend's numbers differ from the reference backend's; the message names the first node."""

    _torpor_annotated = _torpor_run = True  # the message names the node, graph and backend itself


class RecompileError(TorporError):
    """A graph would be compiled at a line where one was compiled before; the message says why."""


class HiddenSync(TorporError):
    """The program waits for a result inside `torpor.no_sync()`; the message names the line."""


class TorporWarning(UserWarning):
    """The program goes on, but slower than it should, or not as requested."""


class PerformanceWarning(TorporWarning):
    """A part of the program runs eagerly, because recording it is slower; the message says why."""


def annotate(
    error: BaseException, op: str, site: str | None = None, graph_line: str | None = None
) -> BaseException:
    """Add where an op was recorded to `error`, keeping its type; idempotent."""
    if getattr(error, "_torpor_annotated", False):
        return error
    lines = [f"[{op}] {error.args[0] if error.args else type(error).__name__}"]
    if site:
        lines.append(f"  recorded at: {site}")
    if graph_line:
        lines.append(f"  in graph:    {graph_line}")
    error.args = ("\n".join(lines), *error.args[1:])
    error._torpor_annotated = True  # type: ignore[attr-defined]  # a mark on a foreign exception
    return error


def annotate_run(error: BaseException, graph: str, backend: str, site: str | None) -> BaseException:
    """Add to `error` which graph ran on which backend; idempotent."""
    if getattr(error, "_torpor_run", False):
        return error
    lines = [str(error.args[0]) if error.args else type(error).__name__]
    if site and not getattr(error, "_torpor_annotated", False):
        lines.append(f"  recorded at: {site}")
    lines.append(f"  running:     {graph} on backend {backend!r}")
    error.args = ("\n".join(lines), *error.args[1:])
    error._torpor_annotated = error._torpor_run = True  # type: ignore[attr-defined]  # as above
    return error


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """The end of a message that suggests the known name most similar to `name`; "" if none is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix + close[0]!r}?" if close else ""
