"""Ranks agree on their collectives before they run them.

What has to agree is, for each process group, the sequence of its collectives: op, types, root and
reduction of each. How it is cut into graphs need not, nor what else ranks compute. The first rank
of a group posts its sequence to the group's store, graph by graph; the others compare theirs with
it. A graph whose collectives are new to the poster runs when all have compared its first ones. For
one that is known nobody waits: its digest is posted and compared some time later, and at the latest
by a rank that waits in a collective for others.

A rank that finds a difference, or is interrupted, or has waited too long, says so in the store, and
every rank that looks there raises the same error.
"""

from __future__ import annotations

import functools
import hashlib
import json
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from torpor import _torch, config
from torpor.distributed import ops
from torpor.errors import DivergenceError, RankError, TorporError, TorporWarning
from torpor.ir.node import Node
from torpor.ir.types import SymbolicType
from torpor.observe.traffic import totals

Entry = tuple[str, str]
"""A collective as ranks compare it, and the user's line."""

LOOK = 0.2
"""Seconds between two looks at the store while all goes well."""
_POLL: Final = 0.005
_KEPT: Final = 32
"""Entries that were compared and are kept, to be shown with a difference."""


def entry_of(node: Node) -> Entry:
    """What ranks compare of a collective: not what differs between them by right."""
    inputs, _, _, *arguments = node.args
    types = ", ".join(f"{_dtype(v.type)}{list(v.type.concrete.shape)}" for v in inputs)
    if node.op.target is ops.AllToAll.target:  # each rank has splits of its own
        types, arguments = _dtype(inputs[0].type), []
    return f"{node.op.target._opname}({', '.join((types, *map(str, arguments)))})", str(node.site)


def _dtype(type_: Any) -> str:
    return str(type_.dtype).removeprefix("torch.")


def entries_of(nodes: tuple[Node, ...]) -> dict[str, list[Entry]]:
    """What the ranks of each group compare of these collectives."""
    has_symbols = any(type(v.type) is SymbolicType for node in nodes for v in node.args[0])
    return _entries_of(nodes) if has_symbols else _known_entries_of(nodes)


def _entries_of(nodes: tuple[Node, ...]) -> dict[str, list[Entry]]:
    by_group: dict[str, list[Entry]] = {}
    for node in nodes:
        if node.op.target not in ops.PEER_TO_PEER:
            by_group.setdefault(node.args[2], []).append(entry_of(node))
    return by_group


_known_entries_of = functools.lru_cache(maxsize=256)(_entries_of)  # of graphs that come back


def digest_of(entries: Sequence[Entry]) -> str:
    """A name for a sequence of collectives."""
    texts = "\n".join([text for text, _ in entries])
    return hashlib.blake2b(texts.encode(), digest_size=12).hexdigest()


def text_of(entries: Sequence[Entry]) -> str:
    """A sequence of collectives, for the store."""
    return json.dumps(list(entries))


def divergence(place: int, *ranks: tuple[int, Entry]) -> str:
    """What is said of ranks whose collectives differ, from this one of their group on."""
    lines = [
        f"  rank {rank}:  {text}\n           recorded at: {line}" for rank, (text, line) in ranks
    ]
    head = f"ranks differ at collective {place} of their group"
    fix = "  fix:     let every rank call the same collectives, of the same sizes and order"
    return "\n".join([head, *lines, fix])


