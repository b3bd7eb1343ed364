"""Places that change between recorded and eager at given steps, and not by measuring."""

from typing import Any

import torpor
from torpor.adaptive import bound
from torpor.adaptive.choice import EAGER, RECORDED, Choice, ProcessFacts


class Forced(Choice):
    """Changes at every `every`-th step, as far as it can."""

    every = 2

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.is_timing = self.wants = False
        self.refusal = ""

    def step(self, facts: ProcessFacts, now: float) -> bool:
        self.here += 1
        self.steps[self.is_recorded] += 1
        self.wants |= self.here % self.every == 0
        return self.wants

    def rests(self) -> int:
        return 0

    def changed(self, now: float) -> None:
        self.wants = False
        self.phase = EAGER if self.is_recorded else RECORDED

    def refused(self, reason: str, counts: bool) -> None:
        self.refusal = reason

    def is_overdrawn(self, now: float) -> bool:
        return False


def force(every: int) -> None:
    """From now on every place of this process changes so, under `torpor.enable()`."""
    torpor.config.bound = "auto"
    Forced.every = every
    bound.Choice = Forced  # type: ignore[misc]  # the purpose
