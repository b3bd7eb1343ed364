"""Recorded or eager: the decision for one group of models, made by measuring both.

This is pure arithmetic: no tensors, no clock. A program is a sequence of events (a call of a model
begins, an optimizer's step ends); an interval is the time between two events, and its kind is that
pair. Both modes go through the same kinds of intervals, so eager's time per kind tells what eager
would have taken for a stretch that was recorded.

    EAGER      eager's intervals are timed, then it runs untimed until an attempt is due
    WARMING    recorded: until graphs are cached and compiled; ends early if it costs too much
    TIMED      recorded: a window of steps is timed, with an empty device queue before and after
    RECORDED   recorded: it was faster; timed again now and then

A group starts in EAGER. After TIMED, it runs in EAGER for a few steps, then in the faster mode.
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
"""The kind of an interval: the events at its ends."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How long modes are tried, and what that may cost."""

    start: float = 30.0  # seconds until the first attempt, which may lose 1.5 s by its imports
    skipped: int = 1  # steps after a change that are not timed: caches are cold
    measured: int = 5  # timed steps that suffice to know eager's time
    window: int = 8  # steps in a window
    windows: int = 2  # the best of this many counts
    settled: int = 3  # consecutive steps with only compiled graphs that end the warm-up
    warming: int = 32  # maximum number of warm-up steps
    margin: float = 1.02  # recorded wins up to this ratio to eager's time
    worth_capturing: float = 0.95  # maximum ratio that a captured step is expected to take
    lost: float = 0.2  # seconds that the first attempt may lose, or ...
    lost_steps: int = 20  # ... this many of eager's steps
    share: float = 0.05  # of all time that attempts may lose
    rest: int = 100  # steps until the next attempt, doubled after each
    check: int = 512  # steps until a winner is timed again, doubled after each
    tries: int = 8  # consecutive steps at which to retry a change that is refused
    new_graphs: int = 6  # of a winner, beyond what cached steps offset: it warms up again


class ProcessFacts(NamedTuple):
    """Counters since the process began."""

    new_graphs: int
    interpreted: int  # runs of graphs that were not compiled
    compiles: int
    compiling: bool  # a background compile is in flight


