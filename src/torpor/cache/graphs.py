"""Compiled graphs on disk: finding the entry of a graph, and loading it with the backend.

The key of an entry is derived from the graph (as text that does not depend on the process), the
donated buffers, and everything else that affects the backend's code (`Backend.cache_key`). A graph
is not kept if the backend has no cache key, if it has custom ops, whose meaning may differ between
processes, or if its inputs carry their own data.

A graph with symbols may have several entries: its code is valid for some sizes only, and was
compiled again for others. Their keys are derived from the first one; all of them are tried.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, Final

from torpor import metrics
from torpor.backend.device import BackendDevice
from torpor.backend.interface import Backend
from torpor.backend.lowering import Computation
from torpor.cache.store import Store, key_of, store, warn_once
from torpor.compiling.compilation import devices_for, for_backend
from torpor.errors import CompileError, RegistrationError
from torpor.ir.graph import Graph
from torpor.ir.node import LEAF
from torpor.symbols.expressions import Symbol
from torpor.text.canonical import NotCanonical, canonical_text

MOST_KINDS: Final = 7
"""For how many kinds of sizes a graph with symbols is compiled and kept."""

NO_SIZES: Final[Mapping[Symbol, int]] = MappingProxyType({})

_FORMAT: Final = "compiled graph 3"
_NAMESPACES: Final = frozenset({"aten", "prims", "quantized", "torpor"})
"""Namespaces of ops that are the same in every process with the same torch and torpor."""


@dataclass(slots=True)
class DiskPlace:
    """The place of a graph in the store; if it has symbols, for several kinds of sizes."""

    store: Store
    key: str
    symbols: tuple[Symbol, ...] = ()
    used: set[str] = field(default_factory=set)  # keys of entries that this process has loaded

    @property
    def keys(self) -> tuple[str, ...]:
        """The keys of its possible entries."""
        if not self.symbols:
            return (self.key,)
        return (self.key, *(key_of(self.key, str(n)) for n in range(1, MOST_KINDS)))


def place_of(
    graph: Graph,
    backend: Backend,
    device: BackendDevice,
    donated: Mapping[int, int],
    backend_key: str,
) -> DiskPlace | None:
    """The place of `graph` on disk, given the backend's key; None if it must not be kept."""
    where = store()
    if where is None:
        return None
    try:
        graph = for_backend(graph, backend)
        if not means_the_same_everywhere(graph, backend):
            return None
        text = canonical_text(graph)
    except (NotCanonical, RegistrationError):  # a wrong lowering: reported when it is compiled
        return None
    facts = repr(
        (backend.name, str(device), list(devices_for(backend, device)), sorted(donated.items()))
    )
    return DiskPlace(where, key_of(_FORMAT, facts, backend_key, text), graph.symbols)


def means_the_same_everywhere(graph: Graph, backend: Backend) -> bool:
    """Whether it has no custom ops, and no inputs with their own data."""
    if any(node.op.name.partition(".")[0] not in _NAMESPACES for node in graph.nodes):
        return False
    leaves = (value.node for value in graph.inputs if value.node.op is LEAF)
    return all(backend.data_of(node) is None for node in leaves)


def load(
    place: DiskPlace,
    restore: Callable[[bytes], Computation],
    accepts_sizes: Callable[[Computation], bool],
) -> Computation | None:
    """The first entry that `restore` can load and that is accepted; None if there is none."""
    for key in place.keys:
        computation = None if key in place.used else _restored(place, key, restore)
        if computation is not None and accepts_sizes(computation):
            place.used.add(key)
            metrics.count("DiskCacheHit")
            return computation
    metrics.count("DiskCacheMiss")
    return None


def _restored(
    place: DiskPlace, key: str, restore: Callable[[bytes], Computation]
) -> Computation | None:
    saved = place.store.read(key)
    if saved is None:
        return None
    try:
        return restore(saved)
    except CompileError:
        metrics.count("DiskCacheRefused")
        place.store.remove(key)
        return None


def keep(
    place: DiskPlace,
    computation: Computation,
    backend: Backend,
    seconds: float,
    sizes: Mapping[Symbol, int] = NO_SIZES,
) -> None:
    """Keep a graph that took `seconds` to compile, if the backend can dump it.

    `sizes` are those it was compiled for, among others.
    """
    try:
        key = _key_for(place, computation, backend)
        saved = None if key is None else backend.dump(computation)
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        warn_once(f"backend {backend.name!r} could not keep a compiled graph: {reason}")
        return
    about: dict[str, Any] = {}
    if sizes:
        about["sizes"] = [sizes[symbol] for symbol in place.symbols]
    if key is not None and saved is not None:
        keep_bytes(place, key, saved, backend, len(computation.graph), seconds, about)


def keep_bytes(
    place: DiskPlace,
    key: str,
    saved: bytes,
    backend: Backend,
    nodes: int,
    seconds: float,
    about: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Keep the bytes that the backend's `dump` has made of a graph."""
    described: dict[str, Any] = {
        "backend": backend.name,
        "nodes": nodes,
        "compile_seconds": round(seconds, 3),
        "made": round(time.time()),
    }
    if place.store.write(key, described | dict(about), saved):
        place.used.add(key)
        metrics.count("DiskCacheWrite")


def _key_for(place: DiskPlace, computation: Computation, backend: Backend) -> str | None:
    """The first key that is free, or whose entry was compiled for sizes of the same kind.

    Thus processes that compile the same graph at the same time write the same entry. None if the
    maximum number of kinds is reached.
    """
    for key in place.keys:
        there = _sizes_at(place, key)
        if there is None or backend.accepts_sizes(computation, there):
            return key
    return None


def _sizes_at(place: DiskPlace, key: str) -> dict[Symbol, int] | None:
    """The sizes that an entry was compiled for; None if there is no entry, or no sizes in it."""
    sizes = place.store.head(key).get("sizes")
    if not isinstance(sizes, list) or len(sizes) != len(place.symbols):
        return None
    if not all(type(size) is int for size in sizes):
        return None
    return dict(zip(place.symbols, sizes, strict=True))