class CollectiveStream:
    """The sequence of collectives of one group, as this rank runs it and as the first rank does."""

    def __init__(self, store: Any, rank: int, size: int) -> None:
        self.store, self.rank, self.size = store, rank, size
        self.mine: list[Entry] = []
        self.theirs: list[Entry] = []  # those of the first rank
        self.base = 0  # entries that were compared and forgotten
        self.posts = 0  # posted, or read
        self.waiting: list[tuple[int, int]] = []  # posts to acknowledge, and where they begin
        self.unposted: list[str] = []  # digests
        self.known: set[str] = set()  # digests of what this rank has run
        self.texts: dict[str, list[Entry]] = {}  # of the first rank
        self.looked = 0.0
        self.traffic: str | None = None  # the group whose traffic the others may see
        self.graphs: dict[str, dict[Any, int]] = {}  # with the same collectives, in order
        self.switches: dict[str, Any] = {}  # of graphs that wait to be run compiled
        self.broken: TorporError | None = None

    # -- before a graph runs -----------------------------------------------------------------------

    def enter(self, entries: Sequence[Entry]) -> None:
        """This rank is about to run these collectives."""
        if self.broken is not None:
            raise self.broken
        digest = digest_of(entries)
        is_new, start = digest not in self.known, self.base + len(self.mine)
        self.known.add(digest)
        self.mine += entries
        if self.rank == 0:
            self.unposted.append(digest)
        if is_new:
            self._agree(start, digest, entries)
        elif time.monotonic() - self.looked > LOOK:
            self.look()

    def _agree(self, start: int, digest: str, entries: Sequence[Entry]) -> None:
        """Wait until all ranks are there, and have compared."""
        if self.rank == 0:
            self.store.set(f"text/{digest}", text_of(entries))
            self._post(start)
            self._until(lambda: self.store.check([f"ok/{self.posts - 1}"]), start)
            return
        self._until(lambda: self.base + len(self.theirs) > start, start)
        last = self.posts - 1
        if self.store.check([f"awaited/{last}"]):
            self._until(lambda: self.store.check([f"ok/{last}"]), start)

    def _until(self, is_so: Any, start: int) -> None:
        deadline = time.monotonic() + config.agreement_timeout
        while not is_so():
            self.look()
            if is_so():
                return
            if time.monotonic() > deadline:
                self.give_up(self.mine[max(0, start - self.base)])
            time.sleep(_POLL)

    # -- what the store is asked and told ----------------------------------------------------------

    def look(self) -> None:
        """Post what is not posted, read and compare what is; raise what a rank has to say."""
        self.looked = time.monotonic()
        with self.asking():
            if self.rank == 0:
                if self.unposted:
                    self._post(None)
            else:
                while self.store.check([f"post/{self.posts}"]):
                    self._read()
                self._compare()
            if self.traffic is not None:
                self.store.set(f"traffic/{self.rank}", json.dumps(totals(self.traffic)))
            reported = self.store.get("broken") if self.store.check(["broken"]) else None
        if reported is not None:
            kind, text = json.loads(reported)
            self._break(DivergenceError(text) if kind == "DivergenceError" else RankError(text))

    @contextmanager
    def asking(self) -> Iterator[None]:
        """The body asks the store; the process that has it may be gone."""
        try:
            yield
        except TorporError:
            raise
        except Exception as error:
            self._break(RankError(f"the store of the process group does not answer: {error}"))

    def _post(self, awaited: int | None) -> None:
        number, self.posts, digests = self.posts, self.posts + 1, self.unposted
        self.unposted = []
        if awaited is not None:
            self.store.set(f"awaited/{number}", "")
        self.store.set(f"post/{number}", json.dumps([awaited, digests]))
        if number >= _KEPT:
            self.store.delete_key(f"post/{number - _KEPT}")
        self._forget(len(self.mine))  # the first rank compares nothing

    def _read(self) -> None:
        awaited, digests = json.loads(self.store.get(f"post/{self.posts}"))
        for digest in digests:
            if digest not in self.texts:
                reported = json.loads(self.store.get(f"text/{digest}"))
                self.texts[digest] = [(text, line) for text, line in reported]
            self.theirs += self.texts[digest]
        if awaited is not None:
            self.waiting.append((self.posts, awaited))
        self.posts += 1

    def _compare(self) -> None:
        both = min(len(self.mine), len(self.theirs))
        for place in range(both):
            if self.mine[place][0] != self.theirs[place][0]:
                self._differ(place)
        while self.waiting and self.base + len(self.mine) > self.waiting[0][1]:
            self._acknowledge(self.waiting.pop(0)[0])
        self._forget(both)

    def _forget(self, compared: int) -> None:
        done = max(0, compared - _KEPT)
        del self.mine[:done], self.theirs[:done]
        self.base += done

    def _acknowledge(self, number: int) -> None:
        self.store.set(f"ok/{number}/{self.rank}", "")
        if self.store.add(f"count/{number}", 1) == self.size - 1:
            self.store.set(f"ok/{number}", "")

    def traffic_of_ranks(self) -> dict[int, tuple[int, int, float]]:
        """What each rank has said of its traffic: collectives, bytes, seconds of waiting."""
        with self.asking():
            self.store.set(f"traffic/{self.rank}", json.dumps(totals(self.traffic or "")))
            known = [r for r in range(self.size) if self.store.check([f"traffic/{r}"])]
            return {rank: tuple(json.loads(self.store.get(f"traffic/{rank}"))) for rank in known}

    # -- errors ------------------------------------------------------------------------------------

    def _differ(self, place: int) -> None:
        pair = (0, self.theirs[place]), (self.rank, self.mine[place])
        text = divergence(self.base + place, *pair)
        if config.agreement == "warn":
            warnings.warn(text, TorporWarning, stacklevel=2)
            self.mine[place] = self.theirs[place]
        else:
            self.tell(DivergenceError(text))

    def give_up(self, entry: Entry) -> None:
        """Others have not come: say so, to them too if they ever do."""
        names = self._missing()
        self.tell(RankError(
            f"rank {self.rank} waited {config.agreement_timeout:g} s for {names} at {entry[0]}\n"
            f"  recorded at: {entry[1]}\n"
            "  fix:         look for a rank that is gone, asleep, or waits elsewhere; "
            "config.agreement_timeout says how long to wait"
        ))  # fmt: skip

    def _missing(self) -> str:
        """The ranks that have not come to what is waited for, as far as that can be known."""
        if self.rank != 0:
            return "other ranks"
        last = self.posts - 1
        missing = [r for r in range(1, self.size) if not self.store.check([f"ok/{last}/{r}"])]
        return "rank " + ", ".join(map(str, missing)) if missing else "other ranks"

    def tell(self, error: TorporError) -> None:
        """Raise `error`, here and on every rank that looks."""
        try:
            if not self.store.check(["broken"]):
                self.store.set("broken", json.dumps([type(error).__name__, str(error)]))
        except Exception as gone:  # nobody else is there to be told
            error.add_note(f"the store of the process group does not answer: {gone}")
        self._break(error)

    def _break(self, error: TorporError) -> None:
        self.broken = error
        raise error