class Choice:
    """The mode of a group; `step`, called after each step, says whether to change it."""

    def __init__(self, now: float, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        self.phase = EAGER
        self.began = now
        self.steps = {True: 0, False: 0}  # keys: `is_recorded`
        self.here = 0  # steps in this phase
        self.is_timing = True  # `interval` is to be called
        self.drain = False  # the device's queue must be empty before this step's end is timed
        self.reason = ""  # why it runs eagerly
        self.attempts = 0
        self.lost = 0.0  # seconds, by all attempts
        self.attempt_lost = 0.0  # by the latest attempt
        self.lost_by: float | None = None  # recorded / eager, if a comparison was just lost
        self.eager: dict[Kind, deque[float]] = {}
        self.eager_step = 0.0
        self._times: list[float] = []  # eager's steps in this phase
        self._step = 0.0  # seconds of the current step
        self._taken: dict[Kind, list[float]] = {}  # intervals of the current window, in seconds
        self._cold: set[Kind] = set()  # kinds seen during warm-up; the first time is not counted
        self._rivals: list[tuple[dict[Kind, int], float]] = []  # windows: intervals, seconds
        self._due = 0  # the step of this phase at which to attempt, or to time again
        self._waits = False  # for a background compile
        self._row = 0  # consecutive steps with only compiled graphs
        self._came_back = 0  # such steps in this phase
        self._new = 0.0  # a winner's steps with other graphs, less what cached steps offset
        self._checks = 0
        self._refusals = 0
        self._asks = False  # a change was refused and is to be retried
        self._patience = 0  # steps in RECORDED before anything is checked
        self._before = ProcessFacts(0, 0, 0, False)

    @property
    def is_recorded(self) -> bool:
        return self.phase != EAGER

    @property
    def waits(self) -> bool:
        """Whether it runs eagerly until background compiles of its graphs are complete."""
        return self._waits and not self.is_recorded

    @property
    def is_decided(self) -> bool:
        """Whether it has a reason to run eagerly, and either does so or cannot."""
        return bool(self.reason) and not self._asks

    @property
    def is_new_each_time(self) -> bool:
        """Whether the latest attempt ended because most steps had new graphs."""
        return self.reason.startswith(_NEW)

    def record_always(self) -> None:
        """Fix the mode: all ranks of a program must use the same."""
        self._begin(RECORDED)
        self.is_timing, self._patience = False, sys.maxsize

    # -- what is measured ----------------------------------------------------------------------

    def interval(self, kind: Kind, seconds: float) -> None:
        """Add an interval, not counting time spent compiling; to be called only if `is_timing`."""
        self._step += seconds
        if self.phase == EAGER:
            if self.here >= self._skipped_until:
                known = self.eager.get(kind)
                if known is None:
                    known = self.eager[kind] = deque(maxlen=2 * self.limits.measured)
                known.append(seconds)
        elif self.phase != WARMING or kind in self._cold:
            self._taken.setdefault(kind, []).append(seconds)
        else:  # the first of its kind: every op is a cache miss
            self._cold.add(kind)

    @property
    def _skipped_until(self) -> int:
        """The step of this phase at which timing starts."""
        return max(self.limits.skipped, self._due - self.limits.measured)

    def _eager_of(self, counts: dict[Kind, int]) -> float | None:
        """Eager's time for these numbers of intervals; None if most of their kinds are unknown."""
        known = {kind: median(self.eager[kind]) for kind in counts if kind in self.eager}
        if 2 * sum(counts[kind] for kind in known) < sum(counts.values()):
            return None
        return sum(counts[kind] * seconds for kind, seconds in known.items())

    def ratio(self) -> float | None:
        """The time of the best recorded window relative to eager's; None if unknown."""
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
        """The intervals of this phase whose kinds are known for eager."""
        return self._taken_of(kind for kind in self._taken if kind in self.eager)

    # -- what is chosen ------------------------------------------------------------------------

    def step(self, facts: ProcessFacts, now: float) -> bool:
        """A step has ended; whether to change to the other mode."""
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
        """How many steps need no call of `step`; report them with `skip` before its next call."""
        if self.is_recorded or self.is_timing or self._waits or self._asks:
            return 0
        return max(0, self._rests_until - self.here - 1)

    def skip(self, steps: int) -> None:
        """Count steps for which `step` was not called."""
        self.here += steps
        self.steps[self.is_recorded] += steps

    def changed(self, now: float) -> None:
        """The group has changed to the other mode."""
        self._refusals, self._asks = 0, False
        self._begin(EAGER if self.is_recorded else WARMING)
        if self.phase == EAGER and self._rivals:
            self.eager = {}  # the comparison needs eager's current times
        if self.phase == WARMING:
            if not self._waits:
                self.attempts += 1
                self.attempt_lost = 0.0
            self._waits = False
            if self._rivals and self._won():
                self._win()

    def pay(self, seconds: float) -> None:
        """A change of mode, or an attempt, took this long."""
        self.lost += seconds
        self.attempt_lost += seconds

    def refused(self, reason: str, counts: bool) -> None:
        """The change was refused. Retried without limit, except for a change to eager."""
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
            self._rest_before_start(self.began + self.limits.start - now)
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

    def _rest_before_start(self, seconds: float) -> None:
        """Rest for half of the `seconds` until the first attempt: not all steps are timed."""
        if self.here >= self._due:
            steps = int(seconds / 2 / self.eager_step) if self.eager_step else 0
            self._due = self.here + steps if steps > self.limits.rest else 0
        self.is_timing = self._rests_until <= self.here

    @property
    def _rests_until(self) -> int:
        """The last step of this phase before timing resumes."""
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
        self.attempt_lost = 0.0  # the next attempt finds compiled graphs
        self._rest()

    def _rest(self) -> None:
        self._due = self.here + self.limits.rest * 2 ** max(0, self.attempts - 1)

    def try_again(self) -> None:
        """Recording has become cheaper since the attempt that was just lost: schedule another."""
        self.lost_by = None
        self._due = self.here

    def _budget(self, now: float) -> float:
        """How many seconds attempts may still lose."""
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
        """Whether warming up has exceeded its budget."""
        return self.phase == WARMING and self._loss() > max(self._budget(now), 0.0)

    def fail(self) -> None:
        """End the warm-up in the middle of a step."""
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
        """Time windows, from the end of the next step on."""
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
