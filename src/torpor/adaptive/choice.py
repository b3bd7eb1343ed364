"""Recorded or eager: the choice for one place in a program, made by measuring both.

This is arithmetic alone: no tensors, no clock. A program is a sequence of events (a call of a model
begins, an optimizer's step ends); between two events lies an interval, whose kind is the pair. Both
ways go through the same intervals, so the time that eager takes for each kind tells what eager
would have taken for a stretch that was recorded.

    EAGER      eager's times are measured, then it runs so until an attempt is due
    WARMING    recorded: until graphs come back compiled; ends when it has cost too much
    TIMED      recorded: a window of steps is timed, the device's queue empty before and after
    RECORDED   recorded: it has won; now and then it is timed again

A place starts in EAGER. After TIMED it goes to EAGER for a few steps, and to the faster of the two.
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import median
from typing import Final, NamedTuple

EAGER: Final = "eager"
WARMING: Final = "warming up"
TIMED: Final = "timed"
RECORDED: Final = "recorded"

_NEW: Final = "graphs of its steps do not come back"
_NOT_COMPILED: Final = "its graphs come back, and are not compiled"

Kind = tuple[int, int]
"""Of an interval: the events that it lies between."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long something is tried, and what it may cost."""

    start: float = (
        10.0  # seconds until the first attempt, which imports modules for a second or two
    )
    skipped: int = 1  # steps after a change that are not measured: caches are cold
    measured: int = 5  # steps by which eager is known
    window: int = 8  # steps of a window
    windows: int = 2  # the best of so many counts
    settled: int = 3  # steps in a row whose graphs came back compiled
    warming: int = 32  # steps at most until graphs come back compiled
    margin: float = 1.02  # recorded wins up to so much of eager's time
    worth_capturing: float = 0.95  # of eager's time, which a captured step is expected to take
    lost: float = 0.2  # seconds that the first attempt may lose, or ...
    lost_steps: int = 20  # ... so many of eager's steps
    share: float = 0.05  # of all time that attempts may lose
    rest: int = 100  # steps until the next attempt, twice as many after each
    check: int = 512  # steps until a winner is timed again, twice as many after each
    tries: int = 8  # steps in a row at which a change is tried that cannot be made
    new_graphs: int = 6  # of a winner, more than come back: it has to warm up again


class ProcessFacts(NamedTuple):
    """What happened since the process began."""

    new_graphs: int
    interpreted: int  # runs of graphs that are not compiled
    compiles: int
    compiling: bool  # in the background, now


