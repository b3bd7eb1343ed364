"""One thread for bit-equal kernels, and the table of models at the end of the run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Reductions split over threads may round otherwise from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _no_global_state_leaks() -> Iterator[None]:
    """A model test leaves the global generator as it found it."""
    with torch.random.fork_rng(devices=[]):
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line for each model and place, from what the tests recorded (also under xdist)."""
    rows = sorted(_rows(terminalreporter))
    if not rows:
        return
    terminalreporter.section("models: five training steps against eager")
    head = f"{'model':30}{'family':20}{'where':10}{'equal':7}{'eager':>9}{'lazy':>9}"
    terminalreporter.line(head + f"{'ratio':>7}{'fallbacks':>11}{'compiles':>10}{'hits':>6}")
    for row in rows:
        terminalreporter.line(row)
    equal = sum(" yes " in row for row in rows)
    terminalreporter.line(
        f"{equal} of {len(rows)} equal eager bit for bit; speeds in steps a second"
    )


def _rows(terminalreporter: Any) -> Iterator[str]:
    for outcome in ("passed", "failed"):
        for report in terminalreporter.stats.get(outcome, []):
            notes = dict(getattr(report, "user_properties", []))
            if report.when == "call" and "model" in notes:
                yield _row(outcome, notes)


def _row(outcome: str, notes: dict[str, Any]) -> str:
    name, family, where = notes["model"]
    verdict = "yes" if outcome == "passed" else "NO"
    start = f"{name:30}{family:20}{where:10}{verdict:7}"
    if "speed" not in notes:
        return start + "   did not finish"
    eager, lazy = notes["speed"]
    counters = notes["counters"]
    fallbacks = sum(count for key, count in counters.items() if key.startswith("aten::"))
    compiles, hits = counters.get("UncachedCompile", 0), counters.get("CachedCompile", 0)
    speeds = f"{eager:9.1f}{lazy:9.1f}{lazy / eager:7.2f}"
    return start + speeds + f"{fallbacks:11}{compiles:10}{hits:6}"
