"""torpor's counters under the names `torch._lazy` gives them.

Nothing is counted twice for it. What torpor does not count by itself is worked out when it is
asked for: a recorder's calls less the nodes that were new to the intern table are its reuses.
"""

from __future__ import annotations

from collections import Counter

from torpor import metrics
from torpor.backend.registry import get_backend
from torpor.ir.node import TABLE, OpKind
from torpor.ops.spec import ReturnKind, spec_of

MARK_STEP_CALLS = "torch_lazy::mark_step"
"""Where `mark_step` counts itself; torpor's own `MarkStep` counts automatic cuts too."""

Calls = dict[str, dict[str, int]]
"""By counter (`lazy::add`) and overload (`aten.add.Tensor`)."""


def reset() -> None:
    """Set every counter and timer back to nothing."""
    metrics.reset()


def counter_names() -> list[str]:
    """The names of all counters that are not zero."""
    return sorted(_counters())


def counter_value(name: str) -> int | None:
    """The value of a counter; None where nothing was counted."""
    return _counters().get(name)


def metrics_report() -> str:
    """Timers, counters and what the backend reports, as text."""
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


# -- LTC's counters, from torpor's -------------------------------------------------------------


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
    """The overload with most nodes, for recorders that do not tell theirs; "" if it has none."""
    kinds = [kind for kind in _kinds(counter) if kind.nodes]
    return max(kinds, key=lambda kind: len(kind.nodes)).name if kinds else ""


def _kinds(counter: str) -> list[OpKind]:
    """All overloads of an op that were met so far."""
    prefix = f"{_op(counter).replace('::', '.')}."
    return [kind for name, kind in list(TABLE.kinds.items()) if name.startswith(prefix)]


def _op(counter: str) -> str:
    """The op behind a counter, as fallbacks count it: `lazy::add` -> `aten::add`."""
    op = counter.removeprefix("lazy::")
    return op if "::" in op else f"aten::{op}"


def _fallbacks(counter: str, core: dict[str, int]) -> int:
    """A recorder counts a call before it knows that the op falls back; LTC does not."""
    return core.get(_op(counter), 0)


def _out_of_place(counter: str) -> str:
    """LTC turns in-place ops into others before it sees them, all but `fill_`."""
    in_place = counter.endswith("_") and not counter.endswith("__")
    return counter[:-1] if in_place and counter != "lazy::fill_" else counter


# -- tensors -----------------------------------------------------------------------------------


def _tensors_made(calls: Calls, core: dict[str, int]) -> int:
    """Tensors that recorded ops made or wrote (a list counts as one), and data that moved in."""
    made = sum(
        number * _tensors(overload)
        for overloads in calls.values()
        for overload, number in overloads.items()
    )
    moved = core.get("CreateLtcTensor", 0)
    empty = core.get("lazy::empty", 0) + core.get("lazy::empty_strided", 0)
    return made + max(0, moved - empty)  # torch makes an empty tensor and moves data into it


def _tensors(overload: str) -> int:
    kind = TABLE.kinds.get(overload)
    if kind is None:
        return 1
    returns = spec_of(kind.target).returns
    new = sum(r.kind in (ReturnKind.FRESH, ReturnKind.VIEW) for r in returns)
    return max(1, new)


# -- nodes -------------------------------------------------------------------------------------


def _reused(counter: str, overloads: dict[str, int], core: dict[str, int]) -> dict[str, int]:
    """How often each overload met a node of the intern table."""
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
