"""Warms up all runners, then interleaves them, so that a slow phase of the machine affects all."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass

from torpor.bench.measurements import Row, WorkloadOutcome
from torpor.bench.runners import Spec
from torpor.bench.worker import WarmUpLimits
from torpor.bench.worker_processes import Worker, WorkerError, command, environment, fresh_folder
from torpor.bench.workloads import SCALES

SLOW_MS = 1000.0  # slower runners take part in every fifth round only
SLOW_EVERY = 5

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Settings:
    """The settings of a race."""

    device: str
    threads: int
    rounds: int = 15
    scale: str = "full"
    timeout: float = 600.0  # seconds for one answer of a worker
    limits: WarmUpLimits = WarmUpLimits()  # noqa: RUF009  # frozen
    keep_caches: bool = False  # compilers may use disk caches of earlier runs
    warm_jobs: int = 1  # runners that warm up concurrently; if > 1, cold starts are incomparable


def turns(specs: list[Spec], settings: Settings) -> int:
    """How often `race` calls `advance`."""
    return len(specs) + settings.rounds


def race(workload: str, specs: list[Spec], settings: Settings, advance: Advance) -> WorkloadOutcome:
    """Run one workload with every runner."""
    outcome = WorkloadOutcome(workload, SCALES[settings.scale][workload].title)
    with ExitStack() as stack:
        entrants: list[Entrant] = []
        jobs = stack.enter_context(ThreadPoolExecutor(settings.warm_jobs))
        for entrant in jobs.map(lambda spec: _warm(spec, workload, settings, stack), specs):
            entrants.append(entrant)
            outcome.rows.append(entrant.row)
            failed = " (failed)" * bool(entrant.row.error)
            advance(f"{workload}: {entrant.spec.label} is warm{failed}")
        for turn in range(settings.rounds):
            for entrant in entrants:
                entrant.take_turn(turn)
            advance(f"{workload}: round {turn + 1}")
        for entrant in entrants:
            entrant.sum_up()
    return outcome


def _warm(spec: Spec, workload: str, settings: Settings, stack: ExitStack) -> Entrant:
    entrant = Entrant(spec, settings, stack)
    entrant.warm_up(workload)
    return entrant


class Entrant:
    """A worker and its row; errors only affect that row."""

    def __init__(self, spec: Spec, settings: Settings, stack: ExitStack) -> None:
        self.spec, self.settings = spec, settings
        self.row = Row(spec.label, records=spec.records)
        self.every = 1
        caches = "" if settings.keep_caches else stack.enter_context(fresh_folder())
        surroundings = environment(settings.threads, settings.device, caches)
        run = command("torpor.bench.worker", spec.needs_torpor)
        self.worker = stack.enter_context(Worker(run, surroundings, settings.timeout))

    def warm_up(self, workload: str) -> None:
        self._attempt(lambda: self._warm_up(workload))

    def _warm_up(self, workload: str) -> None:
        scale = self.settings.scale
        self.worker.ask("build", spec=asdict(self.spec), workload=workload, scale=scale)
        warm = self.worker.ask("warm_up", **asdict(self.settings.limits))
        row = self.row
        row.losses, row.compiles, row.settled = warm["losses"], warm["compiles"], warm["settled"]
        row.first_s, row.cold_s = warm["step_s"][0], warm["cold_s"]
        row.steps_per_round = warm["steps_per_round"]
        self.every = SLOW_EVERY if warm["step_s"][-1] * 1e3 > SLOW_MS else 1

    def take_turn(self, turn: int) -> None:
        if turn % self.every == 0:
            self._attempt(self._take_turn)

    def _take_turn(self) -> None:
        answer = self.worker.ask("round")
        self.row.samples.append(answer["ms"])
        self.row.recording.append(answer["recording_ms"])
        self.row.single.append(answer["single_ms"])
        self.row.faults.append(answer["faults"])

    def sum_up(self) -> None:
        self._attempt(self._sum_up)

    def _sum_up(self) -> None:
        answer = self.worker.ask("summary")
        self.row.memory, self.row.reserved = answer["memory"], answer["reserved"]
        self.row.late_compiles = answer["compiles"]

    def _attempt(self, do: Callable[[], None]) -> None:
        if self.row.error:
            return
        try:
            do()
        except WorkerError as error:
            self.row.error = str(error)
            self.worker.close()  # free its memory for the others
