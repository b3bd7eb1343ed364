"""One system in a process of its own, which runs one training step whenever it is told to.

The parent holds several workers and lets them take turns, so that a slow minute of the machine
meets them all. A worker that is not at work waits on its standard input and uses no CPU.
"""

from __future__ import annotations

import os
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.clock import Time, no_gc, timed
from torpor.bench import worker_processes

ROOT = Path(__file__).resolve().parent.parent
TIMEOUT = 600.0  # seconds; a step of `torch._lazy` takes tens of them


@dataclass(frozen=True)
class Step:
    """One training step: until it is all recorded (for eager: computed), and the cut after it."""

    trace: Time
    cut: Time


def environment(threads: int) -> dict[str, str]:
    """Of every process that measures: `threads` of torch's, and the same hashes in each."""
    usual = worker_processes.environment(threads, device="")
    return usual | {
        "PYTHONHASHSEED": "0",
        "PYTHONPATH": os.pathsep.join((str(ROOT), usual["PYTHONPATH"])),
        "TORPOR_BACKEND": "reference",  # what is measured is recording
    }


class Worker(worker_processes.Worker):
    """The parent's end."""

    def __init__(self, system: str, optimizer: str, threads: int = 1, **size: Any) -> None:
        run = worker_processes.command("benchmarks.worker", with_torpor=system.startswith("torpor"))
        super().__init__(run, environment(threads), TIMEOUT)
        self.ask("build", system=system, optimizer=optimizer, size=size)

    def step(self) -> Step:
        """Let the worker run one step."""
        return self._step(1)

    def second_step(self) -> Step:
        """Let the worker run two steps; the second counts.

        Collecting garbage and the other workers' turns leave the caches cold, which a training
        loop's are not.
        """
        return self._step(2)

    def _step(self, steps: int) -> Step:
        answer = self.ask("step", steps=steps)
        return Step(Time(*answer["trace"]), Time(*answer["cut"]))

    def counters(self) -> dict[str, int]:
        """What the system counted during the last step."""
        counted: dict[str, int] = self.ask("counters")
        return counted


class Session:
    """The worker's end."""

    def build(self, system: str, optimizer: str, size: dict[str, Any]) -> None:
        from benchmarks.gpt import Size, Training
        from benchmarks.systems import SYSTEMS

        self.system = SYSTEMS[system]()
        self.training = Training(Size(**size), optimizer, self.system.place)
        self.system.cut()
        self.system.wait()

    def step(self, steps: int) -> dict[str, Any]:
        with no_gc():
            for _ in range(steps):
                self.system.reset_counters()
                step = Step(timed(self.training.step), timed(self.system.cut))
                self.system.wait()
        return asdict(step)

    def counters(self) -> dict[str, int]:
        return self.system.counters()


def main() -> None:
    from torpor.bench.worker import serve

    session = Session()
    serve({name: getattr(session, name) for name in ("build", "step", "counters")}, sys.stdout)


if __name__ == "__main__":
    main()
