"""Gathers what every entry reported (from all xdist workers) and prints the table at the end."""

from __future__ import annotations

import json

import pytest
import torch

from tests import backend_under_test
from tests.ops.results import Result
from tests.ops.sweep import entries
from tests.ops.table import RECORDED_SHARE, recorded_share, table
from torpor.testing.plugin import parse_part

_RESULTS = pytest.StashKey[list[Result]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "every N-th entry, from the K-th on: N runs make a whole"
    parser.addoption("--part", metavar="K/N", type=parse_part, default=(1, 1), help=text)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    number, count = config.getoption("--part")
    chosen = set(list(entries())[number - 1 :: count])
    others = [item for item in items if _entry_of(item) not in chosen | {None}]
    config.hook.pytest_deselected(items=others)
    items[:] = [item for item in items if _entry_of(item) in chosen | {None}]


def _entry_of(item: pytest.Item) -> str | None:
    entry: str | None = getattr(item, "callspec", None) and item.callspec.params.get("entry")
    return entry


def pytest_configure(config: pytest.Config) -> None:
    torch.set_num_threads(1)
    config.stash[_RESULTS] = []
    config.pluginmanager.register(_Gatherer(config), "torpor-op-db")


class _Gatherer:
    def __init__(self, config: pytest.Config) -> None:
        self.results: list[Result] = config.stash[_RESULTS]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call":
            records = [value for name, value in report.user_properties if name == "op_db"]
            self.results.extend(Result.from_json(json.loads(str(r))) for r in records)

    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        """A complete sweep in which too many entries fell back has failed."""
        if hasattr(session.config, "workerinput"):
            return
        if any(_too_few_recorded(self.results, mode) for mode in ("lazy", "concrete")):
            session.exitstatus = max(session.exitstatus, pytest.ExitCode.TESTS_FAILED)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not self.results:
            return
        terminalreporter.section(f"op_db on {backend_under_test.NAME} against eager")
        terminalreporter.write_line(table(self.results))
        for mode in ("lazy", "concrete"):
            if _too_few_recorded(self.results, mode):
                text = (
                    f"FAILED: on {mode} fewer than {RECORDED_SHARE:.0%} recorded without fallback"
                )
                terminalreporter.write_line(text, red=True)


def _too_few_recorded(results: list[Result], mode: str) -> bool:
    own = [r for r in results if r.mode == mode]
    return len(own) == len(entries()) and recorded_share(own) < RECORDED_SHARE
