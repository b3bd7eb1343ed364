"""Counters, timers and gauges, cheap enough to be always on.

Each op counts its calls in a one-element list (see `op_cell`): on the hot path, that is a single
list increment. Everything else is counted by name, at most once per step. A gauge is a function
that is called when metrics are read.
"""

from __future__ import annotations

import json
import re
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

_lock = threading.Lock()
_counts: Counter[str] = Counter()
_cells: dict[tuple[str, str], list[int]] = {}  # by counter name and overload
_new_nodes: Counter[str] = Counter()
_timers: dict[str, _Timer] = {}
_lines: dict[str, dict[str, _Line]] = {}
_gauges: dict[str, Callable[[], float]] = {}
_reports: list[Callable[[], str]] = []
_on_reset: list[Callable[[], None]] = []

MAX_SAMPLES = 1024
"""Percentiles of a timer are those of its latest samples, at most this many."""
MAX_LINES = 4096
"""How many source lines are kept apart under one name."""
OTHER_LINES = "(other lines)"


class _Timer:
    """Count, total time, and the latest samples."""

    __slots__ = ("count", "samples", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.samples: deque[float] = deque(maxlen=MAX_SAMPLES)

    def add(self, seconds: float) -> None:
        self.count += 1
        self.total += seconds
        self.samples.append(seconds)

    def summary(self) -> dict[str, float]:
        samples = sorted(self.samples)
        share = {f"p{percent}": _percentile(samples, percent) for percent in (50, 90, 99)}
        return {"count": float(self.count), "total": self.total, **share}


def _percentile(samples: list[float], percent: int) -> float:
    """The smallest sample that at least `percent` percent of all samples do not exceed."""
    return samples[-(-percent * len(samples) // 100) - 1]


class _Line:
    """The count and time caused by one source line."""

    __slots__ = ("count", "seconds")

    def __init__(self) -> None:
        self.count = 0
        self.seconds = 0.0


# -- counting ----------------------------------------------------------------------------------


def op_cell(name: str, overload: str = "") -> list[int]:
    """The one-element list in which the recorder of an op counts its calls.

    Cells of several overloads (`aten.add.Tensor`, ...) may have one name (`lazy::add`).
    """
    return _cells.setdefault((name, overload), [0])


def count_node(op: str) -> None:
    """Count a new node; the caller holds the trace's lock."""
    _new_nodes[op] += 1


def count(name: str, amount: int = 1) -> None:
    """Add `amount` to the counter `name`."""
    with _lock:
        _counts[name] += amount


def count_line(name: str, site: str) -> None:
    """Add 1 to the counter `name`, and to its count for the source line that caused it."""
    with _lock:
        _counts[name] += 1
        _line(name, site).count += 1


def time_line(name: str, site: str, seconds: float) -> None:
    """Add to the time that a source line has caused under `name`."""
    with _lock:
        line = _line(name, site)
        line.count += 1
        line.seconds += seconds


def _line(name: str, site: str) -> _Line:
    """The entry for a line, made on first use; the caller holds the lock."""
    known = _lines.setdefault(name, {})
    if site not in known:
        site = site if len(known) < MAX_LINES else OTHER_LINES
    return known.setdefault(site, _Line())


def add_time(name: str, seconds: float) -> None:
    """Add a sample to the timer `name`."""
    with _lock:
        found = _timers.get(name)
        if found is None:
            found = _timers[name] = _Timer()
        found.add(seconds)


def timed(name: str) -> float:
    """The total seconds of the timer `name`."""
    found = _timers.get(name)
    return 0.0 if found is None else found.total


class timer:  # a class: a generator's context manager costs three times as much
    """Time the body under `name`."""

    __slots__ = ("name", "start")

    def __init__(self, name: str) -> None:
        self.name = name

    def __enter__(self) -> None:
        self.start = time.perf_counter()

    def __exit__(self, *_: object) -> None:
        add_time(self.name, time.perf_counter() - self.start)


def add_gauge(name: str, read: Callable[[], float]) -> None:
    """Register `read` as the function that returns the gauge `name`."""
    _gauges[name] = read


# -- reading -----------------------------------------------------------------------------------


def counters() -> dict[str, int]:
    """All counters that are not zero, by name. `lazy::<op>` counts recorded ops."""
    with _lock:
        result = {name: value for name, value in _counts.items() if value}
    total = 0
    for (name, _), calls in recorded().items():
        result[name] = result.get(name, 0) + calls
        total += calls
    result["OpsRecorded"] = total
    return result


def counted(name: str) -> int:
    """One counter, if it is counted by name; fast."""
    return _counts[name]


def recorded() -> dict[tuple[str, str], int]:
    """How often ops were recorded, by counter and overload ("" if overloads are not separate)."""
    return {key: cell[0] for key, cell in list(_cells.items()) if cell[0]}


def new_nodes() -> dict[str, int]:
    """How many nodes of each op were added to the intern table."""
    return dict(_new_nodes)


def lines(name: str) -> dict[str, int]:
    """How often each source line has caused the counter `name` (fallbacks and syncs)."""
    with _lock:
        return {site: line.count for site, line in _lines.get(name, {}).items()}


def line_seconds(name: str) -> dict[str, float]:
    """How many seconds each source line has caused under `name`."""
    with _lock:
        return {site: line.seconds for site, line in _lines.get(name, {}).items()}


def line_names() -> list[str]:
    """The names that are counted by source line."""
    with _lock:
        return sorted(_lines)


def timers() -> dict[str, dict[str, float]]:
    """Count, total and percentiles of every timer, in seconds."""
    with _lock:
        return {name: found.summary() for name, found in _timers.items() if found.count}


def gauges() -> dict[str, float]:
    """The present value of every gauge."""
    return {name: read() for name, read in sorted(_gauges.items())}


def reset() -> None:
    """Reset every counter and timer."""
    with _lock:
        _counts.clear()
        _timers.clear()
        _lines.clear()
    _new_nodes.clear()
    for cell in list(_cells.values()):
        cell[0] = 0
    for forget in _on_reset:
        forget()


def on_reset(forget: Callable[[], None]) -> None:
    """Call `forget` on every reset."""
    _on_reset.append(forget)


# -- reports -----------------------------------------------------------------------------------


def add_report(text: Callable[[], str]) -> None:
    """Append `text()` to every text report."""
    _reports.append(text)


def report(format: str = "text") -> str:
    """All metrics: as aligned text, as `"json"`, or as `"prometheus"` text."""
    if format == "text":
        return _text()
    if format == "json":
        return json.dumps(_everything(), indent=2)
    if format == "prometheus":
        return _prometheus()
    raise ValueError(f"format is 'text', 'json' or 'prometheus', not {format!r}")


def _everything() -> dict[str, Any]:
    with _lock:
        by_line = {
            name: {
                site: {"count": line.count, "seconds": line.seconds} for site, line in found.items()
            }
            for name, found in sorted(_lines.items())
        }
    return {
        "counters": dict(sorted(counters().items())),
        "gauges": gauges(),
        "timers": dict(sorted(timers().items())),
        "lines": by_line,
        "new_nodes": dict(sorted(new_nodes().items())),
    }


def _text() -> str:
    rows = [f"{name:<44} {value:>12,}" for name, value in sorted(counters().items())]
    rows += [f"{name:<44} {value:>12,.0f}" for name, value in gauges().items()]
    rows += [
        f"{name:<44} {t['count']:>12,.0f}  total {t['total'] * 1e3:10.2f} ms"
        f"  p50 {t['p50'] * 1e6:10.1f} us  p90 {t['p90'] * 1e6:10.1f} us"
        f"  p99 {t['p99'] * 1e6:10.1f} us"
        for name, t in sorted(timers().items())
    ]
    for name in line_names():
        rows += _text_of_lines(name)
    return "\n".join([*rows, *filter(None, (text() for text in _reports))])


def _text_of_lines(name: str) -> Iterator[str]:
    seconds = line_seconds(name)
    for site, number in sorted(lines(name).items(), key=lambda item: -item[1]):
        spent = f"  total {seconds[site] * 1e3:10.2f} ms" if seconds[site] else ""
        yield f"  {name:<42} {number:>12,}{spent}  {site}"


# -- Prometheus: https://prometheus.io/docs/instrumenting/exposition_formats/ ----------------------

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|\d+")
Samples = Iterable[tuple[Mapping[str, str], float]]


def _prometheus() -> str:
    text: list[str] = []
    plain, ops = _split(counters())
    for name, value in sorted(plain.items()):
        text += _metric(
            f"{_snake(name)}_total", "counter", f"{name}, counted by torpor", [({}, value)]
        )
    text += _metric(
        "ops_total",
        "counter",
        "Recorded ops, fallbacks and syncs, by torpor's name for them",
        [({"name": name}, value) for name, value in sorted(ops.items())],
    )
    for name, level in gauges().items():
        text += _metric(_snake(name), "gauge", f"{name}, as it is now", [({}, level)])
    text += _line_metrics()
    for name, summary in sorted(timers().items()):
        text += _summary_metric(name, summary)
    return "\n".join(text) + "\n"


def _split(counted: dict[str, int]) -> tuple[dict[str, int], dict[str, int]]:
    """Counters that are metrics of their own, and those that become labels (`lazy::add`)."""
    plain = {name: value for name, value in counted.items() if "::" not in name}
    return plain, {name: value for name, value in counted.items() if "::" in name}


def _line_metrics() -> Iterator[str]:
    counted: list[tuple[dict[str, str], float]] = []
    timed: list[tuple[dict[str, str], float]] = []
    for name in line_names():
        seconds = line_seconds(name)
        for site, number in sorted(lines(name).items()):
            counted.append(({"name": name, "line": site}, number))
            timed.append(({"name": name, "line": site}, seconds[site]))
    yield from _metric("lines_total", "counter", "Syncs and fallbacks by source line", counted)
    yield from _metric("lines_seconds_total", "counter", "Time lost by source line", timed)


def _summary_metric(name: str, summary: dict[str, float]) -> Iterator[str]:
    full = f"torpor_{_snake(name)}_seconds"
    yield f"# HELP {full} {_escaped(name)}: its latest samples, all of them in sum and count"
    yield f"# TYPE {full} summary"
    for quantile, key in (("0.5", "p50"), ("0.9", "p90"), ("0.99", "p99")):
        yield f'{full}{{quantile="{quantile}"}} {summary[key]!r}'
    yield f"{full}_sum {summary['total']!r}"
    yield f"{full}_count {summary['count']:.0f}"


def _metric(name: str, kind: str, help_: str, samples: Samples) -> Iterator[str]:
    full = f"torpor_{name}"
    yield f"# HELP {full} {_escaped(help_)}"
    yield f"# TYPE {full} {kind}"
    for labels, value in samples:
        inside = ",".join(f'{key}="{_label(text)}"' for key, text in labels.items())
        yield f"{full}{{{inside}}} {value}" if inside else f"{full} {value}"


def _snake(name: str) -> str:
    return "_".join(_WORDS.findall(name)).lower() or "unnamed"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n")


def _label(text: str) -> str:
    return _escaped(text).replace('"', '\\"')
