"""The registry of models that must train lazily exactly as they do eagerly."""

from __future__ import annotations

from .architectures import ARCHITECTURES
from .entry import Entry
from .networks import NETWORKS

ZOO: dict[str, Entry] = {entry.name: entry for entry in (*ARCHITECTURES, *NETWORKS)}
PRODUCTIVE: tuple[tuple[str, str], ...] = tuple(
    (entry.name, strategy)
    for entry in ZOO.values()
    for strategy in (entry.strategies or (("produce",) if entry.produce else ()))
)