class Choice:
    """The way in which a place runs; ask `step` at the end of each step whether to change it."""

    def __init__(self, now: float, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.phase = EAGER
        self.began = now
        self.steps = {True: 0, False: 0}  # by `is_recorded`
        self.here = 0  # steps in this phase
        self.is_timing = True  # intervals are wanted
        self.drain = False  # the device's queue has to be empty before this step's end is timed
        self.reason = ""  # why it runs eagerly
        self.attempts = 0
        self.lost = 0.0  # seconds by all attempts
        self.attempt_lost = 0.0  # by the latest
        self.lost_by: float | None = None  # a comparison that was lost just now: recorded / eager
        self.eager: dict[Kind, deque[float]] = {}
        self.eager_step = 0.0
        self._times: list[float] = []  # of eager's steps, measured now
        self._step = 0.0  # seconds of this one
        self._taken: dict[Kind, list[float]] = {}  # intervals of a window: seconds
        self._cold: set[Kind] = set()  # kinds that were met while warming up
        self._rivals: list[tuple[dict[Kind, int], float]] = []  # windows: intervals, seconds
        self._due = 0  # step of this phase at which to try, or to time again
        self._waits = False  # for a compile in the background
        self._row = 0  # steps in a row that came back compiled
        self._came_back = 0
        self._new = 0.0  # graphs of a winner that did not come back
        self._checks = 0
        self._refusals = 0
        self._asks = False  # it wants to change, and could not yet
        self._patience = 0  # steps for which a winner, or who cannot change, is let alone
        self._before = ProcessFacts(0, 0, 0, False)

    @property
    def is_recorded(self) -> bool:
        return self.phase != EAGER

    @property
    def waits(self) -> bool:
        """It runs eagerly until graphs of it are compiled."""
        return self._waits and not self.is_recorded

    @property
    def is_decided(self) -> bool:
        """It has a reason to run eagerly, and either does so or cannot."""
        return bool(self.reason) and not self._asks

    @property
    def is_new_each_time(self) -> bool:
        """The latest attempt has ended because graphs did not come back."""
        return self.reason.startswith(_NEW)

    def record_always(self) -> None:
        """Do not choose: ranks of one program have to agree."""
        self._begin(RECORDED)
        self.is_timing, self._patience = False, sys.maxsize

    # -- what is measured ----------------------------------------------------------------------

    def interval(self, kind: Kind, seconds: float) -> None:
        """An interval is over, in which compiling is not counted; only while `is_timing`."""
        self._step += seconds
        if self.phase == EAGER:
            if self.here >= self._skipped_until:
                known = self.eager.get(kind)
                if known is None:
                    known = self.eager[kind] = deque(maxlen=2 * self.limits.measured)
                known.append(seconds)
        elif self.phase != WARMING or kind in self._cold:
            self._taken.setdefault(kind, []).append(seconds)
        else:  # all of its ops are new
            self._cold.add(kind)

    @property
    def _skipped_until(self) -> int:
        """The step of this phase from which on eager is measured."""
        return max(self.limits.skipped, self._due - self.limits.measured)

    def _eager_of(self, counts: dict[Kind, int]) -> float | None:
        """What eager takes for so many intervals of each kind; None if most are unknown to it."""
        known = {kind: median(self.eager[kind]) for kind in counts if kind in self.eager}
        if 2 * sum(counts[kind] for kind in known) < sum(counts.values()):
            return None
        return sum(counts[kind] * seconds for kind, seconds in known.items())

    def ratio(self) -> float | None:
        """Time of the best window, in eager's; None if it is not known."""
        ratios = []
        for counts, seconds in self._rivals:
            eager = self._eager_of(counts)
            if eager:
                ratios.append(seconds / eager)
        return min(ratios, default=None)

    def _taken_of(self, kinds: Iterable[Kind]) -> tuple[dict[Kind, int], float]:
        chosen = {kind: self._taken[kind] for kind in kinds}
        return {k: len(s) for k, s in chosen.items()}, sum(map(sum, chosen.values()))

    def _known_window(self) -> tuple[dict[Kind, int], float]:
        """What was taken since the phase began, of kinds that eager is known for."""
        return self._taken_of(kind for kind in self._taken if kind in self.eager)

    # -- what is chosen ------------------------------------------------------------------------

    def step(self, facts: ProcessFacts, now: float) -> bool:
        """A step is over: whether the place is to change to the other way."""
        self.here += 1
        self.steps[self.is_recorded] += 1
        before, self._before = self._before, facts
        if self._asks:
            wish = True
        elif self.phase == EAGER:
            wish = self._eager_step(facts, now)
        else:
            came_back = facts[:3] == before[:3]
            wish = self._recorded_step(facts, came_back, now)
        self._step = 0.0
        return wish

    def rests(self) -> int:
        """Steps for which nothing is to be looked at: `skip` them before the next one."""
        if self.is_recorded or self.is_timing or self._waits or self._asks:
            return 0
        return max(0, self._rests_until - self.here - 1)

    def skip(self, steps: int) -> None:
        """So many steps are over that nobody looked at."""
        self.here += steps
        self.steps[self.is_recorded] += steps

    def changed(self, now: float) -> None:
        """The place runs the other way now."""
        self._refusals, self._asks = 0, False
        self._begin(EAGER if self.is_recorded else WARMING)
        if self.phase == EAGER and self._rivals:
            self.eager = {}  # they are compared with what eager takes now
        if self.phase == WARMING:
            if not self._waits:
                self.attempts += 1
                self.attempt_lost = 0.0
            self._waits = False
            if self._rivals and self._won():
                self._win()

    def pay(self, seconds: float) -> None:
        """A change, or the attempt at one, has taken so long."""
        self.lost += seconds
        self.attempt_lost += seconds

    def refused(self, reason: str, counts: bool) -> None:
        """It could not change: it asks again; to become eager, not for ever."""
        self._refusals += counts
        self._asks = not self.is_recorded or self._refusals <= self.limits.tries
        if not self._asks:
            self._begin(RECORDED)
            self.is_timing, self.reason = False, reason
            again = self._refusals - self.limits.tries
            self._patience = self._due = self.limits.check * 2**again

    def _begin(self, phase: str) -> None:
        self.phase, self.here, self.is_timing, self.drain = phase, 0, True, False
        self._row = self._came_back = 0
        self._new = 0.0
        self._taken = {}
        self._cold = set()
        self._times = []

    # -- eagerly -------------------------------------------------------------------------------

    def _eager_step(self, facts: ProcessFacts, now: float) -> bool:
        if self.is_timing and self.here > self._skipped_until:
            self._times.append(self._step)
            self.eager_step = median(self._times[-2 * self.limits.measured :])
        if self._waits:
            return not facts.compiling
        if self.here < self.limits.skipped + self.limits.measured:
            return False
        if not self.attempts and now - self.began < self.limits.start:
            return False
        if self._rivals and not self._due:
            if self._won():
                return True
            self._lose()
        if self.here >= self._due:
            if not facts.compiling and self._may_lose(now):
                return True
            self._due = self.here + self.limits.rest
        self.is_timing = self._rests_until <= self.here
        return False

    @property
    def _rests_until(self) -> int:
        """The last step of this phase before eager is measured again."""
        return self._due - self.limits.measured - 1

    def _won(self) -> bool:
        ratio = self.ratio()
        return ratio is not None and ratio <= self.limits.margin

    def _lose(self) -> None:
        ratio = self.ratio()
        self.reason = "a recorded step takes longer than eager's"
        if ratio is not None:
            self.reason = f"a recorded step takes {ratio:.2f} times as long as eager's"
        self.lost_by = ratio
        self._rivals = []
        self.attempt_lost = 0.0  # the next one finds its graphs compiled
        self._rest()

    def _rest(self) -> None:
        self._due = self.here + self.limits.rest * 2 ** max(0, self.attempts - 1)

    def try_again(self) -> None:
        """Recording takes less from now on than it did in the attempt that has just been lost."""
        self.lost_by = None
        self._due = self.here

    def _budget(self, now: float) -> float:
        """Seconds that attempts may still lose."""
        first = max(self.limits.lost, self.limits.lost_steps * self.eager_step)
        return first + self.limits.share * (now - self.began) - self.lost

    def _may_lose(self, now: float) -> bool:
        return self._budget(now) >= self.attempt_lost

    # -- recorded ------------------------------------------------------------------------------

    def _recorded_step(self, facts: ProcessFacts, came_back: bool, now: float) -> bool:
        self._row = self._row + 1 if came_back else 0
        self._came_back += came_back
        if self.phase == RECORDED:
            return self._winner_step(came_back)
        if self.phase == TIMED:
            return self._timed_step(came_back)
        if facts.compiling:
            self._give_up("")
            self._waits = True
            return True
        if self._row >= self.limits.settled:
            self._time()
            return False
        if self.is_overdrawn(now):
            return self._fail()
        return self.here >= self.limits.warming and self._fail()

    def is_overdrawn(self, now: float) -> bool:
        """Warming up has cost more than it may."""
        return self.phase == WARMING and self._loss() > max(self._budget(now), 0.0)

    def fail(self) -> None:
        """Warming up is to end, in the middle of a step."""
        if not self._asks:
            self._fail()

    def _loss(self) -> float:
        counts, seconds = self._known_window()
        return seconds - (self._eager_of(counts) or seconds)

    def _give_up(self, reason: str) -> None:
        lost = max(0.0, self._loss())
        self.attempt_lost += lost
        self.lost += lost
        self._rivals, self._due = [], 0
        self.reason = reason

    def _fail(self) -> bool:
        counts, seconds = self._known_window()
        eager = self._eager_of(counts)
        times = (
            f"; recorded it took {seconds / eager:.1f} times as long as eagerly" if eager else ""
        )
        what = _NEW if 2 * self._came_back <= self.here else _NOT_COMPILED
        self._give_up(f"{what}{times}")
        self._rest()
        return True

    def _time(self) -> None:
        """From the end of the next step on."""
        lost = max(0.0, self._loss())
        if self.phase == WARMING:
            self.attempt_lost += lost
            self.lost += lost
        self._begin(TIMED)
        self.drain = True
        self._rivals = []

    def _timed_step(self, came_back: bool) -> bool:
        self._new += not came_back
        if 4 * self._new > self.limits.window * self.limits.windows:
            self._begin(WARMING)
            return False
        turn = (self.here - 1) % self.limits.window
        if turn == 0:
            if self.here > 1:
                self._rivals.append(self._taken_of(self._taken))
            self._taken = {}
        self.drain = turn == self.limits.window - 1
        if len(self._rivals) < self.limits.windows:
            return False
        self._due = 0
        return True

    # -- recorded, and it has won --------------------------------------------------------------

    def _win(self) -> None:
        self._begin(RECORDED)
        self.is_timing, self.reason = False, ""
        self._due, self._patience = self.limits.check * 2**self._checks, 0
        self._checks += 1
        self.attempts = 0

    def _winner_step(self, came_back: bool) -> bool:
        if self.here < self._patience:
            return False
        self._new = max(0.0, self._new - 0.25) if came_back else self._new + 1
        if self._new > self.limits.new_graphs:
            self._begin(WARMING)
            self.attempts += 1
        elif self.here >= self._due:
            self._time()
        return False
