"""Every error a torpor user can meet.

    TorporError                     base of all of torpor's own errors
    ├── GraphError                  a graph that breaks the rules of the IR (verifier, parser)
    ├── BackendError                a backend misbehaved: unknown, unavailable, wrong results
    │   └── CompileError            a backend could not compile a graph
    ├── RegistrationError           an op of somebody's own that was told of in a way that cannot be
    ├── NativeError                 the native recorder cannot be built or used
    ├── UnsupportedError            a thing a lazy tensor cannot do, with what to do instead
    ├── StepError                   a graph failed while running and eager has no type of its own
    ├── DivergenceError             ranks are about to run different collectives
    ├── RankError                   a rank is gone, late, or has left its step
    ├── RecompileError              a graph would be compiled again; config.on_recompile forbids
    ├── HiddenSync                  a tensor was read inside torpor.no_sync()
    ├── RecordFileError             a record file is damaged, foreign or hostile
    └── DifferenceError             a backend computed other numbers than the reference

    TorporWarning                   the program goes on, slower than it should
    └── PerformanceWarning          a part of it runs eagerly, for that is faster

An operation that eager PyTorch refuses is refused with eager's own exception type: `annotate` adds
the recorded line and the graph line to that exception and leaves its type alone.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class TorporError(RuntimeError):
    """Base of all errors that only torpor raises."""


class GraphError(TorporError):
    """A graph breaks a rule of the IR; the message names the node."""


class BackendError(TorporError):
    """A backend is unknown, unavailable or returned something it must not."""


class CompileError(BackendError):
    """A backend could not compile a graph."""

    failure: object = None  # the graph, or the piece of it, that shows it alone


class RegistrationError(TorporError):
    """What was told of an op of somebody's own is missing, twice there, or not true."""

    node: object = None  # the node that shows it, where a graph does


class NativeError(TorporError):
    """The native recorder cannot be built or used; the message says why."""


class UnsupportedError(TorporError):
    """A lazy tensor cannot do this; the message says what can be done instead."""


class StepError(TorporError):
    """A recorded graph failed while running."""


class DivergenceError(TorporError):
    """Ranks would run different collectives; the message has the lines of both."""


class RankError(TorporError):
    """Another rank is gone, has not come in time, or has left its step."""


class RecordFileError(TorporError):
    """A record file cannot be read: the message says what is wrong, and where in the file."""


class DifferenceError(TorporError):
    """A backend's numbers differ from the reference's; the message names the first node."""

    _torpor_annotated = _torpor_run = True  # it says itself which node, graph and backend it means


class RecompileError(TorporError):
    """A graph would be compiled at a line that had one compiled before; the message says why."""


class HiddenSync(TorporError):
    """A program waits for numbers inside `torpor.no_sync()`; the message names the line."""


class TorporWarning(UserWarning):
    """The program goes on, but not the way it was asked to."""


class PerformanceWarning(TorporWarning):
    """A part of the program runs eagerly, for recording it takes longer; the message says why."""


def annotate(
    error: BaseException, op: str, site: str | None = None, graph_line: str | None = None
) -> BaseException:
    """Add where an op was recorded to `error`, keeping its type; a second time changes nothing."""
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
    """Add which graph ran on which backend to `error`; a second time changes nothing."""
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
    """The known name that is nearest to an unknown one, as the end of a message; "" if none is."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {prefix + close[0]!r}?" if close else ""
