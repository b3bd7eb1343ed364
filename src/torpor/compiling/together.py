"""Graphs with collectives: compiled while ranks interpret them, adopted by all at the same run."""

from __future__ import annotations

import warnings
from typing import Any

from torpor import config, metrics
from torpor.cache.graphs import keep_bytes
from torpor.cache.store import key_of
from torpor.compiling.compilation import depth_of_user
from torpor.compiling.draft import Draft
from torpor.distributed.ops import collectives_in
from torpor.distributed.switch import Switch, scope_of, switch_of
from torpor.errors import CompileError, TorporWarning
from torpor.execute.plan import Plan
from torpor.ir.graph import Graph
from torpor.symbols.expressions import Symbol
from torpor.text.canonical import NotCanonical, canonical_text


class TogetherDraft(Draft):
    """A graph that several ranks run together.

    The first rank of the group compiles it. The others use its result if theirs would be the same,
    from disk or from the group's store, and otherwise compile it themselves. No rank waits: all run
    it on the reference backend until every rank has a compiled one.
    """

    __slots__ = ("_compiles", "_ready", "_switch")

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.together = False  # ranks need not compile it at the same run
        self._switch: Switch | None = None
        self._ready: Plan | None = None
        self._compiles = False  # this rank compiles it, whatever others do

    @property
    def switch(self) -> Switch:
        """The state of the other ranks."""
        if self._switch is None:
            self._look()
            self._switch = switch_of(tuple(collectives_in(self.graph)), self._identity())
            assert self._switch is not None, "there are other ranks"
        return self._switch

    def _identity(self) -> str | None:
        """A name that the same graph has again after it was dropped; None if it has none."""
        try:
            return key_of(self.backend.name, canonical_text(self.graph))
        except NotCanonical:
            return None

    @property
    def _key(self) -> str | None:
        return None if self.place is None else self.place.key

    def first_plan(self, sizes: dict[Symbol, int]) -> Plan:
        return self.compiled(sizes)

    def is_due(self) -> bool:
        """Always: the answer needs other ranks, which must not be asked under the trace's lock."""
        return True

    def compiled(self, sizes: dict[Symbol, int]) -> Plan:
        """The compiled plan if all ranks have theirs; until then the interpreted one."""
        switch = self.switch
        switch.begin_run()
        self.left -= 1
        if switch.failed:
            return self._given_up(switch.failed)
        if self._ready is None:
            plan = self._obtained(switch, sizes)
            if plan is None or plan is self.interpreter:
                return plan or self.interpreted()
            self._ready = plan
            if not switch.said_ready:
                switch.tell_ready()
        if not switch.is_on:
            return self.interpreted()
        switch.forget_offer()
        return self._ready

    def _obtained(self, switch: Switch, sizes: dict[Symbol, int]) -> Plan | None:
        """The compiled plan if it exists; otherwise takes the next step towards it."""
        if switch.is_on and not switch.alone:  # this rank has dropped it, but the others run it
            return self.loaded(sizes) or self._plan_of(self._compile_here)
        if self.job is not None:
            return self._made(switch, sizes) if self.job.is_over() else None
        if self.left >= 0:
            return None
        if self._compiles or switch.alone:
            return self._made(switch, sizes)
        if switch.leads:
            switch.announce(self._key or "nothing")
            self._compiles = True
            return self._made(switch, sizes)
        announced = switch.announced()
        if announced == self._key and not switch.has_offer():
            return None
        self._compiles = announced is not None
        return self._taken(switch, sizes) if announced == self._key else None

    def _made(self, switch: Switch, sizes: dict[Symbol, int]) -> Plan | None:
        """Load it from disk, or compile it here or in the background; the others are notified."""
        plan = super().compiled(sizes)
        if plan is self.interpreter:
            return plan
        if switch.leads and self.place is not None:
            switch.offer(self.place.store.read(self.place.key))
        if plan.source is None:
            switch.tell_failed(self.record.failure)
            return None
        return plan

    def _taken(self, switch: Switch, sizes: dict[Symbol, int]) -> Plan | None:
        """Use what the first rank has compiled, with the checks for a disk cache entry."""
        found = self.loaded(sizes)
        saved = switch.take_offer() if found is None else None
        if saved is None:
            return found
        try:
            computation = self._compile(saved)
        except CompileError:
            metrics.count("OfferRefused")
            return None
        assert self.place is not None, "it has a key"
        keep_bytes(self.place, self.place.key, saved, self.backend, self.record.size, 0.0)
        metrics.count("OfferTaken")
        self.record.was_loaded()
        return self._plan(computation)

    def _given_up(self, why: str) -> Plan:
        """A rank cannot compile it, so all ranks go on interpreting it."""
        if not self.record.failure:
            self.record.failure = why
            text = f"{self.record.name} runs on the reference backend on all ranks: {why}"
            warnings.warn(text, TorporWarning, stacklevel=depth_of_user())
        plan = self.interpreted()
        plan.draft = None
        return plan


def draft_of(graph: Graph, *args: Any) -> Draft:
    """A draft of `graph`, which coordinates with other ranks if that is needed."""
    draft = Draft(graph, *args)
    waits = draft.left > 0 or config.compile_async
    if not (draft.together and waits) or graph.symbols:
        return draft
    scope = scope_of(tuple(collectives_in(graph)))
    return draft if scope is None else TogetherDraft(graph, *args)
