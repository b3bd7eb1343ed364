"""Compiled graphs on disk: which entry is a graph's, and what a backend makes of it.

An entry belongs to a graph, told in text that does not depend on the process, to the buffers it may
write over, and to all that the backend says changes its code (`Backend.cache_key`). A graph is not
kept if the backend keeps none, if it holds ops of others, whose meaning may change from process to
process, or if inputs carry data of their own.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from torpor import metrics
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.errors import CompileError, RegistrationError
from torpor.execute.compilation import for_backend
from torpor.execute.persistent import Store, key_of, store, tell_once
from torpor.ir.canonical import NotCanonical, canonical_text
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF

_FORMAT: Final = "compiled graph 1"
_NAMESPACES: Final = frozenset({"aten", "prims", "quantized", "torpor"})
"""Where ops come from that are the same in every process with the same torch and torpor."""


@dataclass(frozen=True, slots=True)
class DiskPlace:
    """Where a graph is kept, or would be."""

    store: Store
    key: str


def place_of(
    graph: Graph, backend: Backend, device: BackendDevice, donated: Mapping[int, int], told: str
) -> DiskPlace | None:
    """The place of `graph` on disk, given the backend's key; None if it is not to be kept there."""
    where = store()
    if where is None:
        return None
    try:
        graph = for_backend(graph, backend)
        if not _means_the_same_everywhere(graph, backend):
            return None
        text = canonical_text(graph)
    except (NotCanonical, RegistrationError):  # a lowering that is wrong: its compile says so
        return None
    devices = backend.compilation_devices(str(device), [str(device)])
    facts = repr((backend.name, str(device), devices, sorted(donated.items())))
    return DiskPlace(where, key_of(_FORMAT, facts, told, text))


def _means_the_same_everywhere(graph: Graph, backend: Backend) -> bool:
    """It holds no ops of others and no data."""
    if any(node.op.name.partition(".")[0] not in _NAMESPACES for node in graph.nodes):
        return False
    leaves = (value.node for value in graph.inputs if value.node.op is LEAF)
    return all(backend.data_of(node) is None for node in leaves)


def load(place: DiskPlace, restore: Callable[[bytes], Computation]) -> Computation | None:
    """What `restore` makes of the bytes that are kept; None if there are none, or no good ones."""
    saved = place.store.read(place.key)
    if saved is not None:
        try:
            computation = restore(saved)
        except CompileError:
            metrics.count("DiskCacheRefused")
            place.store.remove(place.key)
        else:
            metrics.count("DiskCacheHit")
            return computation
    metrics.count("DiskCacheMiss")
    return None


def keep(place: DiskPlace, computation: Computation, backend: Backend, seconds: float) -> None:
    """Keep a graph that took so many seconds to compile, if the backend can."""
    try:
        saved = backend.dump(computation)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        tell_once(f"backend {backend.name!r} could not keep a compiled graph: {reason}")
        return
    about = {
        "backend": backend.name,
        "nodes": len(computation.graph),
        "compile_seconds": round(seconds, 3),
        "made": round(time.time()),
    }
    if saved is not None and place.store.write(place.key, about, saved):
        metrics.count("DiskCacheWrite")
