"""Graphs that a backend could not compile, and who writes a program that shows it."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from torpor.backend.interface import Backend
from torpor.ir.graph import Graph
from torpor.symbols.expressions import Symbol


@dataclass(frozen=True, slots=True, eq=False)
class CompileFailure:
    """A graph, or a piece of one, that was not compiled."""

    graph: Graph
    backend: Backend
    reason: BaseException  # what the backend, or its compiler, raised
    donated: Mapping[int, int]  # inputs that results may be written over, by position
    sizes: Mapping[Symbol, int]  # of the symbols, when it failed


Write = Callable[[CompileFailure], Path]
"""Writes a program that shows a failure, and says where it is."""

_writers: list[Write] = []


def on_failure(write: Write) -> None:
    """Let `write` write down what cannot be compiled."""
    _writers.append(write)


def reproduction(failure: CompileFailure) -> str:
    """Have `failure` written down; the line of a message that says where, or why it is nowhere."""
    try:
        paths = [write(failure) for write in _writers]
    except Exception as error:
        what = f"{type(error).__name__}: {error}".strip()
        return f"  reproduce:   no program could be written: {what}"
    return "\n".join(f"  reproduce:   python {shlex.quote(str(path))}" for path in paths)
