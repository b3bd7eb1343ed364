"""Hooks of a module that say so when they are called: into `said`, as its `forward` does."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

LOUD_HOOKS: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "nothing": (lambda m: None, ["forward"]),
    "forward hook": (
        lambda m: m.register_forward_hook(lambda *_: m.said.append("after")),
        ["forward", "after"],
    ),
    "forward pre-hook": (
        lambda m: m.register_forward_pre_hook(lambda *_: m.said.append("before")),
        ["before", "forward"],
    ),
    "backward hook": (
        lambda m: m.register_full_backward_hook(lambda *_: m.said.append("backward")),
        ["forward", "backward"],
    ),
    "backward pre-hook": (
        lambda m: m.register_full_backward_pre_hook(lambda *_: m.said.append("backward")),
        ["forward", "backward"],
    ),
}
"""What is done to a module, and what is said when it is called and differentiated."""
