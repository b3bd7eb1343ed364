"""Runs the kit from a program, such as `torpor conformance`."""

from __future__ import annotations

import contextlib
import io
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TextIO

import pytest

from torpor.testing.plugin import CARD, PACKAGE
from torpor.testing.scorecard import Scorecard

Advance = Callable[[int, str], None]  # called with the number of tests and one test's outcome


@dataclass
class Watcher:
    """A pytest plugin that reports progress and keeps the scorecard."""

    advance: Advance | None = None
    stream: TextIO = field(default_factory=lambda: sys.stderr)  # saved before pytest redirects it
    total: int = 0
    card: Scorecard | None = None
    seen: set[str] = field(default_factory=set)

    def pytest_configure(self, config: pytest.Config) -> None:
        self.card = config.stash.get(CARD, None)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self.total = max(self.total, len(session.items))

    @pytest.hookimpl(optionalhook=True)
    def pytest_xdist_node_collection_finished(self, ids: Sequence[str]) -> None:
        self.total = max(self.total, len(ids))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        done = report.when != "teardown" and (report.when != "setup" or not report.passed)
        if done and report.nodeid not in self.seen and self.advance is not None:
            self.seen.add(report.nodeid)
            with contextlib.redirect_stderr(self.stream):
                self.advance(self.total, f"{report.outcome} {report.location[2]}")


@dataclass(frozen=True)
class Outcome:
    """The result of a run of the kit."""

    status: int
    card: Scorecard
    output: str

    @property
    def held(self) -> bool:
        return self.status == 0 and self.card.held


def run_kit(
    backend: str,
    *selection: str,
    device: str = "lazy",
    options: Sequence[str] = (),
    advance: Advance | None = None,
) -> Outcome:
    """Run the kit on `backend` in this process.

    `selection` are modules of the kit or tests in them ("test_contract",
    "test_models::test_dropout_masks_are_eagers"); default is everything. Pytest settings in the
    current directory are ignored.
    """
    watcher = Watcher(advance)
    output = io.StringIO()
    arguments = [
        *(_path(part) for part in selection or ("",)),
        *("-p", "torpor.testing.plugin", "-p", "no:cacheprovider", "-c", os.devnull),
        *("--rootdir", str(PACKAGE), "--import-mode=importlib", "-q", "--tb=short"),
        *("--capture=sys", "-W", "ignore::pytest.PytestAssertRewriteWarning"),
        *("--backend", backend, "--device", device, *options),
    ]
    # Output and warnings are the kit's, not the calling program's.
    with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
        status = pytest.main(arguments, plugins=[watcher])
    card = watcher.card or Scorecard(backend, device)
    return Outcome(int(status), card, output.getvalue())


def _path(part: str) -> str:
    module, separator, rest = part.partition("::")
    file = PACKAGE / f"{module}.py" if module else PACKAGE
    return f"{file}{separator}{rest}"


def modules() -> list[str]:
    """The sections of the kit."""
    return sorted(path.stem for path in Path(PACKAGE).glob("test_*.py"))
