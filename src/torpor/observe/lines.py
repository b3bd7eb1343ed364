"""The user's lines of the nodes in one run.

A node is shared by all lines that record the same op. Nodes that may fail when run keep the line
that recorded them last; a run takes a snapshot of those lines when it is submitted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torpor.ir.node import Node


class _Run(threading.local):
    """The lines of the nodes in the graph that this thread is running."""

    def __init__(self) -> None:
        self.lines: dict[Node, Any] = {}


_run = _Run()


@contextmanager
def recorded_by(lines: Iterable[tuple[Node, Any]]) -> Iterator[None]:
    """Set the lines of the nodes for a run in the body."""
    before, _run.lines = _run.lines, dict(lines)
    try:
        yield
    finally:
        _run.lines = before


def line_of(node: Node) -> str | None:
    """The line that recorded `node` for the current run."""
    site = _run.lines.get(node, node.site)
    return None if site is None else str(site)
