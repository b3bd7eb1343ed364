"""Failures to compile a graph, and the hook that writes a program to reproduce them."""

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
    """A graph, or a part of one, that could not be compiled."""

    graph: Graph
    backend: Backend
    reason: BaseException  # raised by the backend or its compiler
    donated: Mapping[int, int]  # positions of donated inputs and of the outputs that reuse them
    sizes: Mapping[Symbol, int]  # values of the symbols at that time


Write = Callable[[CompileFailure], Path]
"""Writes a program that reproduces a failure, and returns its path."""

_writers: list[Write] = []


def on_failure(write: Write) -> None:
    """Call `write` for every graph that cannot be compiled."""
    _writers.append(write)


def reproduction(failure: CompileFailure) -> str:
    """Write a reproduction of `failure`; the message line that says where, or why there is none."""
    try:
        paths = [write(failure) for write in _writers]
    except Exception as error:
        what = f"{type(error).__name__}: {error}".strip()
        return f"  reproduce:   no program could be written: {what}"
    return "\n".join(f"  reproduce:   python {shlex.quote(str(path))}" for path in paths)
