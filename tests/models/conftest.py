"""One thread for bit-equal kernels, and the table of models at the end of the run.

With `--models-journal FILE` each row of it is noted as it comes, and a run that was interrupted
goes on from there.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from tests import backend_under_test
from torpor.errors import TorporWarning
from torpor.testing.journal import Journal


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--models-journal", metavar="FILE", help="note each training run here")


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(_Noter(config), "torpor-models-journal")


class _Noter:
    """Writes the table to a journal, row by row, and leaves out what is in it already."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        path = config.getoption("--models-journal")
        self.journal = None
        if path and worker is None:
            run = {"backend": backend_under_test.NAME, "torch": torch.__version__}
            self.journal = Journal(Path(path), {**run, "torpor": torpor.__version__})
        known = getattr(self.journal, "records", ())
        # a worker is told nothing where this file is read when the workers are there already
        self.done = set(known if worker is None else worker.get("models_done", ()))

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        node.workerinput["models_done"] = sorted(self.done)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        if over := [item for item in items if item.name in self.done]:
            self.config.hook.pytest_deselected(items=over)
            items[:] = [item for item in items if item.name not in self.done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if self.journal is None or (report.when != "call" and report.passed):
            return
        notes = dict(report.user_properties)
        detail = report.longreprtext if report.failed else ""
        row = {"outcome": report.outcome, "detail": detail, **notes}
        self.journal.add(report.nodeid.rpartition("::")[2], "model", row)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """What an earlier run found out counts too."""
        over = (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED)
        if self.journal is not None and self.done and session.exitstatus in over:
            wrong = any(row["outcome"] == "failed" for row in self.journal.of("model"))
            session.exitstatus = pytest.ExitCode.TESTS_FAILED if wrong else pytest.ExitCode.OK


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Reductions split over threads may round otherwise from run to run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(autouse=True)
def _float32_on_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """cuDNN computes with 32 bits, as it says, and by the same algorithm each time."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)


@pytest.fixture(autouse=True)
def _no_global_state_leaks() -> Iterator[None]:
    """A model test leaves the global generator as it found it."""
    with torch.random.fork_rng(devices=[]):
        yield


@pytest.fixture(autouse=True)
def _compilers_may_warn() -> Iterator[None]:
    """A backend with a compiler of its own may fall back, with a warning: the table counts it."""
    with warnings.catch_warnings():
        if not backend_under_test.BIT_EXACT:
            warnings.simplefilter("ignore", TorporWarning)
            warnings.filterwarnings("ignore", module=r"torch\._(inductor|dynamo|functorch)")
        yield


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print one line for each model and place, from what the tests recorded (also under xdist)."""
    rows = sorted(_rows(terminalreporter))
    if not rows:
        return
    backend = backend_under_test.NAME
    terminalreporter.section(f"models: five training steps on {backend} against eager")
    head = f"{'model':30}{'family':20}{'where':10}{'equal':7}{'eager':>9}{'lazy':>9}"
    terminalreporter.line(head + f"{'ratio':>7}{'fallbacks':>11}{'compiles':>10}{'hits':>6}")
    for row in rows:
        terminalreporter.line(row)
    equal = sum(" yes " in row for row in rows)
    how = "bit for bit" if backend_under_test.BIT_EXACT else "in losses and dropout masks"
    terminalreporter.line(f"{equal} of {len(rows)} equal eager {how}; speeds in steps a second")


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
    fallbacks = sum(
        count for key, count in counters.items() if key.startswith(backend_under_test.FALLBACKS)
    )
    compiles, hits = counters.get("UncachedCompile", 0), counters.get("CachedCompile", 0)
    speeds = f"{eager:9.1f}{lazy:9.1f}{lazy / eager:7.2f}"
    return start + speeds + f"{fallbacks:11}{compiles:10}{hits:6}"
