"""Measures how cost grows: with 1, 2, 4, … layers; with nodes; with steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

from torpor.bench.measurements import facts
from torpor.bench.report import Table, in_mib, shortened, tabled
from torpor.bench.worker_processes import Worker, WorkerError, command, environment, fresh_folder

NODES = (1_000, 10_000)
STEPS = 200


@dataclass
class Growth:
    """One size of the small GPT."""

    layers: int
    trace_ms: float = 0.0  # until a warm step is recorded
    sync_ms: float = 0.0  # until the cut after it has returned
    step_ms: float = 0.0  # until it is computed
    compile_s: float = 0.0  # with empty caches
    compiles: int = 0
    memory: int = 0  # peak bytes since the warm-up
    error: str = ""


@dataclass
class GrowthCosts:
    """All measurements."""

    points: list[Growth] = field(default_factory=list)
    sync_ms: dict[str, tuple[float, float]] = field(default_factory=dict)  # by nodes; wall, CPU
    sync_error: str = ""
    compiles: int | None = None  # in `STEPS` steps of a schedule
    late_compiles: int | None = None  # of these, after its first steps
    recompiles_error: str = ""

    @property
    def sync_ratio(self) -> tuple[float, float] | None:
        """A warm sync of the longest graph, as a multiple of the shortest's: wall and CPU time."""
        times = list(self.sync_ms.values())
        if not times:
            return None
        (wall, cpu), (long_wall, long_cpu) = times[0], times[-1]
        return long_wall / wall, long_cpu / cpu


@dataclass(frozen=True)
class GrowthPlan:
    """What to measure, and how."""

    device: str
    threads: int
    backend: str = "inductor"
    most_layers: int = 64
    width: int = 64
    repeat: int = 15
    nodes: tuple[int, ...] = NODES
    steps: int = STEPS
    timeout: float = 600.0
    keep_caches: bool = False

    @property
    def sizes(self) -> list[int]:
        return [1 << power for power in range(self.most_layers.bit_length())]


def turns(plan: GrowthPlan) -> int:
    """How often `measure` calls `advance`."""
    return len(plan.sizes) + 2


def measure(plan: GrowthPlan, advance: Callable[[str], None]) -> GrowthCosts:
    """Measure each size in its own process; a failure only affects its row."""
    costs = GrowthCosts()
    for layers in plan.sizes:
        costs.points.append(_point(plan, layers))
        advance(f"{layers} layers")
    _measure_sync(plan, costs)
    advance("sync of long graphs")
    _measure_recompiles(plan, costs)
    advance("recompiles of a schedule")
    return costs


def _point(plan: GrowthPlan, layers: int) -> Growth:
    try:
        with _worker(plan) as worker:
            answer = worker.ask(
                "layers", layers=layers, width=plan.width, device=plan.device,
                backend=plan.backend, repeat=plan.repeat,
            )  # fmt: skip
    except WorkerError as error:
        return Growth(layers, error=str(error))
    return Growth(layers, **answer)


def _measure_sync(plan: GrowthPlan, costs: GrowthCosts) -> None:
    """On the reference backend, as a compiler would need minutes for the longest graph."""
    question = {"nodes": list(plan.nodes), "device": plan.device, "backend": "reference"}
    try:
        with _worker(plan) as worker:
            costs.sync_ms = worker.ask("sync", repeat=plan.repeat, **question)
    except WorkerError as error:
        costs.sync_error = str(error)


def _measure_recompiles(plan: GrowthPlan, costs: GrowthCosts) -> None:
    question = {"steps": plan.steps, "layers": 4, "device": plan.device, "backend": plan.backend}
    try:
        with _worker(plan) as worker:
            answer = worker.ask("recompiles", **question)
            costs.compiles, costs.late_compiles = answer["compiles"], answer["late"]
    except WorkerError as error:
        costs.recompiles_error = str(error)


@contextmanager
def _worker(plan: GrowthPlan) -> Iterator[Worker]:
    with fresh_folder() as folder:
        caches = "" if plan.keep_caches else folder
        variables = environment(plan.threads, plan.device, caches)
        run = command("torpor.bench.growth_worker", with_torpor=True)
        with Worker(run, variables, plan.timeout) as worker:
            yield worker


def table(costs: GrowthCosts) -> Table:
    """A row per size."""
    return tabled(map(_cells, costs.points))


def _cells(point: Growth) -> dict[str, str]:
    numbers = {
        "trace ms": f"{point.trace_ms:.2f}",
        "sync ms": f"{point.sync_ms:.3f}",
        "step ms": f"{point.step_ms:.2f}",
        "compile s": f"{point.compile_s:.1f}",
        "compiles": str(point.compiles),
        "MiB": in_mib(point.memory),
    }
    shown = dict.fromkeys(numbers, "") if point.error else numbers
    return {"layers": str(point.layers), **shown, "note": shortened(point.error)}


def checks(plan: GrowthPlan, costs: GrowthCosts) -> Table:
    """The two measurements that are single numbers, compared with their targets."""
    columns = ["what", "measured", "at most", "note"]
    few, many = plan.nodes[0], plan.nodes[-1]
    what = f"warm sync(), {many:,} against {few:,} nodes"
    ratios = costs.sync_ratio or (None, None)
    return columns, [
        *(
            [
                f"{what}, {clock} ms",
                _compared(costs, i, ratio),
                "1.20 ×",
                shortened(costs.sync_error),
            ]
            for i, (clock, ratio) in enumerate(zip(("wall", "CPU"), ratios))
        ),
        [
            f"graphs compiled in {plan.steps} steps: schedule, clipping, loss scaling",
            "" if costs.compiles is None else f"{costs.compiles} ({costs.late_compiles} late)",
            "2 late",
            shortened(costs.recompiles_error),
        ],
    ]


def _compared(costs: GrowthCosts, clock: int, ratio: float | None) -> str:
    if ratio is None:
        return ""
    times = [found[clock] for found in costs.sync_ms.values()]
    return f"{times[-1]:.3f} / {times[0]:.3f} = {ratio:.2f} ×"


def as_json(plan: GrowthPlan, costs: GrowthCosts) -> dict[str, Any]:
    """All data as JSON."""
    return {
        **facts(plan.device, plan.threads),
        "plan": asdict(plan),
        "growth": [asdict(point) for point in costs.points],
        "sync_ms": costs.sync_ms,
        "sync_ratio": costs.sync_ratio,
        "sync_error": costs.sync_error,
        "schedule_compiles": costs.compiles,
        "schedule_late_compiles": costs.late_compiles,
        "schedule_error": costs.recompiles_error,
    }
