"""Ranks take up compiled code at the same run: when all of them have it.

Compiled code may round otherwise than the reference backend; replicas that ran the one here and the
other there would drift apart. So a graph with collectives runs on the reference backend until every
rank has it compiled. What is kept of it in the store, under a name that all ranks give it:

    met, ready      how many ranks have recorded it, and have it compiled
    at              the run at which the last of them had it
    failed          why a rank cannot compile it: no rank takes compiled code up
    key             what the first rank compiles, as the cache on disk names it
    code, code/N    how long that is, its SHA-256, and its parts

A rank that writes before a run is read by all that come to the next one, for they have met in the
collectives of this run; with several groups news takes a run for each.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any, Final

import torch

from torpor.cache.store import key_of
from torpor.distributed.agreement import CollectiveStream, digest_of, entries_of, stream_of
from torpor.ir.node import Node

MOST_BYTES: Final = 64 << 20
"""Of a compiled graph that is offered to other ranks."""
_PART: Final = 1 << 20
"""Bytes of one answer of the store."""


class Switch:
    """A graph of this rank's, and what the other ranks say of theirs."""

    def __init__(self, stream: CollectiveStream, name: str, rounds: int) -> None:
        self.stream = stream
        self.name = name
        self.rounds = rounds  # runs until all ranks know
        self.runs = 0  # until the ranks switched
        self.said_ready = False  # this rank has said that it has it
        self.at: int | None = None  # the run at which all had
        self.failed = ""  # why a rank has not
        self.alone = False  # other ranks run other graphs here

    @property
    def leads(self) -> bool:
        """The other ranks wait for what this one compiles."""
        return self.stream.rank == 0

    @property
    def is_on(self) -> bool:
        """This run, and those to come, are of compiled code."""
        return self.alone or (self.at is not None and self.runs >= self.at + self.rounds)

    def begin_run(self) -> None:
        """The graph is about to be run once more; see what other ranks have said."""
        self.runs += 1
        with self.stream.asking():
            if self.runs == 1:
                self._count("met")
            self.at = self.at if self.at is not None else self._read_number("at")
            self.failed = self.failed or self._read("failed")
            if self.at is None and not self.alone and self.runs > self.rounds:
                self.alone = self._count("met", 0) < self.stream.size

    def tell_ready(self) -> None:
        """This rank has it compiled."""
        self.said_ready = True
        with self.stream.asking():
            if self._count("ready") == self.stream.size:
                self.at = self.runs
                self._set("at", str(self.at))

    def tell_failed(self, reason: str) -> None:
        """This rank cannot compile it."""
        self.failed = f"rank {self.stream.rank} could not compile it: {reason}"
        with self.stream.asking():
            self._set("failed", self.failed)

    # -- compiled code -----------------------------------------------------------------------------

    def announce(self, key: str) -> None:
        """The first rank is about to compile what is kept on disk under `key`."""
        with self.stream.asking():
            self._set("key", key)

    def announced(self) -> str | None:
        """What the first rank compiles; None: it has not come to it yet."""
        with self.stream.asking():
            return self._read("key") or None

    def offer(self, saved: bytes | None) -> None:
        """What the first rank has compiled; None, or too long: every rank compiles it."""
        sent = saved if saved is not None and len(saved) <= MOST_BYTES else b""
        parts = [sent[start : start + _PART] for start in range(0, len(sent), _PART)]
        about = {"parts": len(parts), "sha256": hashlib.sha256(sent).hexdigest()}
        with self.stream.asking():
            for number, part in enumerate(parts):
                self._set(f"code/{number}", part)
            self._set("code", json.dumps(about))

    def has_offer(self) -> bool:
        """The first rank is done."""
        with self.stream.asking():
            return bool(self.stream.store.check([f"{self.name}/code"]))

    def take_offer(self) -> bytes | None:
        """What the first rank has compiled; None if it gives nothing, or it is damaged."""
        with self.stream.asking():
            about = json.loads(self._read("code"))
            numbers = range(min(int(about["parts"]), MOST_BYTES // _PART))
            got = b"".join(self.stream.store.get(f"{self.name}/code/{n}") for n in numbers)
        is_whole = hashlib.sha256(got).hexdigest() == about["sha256"]
        return got if got and is_whole else None

    def forget_offer(self) -> None:
        """All ranks have what they need."""
        name = f"{self.name}/code"
        with self.stream.asking():
            if self.leads and self.stream.store.check([name]):
                for number in range(int(json.loads(self._read("code"))["parts"])):
                    self.stream.store.delete_key(f"{name}/{number}")

    # -- the store ---------------------------------------------------------------------------------

    def _count(self, what: str, amount: int = 1) -> int:
        return int(self.stream.store.add(f"{self.name}/{what}", amount))

    def _set(self, what: str, value: str | bytes) -> None:
        self.stream.store.set(f"{self.name}/{what}", value)

    def _read(self, what: str) -> str:
        name = f"{self.name}/{what}"
        store: Any = self.stream.store
        return str(store.get(name).decode()) if store.check([name]) else ""

    def _read_number(self, what: str) -> int | None:
        text = self._read(what)
        return int(text) if text else None


def scope_of(nodes: tuple[Node, ...]) -> tuple[CollectiveStream, str, int] | None:
    """Which ranks run a graph with these collectives together, and how those tell it.

    The stream of its group, or where there are several that of all ranks; a name for its
    collectives; how many groups there are. None if nobody else is there.
    """
    by_group = entries_of(nodes)
    digest = key_of(*sorted(map(digest_of, by_group.values())))  # groups have names of each rank's
    several = len(by_group) > 1 and torch.distributed.group.WORLD is not None
    names = [torch.distributed.group.WORLD.group_name] if several else list(by_group)  # type: ignore[union-attr]  # not None
    streams = [stream for name in names if (stream := stream_of(name)) is not None]
    return (streams[0], digest, len(by_group)) if streams else None


def switch_of(nodes: tuple[Node, ...], identity: str | None) -> Switch | None:
    """The switch of a graph with these collectives, which this rank tells from others so.

    Ranks have the same name for it if it is their third graph, say, with just these collectives:
    what it computes besides may hold constants of a rank's own.
    """
    scope = scope_of(nodes)
    if scope is None:
        return None
    stream, digest, rounds = scope
    places = stream.graphs.setdefault(digest, {})
    place = places.setdefault(len(places) if identity is None else identity, len(places))
    name = f"graph/{digest}/{place}"
    switch: Switch = stream.switches.setdefault(name, Switch(stream, name, rounds))
    return switch
