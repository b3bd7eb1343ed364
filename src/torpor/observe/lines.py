"""The user's lines behind the nodes of one run.

A node is shared by every line that records the same op. What may fail when it runs keeps the line
that recorded it last, and a run the lines as they were when it was submitted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from torpor.ir.node import Node


class _Run(threading.local):
    """What the graph that this thread is running was recorded by."""

    def __init__(self) -> None:
        self.lines: dict[Node, Any] = {}


_run = _Run()


@contextmanager
def recorded_by(lines: Iterable[tuple[Node, Any]]) -> Iterator[None]:
    """Run the body as the run of a graph whose nodes were recorded by `lines`."""
    before, _run.lines = _run.lines, dict(lines)
    try:
        yield
    finally:
        _run.lines = before


def line_of(node: Node) -> str | None:
    """The line that recorded `node` for this run."""
    site = _run.lines.get(node, node.site)
    return None if site is None else str(site)
