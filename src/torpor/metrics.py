"""Counters and timers, cheap enough to be always on.

Ops count themselves in a one-element list each (see `op_cell`): one list increment on the hot
path. Everything else counts by name.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_cells: dict[tuple[str, str], list[int]] = {}  # by counter and overload
_new_nodes: Counter[str] = Counter()
_timers: dict[str, list[float]] = {}
_lines: dict[str, Counter[str]] = {}
_MAX_SAMPLES = 4096
_reports: list[Callable[[], str]] = []


def op_cell(name: str, overload: str = "") -> list[int]:
    """The one-element list in which the recorder of an op counts its calls.

    Cells of several overloads (`aten.add.Tensor`, ...) may count under one name (`lazy::add`).
    """
    return _cells.setdefault((name, overload), [0])


def count_node(op: str) -> None:
    """Count a node that was not met before; the caller holds the trace's lock."""
    _new_nodes[op] += 1


def count(name: str, amount: int = 1) -> None:
    """Add `amount` to the counter `name`."""
    with _lock:
        _counts[name] += amount


def count_line(name: str, site: str) -> None:
    """Count `name` once, also under the source line that caused it."""
    with _lock:
        _counts[name] += 1
        _lines.setdefault(name, Counter())[site] += 1


@contextmanager
def timer(name: str) -> Iterator[None]:
    """Time the body under `name`."""
    start = time.perf_counter()
    try:
        yield
    finally:
        elapsed = time.perf_counter() - start
        with _lock:
            samples = _timers.setdefault(name, [])
            if len(samples) >= _MAX_SAMPLES:
                del samples[: _MAX_SAMPLES // 2]
            samples.append(elapsed)


def counters() -> dict[str, int]:
    """Every counter that is not zero, by name. `lazy::<op>` counts recorded ops."""
    with _lock:
        result = {name: value for name, value in _counts.items() if value}
    total = 0
    for (name, _), calls in recorded().items():
        result[name] = result.get(name, 0) + calls
        total += calls
    result["OpsRecorded"] = total
    return result


def recorded() -> dict[tuple[str, str], int]:
    """How often ops were recorded, by counter and overload ("" where it is not told apart)."""
    return {key: cell[0] for key, cell in list(_cells.items()) if cell[0]}


def new_nodes() -> dict[str, int]:
    """How many nodes of each op were new to the intern table."""
    return dict(_new_nodes)


def lines(name: str) -> dict[str, int]:
    """How often each source line caused the counter `name` (fallbacks and syncs)."""
    with _lock:
        return dict(_lines.get(name, {}))


def timers() -> dict[str, dict[str, float]]:
    """Count, total and percentiles of every timer, in seconds."""
    with _lock:
        snapshot = {name: sorted(samples) for name, samples in _timers.items() if samples}
    return {name: _summary(samples) for name, samples in snapshot.items()}


def _summary(samples: list[float]) -> dict[str, float]:
    last = len(samples) - 1
    return {
        "count": float(len(samples)),
        "total": sum(samples),
        "p50": samples[last // 2],
        "p90": samples[last * 9 // 10],
        "p99": samples[last * 99 // 100],
    }


def add_report(text: Callable[[], str]) -> None:
    """Let `text()` stand at the end of every report."""
    _reports.append(text)


def report() -> str:
    """Counters and timers as an aligned text table, then what others have to report."""
    rows = [f"{name:<44} {value:>12,}" for name, value in sorted(counters().items())]
    rows += [
        f"{name:<44} {t['count']:>12,.0f}  total {t['total'] * 1e3:10.2f} ms"
        f"  p50 {t['p50'] * 1e6:10.1f} us  p99 {t['p99'] * 1e6:10.1f} us"
        for name, t in sorted(timers().items())
    ]
    return "\n".join([*rows, *filter(None, (text() for text in _reports))])


def reset() -> None:
    """Set every counter and timer back to nothing."""
    with _lock:
        _counts.clear()
        _timers.clear()
        _lines.clear()
    _new_nodes.clear()
    for cell in list(_cells.values()):
        cell[0] = 0
