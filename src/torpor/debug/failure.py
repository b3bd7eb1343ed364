"""Saves standalone programs that reproduce compile failures, one file per failure.

They are saved in `config.failures_dir`, up to a limit; `failure_program` describes their contents.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from pathlib import Path
from typing import Final

from torpor import config
from torpor.backend.failures import CompileFailure
from torpor.cache.store import check_directory, default_directory, place
from torpor.debug.failure_program import program_of, reason_of
from torpor.ir.graph import Graph
from torpor.passes.interpreter import graph_at
from torpor.text.printer import print_graph

MAX_KEPT: Final = 200
MAX_BYTES: Final = 256 << 20
"""The most programs to keep, and their total size; the oldest are removed first."""

_OURS: Final = re.compile(r"torpor-[\w.-]+-[0-9a-f]{16}\.py")
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+", re.IGNORECASE)


def write(failure: CompileFailure) -> Path:
    """Write a program that reproduces `failure`; equal failures share a file."""
    graph = failure.graph
    graph = graph_at(graph, failure.sizes) if graph.symbols else graph
    where = directory()
    path = where / _name(failure, graph)
    with contextlib.suppress(FileExistsError):
        os.makedirs(where, mode=0o700)
    check_directory(where)
    place(path, program_of(failure, graph).encode(errors="backslashreplace"))
    _trim(where)
    return path


def directory() -> Path:
    """The current directory for such programs."""
    if config.failures_dir:
        return Path(config.failures_dir).expanduser().absolute()
    return default_directory().with_name("torpor-failures")


def _name(failure: CompileFailure, graph: Graph) -> str:
    backend = failure.backend
    identity = repr((backend.name, backend.options, reason_of(failure.reason), print_graph(graph)))
    identity = _ADDRESS.sub("0x", identity)  # addresses are arbitrary
    digest = hashlib.sha256(identity.encode(errors="backslashreplace")).hexdigest()
    named = re.sub(r"[^\w.-]", "_", backend.name)[:60]
    return f"torpor-{named}-{digest[:16]}.py"


def _trim(where: Path) -> None:
    """Remove the oldest programs, if there are too many; never the newest."""
    found = []
    for path in where.iterdir():
        if _OURS.fullmatch(path.name):
            with contextlib.suppress(FileNotFoundError):  # another process has removed it
                facts = path.stat()
                found.append((facts.st_mtime_ns, facts.st_size, path))
    total = 0
    for newer, (_, nbytes, path) in enumerate(sorted(found, reverse=True)):
        total += nbytes
        if newer >= MAX_KEPT or (newer and total > MAX_BYTES):
            path.unlink(missing_ok=True)