_streams: dict[str, tuple[Any, CollectiveStream]] = {}


def stream_of(name: str) -> CollectiveStream | None:
    """The stream of the group of that name; None where nobody else is in it."""
    group = _torch.resolve_group(name)
    known = _streams.get(name)
    if known is None or known[0] is not group:
        if group.size() < 2 or config.agreement == "off" or _torch.is_fake_group(group):
            return None
        store = torch.distributed.PrefixStore("torpor", _torch.store_of(group))
        stream = CollectiveStream(store, group.rank(), group.size())
        stream.traffic = name
        known = _streams[name] = group, stream
    return known[1]


def _waited(name: str, since: float) -> None:
    """This rank has waited in a collective of the group since then."""
    stream = stream_of(name)
    if stream is None:
        return
    stream.look()
    if time.monotonic() - since > config.agreement_timeout:
        stream.give_up(stream.mine[-1])


ops.Attend.call = staticmethod(_waited)


@contextmanager
def agreed(nodes: tuple[Node, ...], launches: int) -> Iterator[None]:
    """The body runs a graph with these collectives, in so many launches; all ranks agree on it."""
    by_group = entries_of(nodes)
    if config.bucket_bytes:
        how = f" in buckets of {config.bucket_bytes} bytes"
        by_group = {n: [(f"{e}{how}", line) for e, line in of] for n, of in by_group.items()}
    streams = {name: stream_of(name) for name in by_group}
    before = ops.RUNNING.started
    try:
        for name, stream in streams.items():
            if stream is not None:
                stream.enter(by_group[name])
        yield
        ops.finish()
    except (DivergenceError, RankError):
        ops.forget()
        raise
    except BaseException as error:
        _leave(streams, error)
        raise
    if ops.RUNNING.started - before < launches:
        _leave(streams, RuntimeError("an op of its step failed"))


def leave(nodes: tuple[Node, ...], error: BaseException) -> None:
    """This rank will not run these collectives: others need not wait for them."""
    _leave({name: stream_of(name) for name in entries_of(nodes)}, error)


def _leave(streams: dict[str, CollectiveStream | None], error: BaseException) -> None:
    """This rank does not run its collectives: others need not wait for them."""
    for stream in streams.values():
        if stream is not None and stream.broken is None:
            reason = f"{type(error).__name__}: {error}".partition("\n")[0]
            try:
                stream.tell(RankError(f"rank {stream.rank} has left its step: {reason}"))
            except RankError as reported:
                stream.broken = reported  # for the next step: this one has an error of its own
