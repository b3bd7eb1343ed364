"""Measures cold starts: programs compiled from scratch, one process per row."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from torpor.bench.measurements import facts
from torpor.bench.report import Table, shortened, tabled
from torpor.bench.runners import Spec
from torpor.bench.worker import WarmUpLimits
from torpor.bench.worker_processes import Worker, WorkerError, command, environment, fresh_folder

FEW, MANY = 2, 24  # layers
MOST_FOR_MANY = 2.0  # times the cost of few layers
MOST_OF_COMPILE = 0.6  # times the cost of torch.compile
WORKLOADS = {"cpu": "gpt", "cuda": "gpt2"}


@dataclass(frozen=True)
class ColdPlan:
    """What to measure, and how."""

    device: str
    threads: int
    backend: str = "inductor"
    options: tuple[tuple[str, Any], ...] = ()  # of the backend
    scale: str = "full"
    few: int = FEW
    many: int = MANY
    timeout: float = 600.0

    @property
    def workload(self) -> str:
        return WORKLOADS[self.device]

    @property
    def starts(self) -> list[Start]:
        """In this order, so that those to be compared run one after the other."""
        ours, theirs = f"torpor ({self.backend})", "compile"
        sizes = [(self.few, ours), (self.many, ours), (0, theirs), (0, ours)]
        return [Start(self.workload, layers, runner) for layers, runner in sizes]


@dataclass
class Start:
    """One program with one runner."""

    workload: str
    layers: int  # 0: its default
    runner: str
    compile_s: float = 0.0  # excess time of compiling steps over a warm one
    cold_s: float = 0.0  # all steps up to the last that compiled
    cpu_s: float = 0.0  # the same as CPU time of all threads and processes
    step_ms: float = 0.0
    graphs: int = 0
    error: str = ""

    @property
    def program(self) -> str:
        return f"{self.workload}, {self.layers} layers" if self.layers else self.workload


@dataclass
class Starts:
    """All measurements."""

    rows: list[Start] = field(default_factory=list)

    @property
    def growth(self) -> float | None:
        """The cost of many layers, as a multiple of few."""
        return _ratio(self.rows[1], self.rows[0])

    @property
    def to_compile(self) -> float | None:
        """The cost, as a multiple of torch.compile's."""
        return _ratio(self.rows[3], self.rows[2])


def _ratio(one: Start, other: Start) -> float | None:
    if one.error or other.error or not other.compile_s:
        return None
    return one.compile_s / other.compile_s


def measure(plan: ColdPlan, advance: Callable[[str], None]) -> Starts:
    """Measure each in its own process with empty caches; a failure only affects its row."""
    starts = Starts(plan.starts)
    for start in starts.rows:
        try:
            _measure(plan, start)
        except WorkerError as error:
            start.error = str(error)
        advance(f"{start.program}: {start.runner}")
    return starts


def _measure(plan: ColdPlan, start: Start) -> None:
    ours = start.runner != "compile"
    spec = Spec("torpor", plan.device, plan.backend, plan.options) if ours else Spec(
        "compile", plan.device
    )  # fmt: skip
    with fresh_folder() as folder:
        variables = environment(plan.threads, plan.device, folder)
        run = command("torpor.bench.worker", spec.needs_torpor)
        with Worker(run, variables, plan.timeout) as worker:
            what = {"workload": plan.workload, "scale": plan.scale, "layers": start.layers}
            worker.ask("build", spec=asdict(spec), **what)
            warm = worker.ask("warm_up", **asdict(WarmUpLimits(seconds=plan.timeout / 2)))
    start.compile_s, start.cold_s, start.cpu_s = warm["compile_s"], warm["cold_s"], warm["cpu_s"]
    start.step_ms, start.graphs = warm["step_s"][-1] * 1e3, warm["compiles"]


def table(starts: Starts) -> Table:
    """A row per start."""
    return tabled(map(_cells, starts.rows))


def _cells(start: Start) -> dict[str, str]:
    numbers = {
        "compile s": start.compile_s, "cold s": start.cold_s, "CPU s": start.cpu_s,
        "step ms": start.step_ms,
    }  # fmt: skip
    return {
        "program": start.program,
        "runner": start.runner,
        **{name: "" if start.error else f"{found:.1f}" for name, found in numbers.items()},
        "graphs": "" if start.error else str(start.graphs),
        "note": shortened(start.error),
    }


def checks(plan: ColdPlan, starts: Starts) -> Table:
    """Measurements compared with their targets."""
    rows = [
        (f"compile, {plan.many} layers against {plan.few}", starts.growth, MOST_FOR_MANY),
        ("compile, against torch.compile", starts.to_compile, MOST_OF_COMPILE),
    ]
    return ["what", "measured", "at most"], [
        [what, "" if found is None else f"{found:.2f} ×", f"{most:.2f} ×"]
        for what, found, most in rows
    ]


def as_json(plan: ColdPlan, starts: Starts) -> dict[str, Any]:
    """All data as JSON."""
    return {
        **facts(plan.device, plan.threads),
        "plan": asdict(plan),
        "starts": [asdict(start) for start in starts.rows],
        "growth": starts.growth,
        "to_compile": starts.to_compile,
    }
