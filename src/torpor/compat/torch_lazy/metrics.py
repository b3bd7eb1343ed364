"""torpor's counters under the names that `torch._lazy` gives them.

Nothing is counted twice for that. What torpor does not count is derived on demand: for example, a
recorder's calls minus the nodes that it added to the intern table are its reuses.
"""

from __future__ import annotations

from collections import Counter

from torpor import metrics
from torpor.backend.registry import get_backend
from torpor.ir.node import TABLE, OpKind
from torpor.ops.spec import ReturnKind, spec_of

MARK_STEP_CALLS = "torch_lazy::mark_step"
"""The counter of `mark_step` itself; torpor's own `MarkStep` includes automatic cuts."""

Calls = dict[str, dict[str, int]]
"""By counter (`lazy::add`) and overload (`aten.add.Tensor`)."""


def reset() -> None:
    """Reset all counters and timers."""
    metrics.reset()


def counter_names() -> list[str]:
    """The names of all nonzero counters."""
    return sorted(_counters())


def counter_value(name: str) -> int | None:
    """The value of a counter; None if nothing was counted."""
    return _counters().get(name)


def metrics_report() -> str:
    """Timers, counters and the backend's report, as text."""
    lines: list[str] = []
    for name, timer in sorted(metrics.timers().items()):
        lines += [
            f"Metric: {name}",
            f"  TotalSamples: {timer['count']:.0f}",
            f"  Accumulator: {timer['total'] * 1e3:.3f}ms",
            f"  Percentiles: 50%={timer['p50'] * 1e6:.3f}us; 90%={timer['p90'] * 1e6:.3f}us; "
            f"99%={timer['p99'] * 1e6:.3f}us",
        ]
    for name, value in sorted(_counters().items()):
        lines += [f"Counter: {name}", f"  Value: {value}"]
    backend = get_backend()
    lines.append(f"{backend.name}: {backend.metric_report() or 'N/A'}")
    return "\n".join(lines) + "\n"


# -- LTC's counters, derived from torpor's -----------------------------------------------------


def _counters() -> dict[str, int]:
    core = metrics.counters()
    calls = _calls()
    found = Counter({name: value for name, value in core.items() if name not in calls})
    found["MarkStep"] = found.pop(MARK_STEP_CALLS, 0)
    found["SyncedTensorsWithIR"] = found.pop("SyncedTensors", 0)
    found["CreateLtcTensor"] = _tensors_made(calls, core)
    for counter, overloads in calls.items():
        found[_out_of_place(counter)] += sum(overloads.values()) - _fallbacks(counter, core)
        found.update(_reused(counter, overloads, core))
    return {name: value for name, value in found.items() if value > 0}


def _calls() -> Calls:
    calls: Calls = {}
    for (counter, overload), number in metrics.recorded().items():
        by_overload = calls.setdefault(counter, {})
        overload = overload or _likeliest(counter)
        by_overload[overload] = by_overload.get(overload, 0) + number
    return calls


def _likeliest(counter: str) -> str:
    """The overload with the most nodes, for recorders that do not report theirs; "" if none."""
    kinds = [kind for kind in _kinds(counter) if kind.nodes]
    return max(kinds, key=lambda kind: len(kind.nodes)).name if kinds else ""


def _kinds(counter: str) -> list[OpKind]:
    """All overloads of an op recorded so far."""
    prefix = f"{_op(counter).replace('::', '.')}."
    return [kind for name, kind in list(TABLE.kinds.items()) if name.startswith(prefix)]


def _op(counter: str) -> str:
    """The op of a counter, as in counters of fallbacks: `lazy::add` -> `aten::add`."""
    op = counter.removeprefix("lazy::")
    return op if "::" in op else f"aten::{op}"


def _fallbacks(counter: str, core: dict[str, int]) -> int:
    """Fallbacks to subtract: a recorder counts a call before it falls back, LTC does not."""
    return core.get(_op(counter), 0)


def _out_of_place(counter: str) -> str:
    """LTC functionalizes in-place ops before it counts them, all but `fill_`."""
    in_place = counter.endswith("_") and not counter.endswith("__")
    return counter[:-1] if in_place and counter != "lazy::fill_" else counter


# -- tensors -----------------------------------------------------------------------------------


def _tensors_made(calls: Calls, core: dict[str, int]) -> int:
    """Tensors that recorded ops made or wrote (a list counts as one), and data moved in."""
    made = sum(
        number * _tensors(overload)
        for overloads in calls.values()
        for overload, number in overloads.items()
    )
    moved = core.get("CreateLtcTensor", 0)
    empty = core.get("lazy::empty", 0) + core.get("lazy::empty_strided", 0)
    return made + max(0, moved - empty)  # a transfer makes an empty tensor first


def _tensors(overload: str) -> int:
    kind = TABLE.kinds.get(overload)
    if kind is None:
        return 1
    returns = spec_of(kind.target).returns
    new = sum(r.kind in (ReturnKind.FRESH, ReturnKind.VIEW) for r in returns)
    return max(1, new)


# -- nodes -------------------------------------------------------------------------------------


def _reused(counter: str, overloads: dict[str, int], core: dict[str, int]) -> dict[str, int]:
    """How often each overload hit the intern table."""
    new = metrics.new_nodes()
    synced = core.get(f"Sync::{_op(counter).rpartition('::')[2]}", 0)
    others = sum(new.get(kind.name, 0) for kind in _kinds(counter) if kind.name not in overloads)
    no_hits = _fallbacks(counter, core) + synced + others
    reused = {}
    for overload, number in overloads.items():
        if overload:
            hits = max(0, number - new.get(overload, 0))
            reused[_reuse_counter(overload)] = max(0, hits - no_hits)
            no_hits = max(0, no_hits - hits)
    return reused


def _reuse_counter(overload: str) -> str:
    """LTC's counter of reused nodes: `aten.add.Tensor` -> `IrNodeReused_torch::lazy::AddTensor`."""
    _, op, which = overload.split(".")
    words = f"{op}_{'' if which == 'default' else which}".lower().split("_")
    return f"IrNodeReused_torch::lazy::{''.join(map(str.capitalize, words))}"
