"""The kit's pytest plugin: its options, its fixture, and the scorecard at the end."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from torpor.backend.registry import make
from torpor.errors import BackendError
from torpor.testing.journal import Journal
from torpor.testing.kit import PLACES, Kit, register_by_path
from torpor.testing.report import write_html
from torpor.testing.scorecard import OpResult, Point, Scorecard

CARD = pytest.StashKey[Scorecard]()
PACKAGE = Path(__file__).resolve().parent


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("torpor", "torpor's conformance kit")
    group.addoption("--backend", metavar="NAME", help="backend to test, or package.module:factory")
    group.addoption(
        "--device",
        choices=PLACES,
        default="lazy",
        help="tensors on the virtual device, or lazy on their own (default: %(default)s)",
    )
    group.addoption("--ops", metavar="REGEX", default="", help="only these entries of op_db")
    group.addoption(
        "--part",
        metavar="K/N",
        type=parse_part,
        default=(1, 1),
        help="every N-th entry of op_db, from the K-th on: N runs make a whole",
    )
    group.addoption("--samples", type=int, default=3, help="samples per op (default: %(default)s)")
    group.addoption(
        "--dtypes", default="float32", help="dtypes of the samples (default: %(default)s)"
    )
    group.addoption("--bit-exact", action="store_true", help="allow no difference from eager")
    group.addoption("--html", metavar="FILE", help="write a report for people")
    group.addoption("--scorecard", metavar="FILE", help="write the scorecard as JSON")
    group.addoption(
        "--journal",
        metavar="FILE",
        help="note each result as it comes; a run that was interrupted goes on from there",
    )


def parse_part(text: str) -> tuple[int, int]:
    """Parse `2/4`."""
    number, _, count = text.partition("/")
    if not (number.isdigit() and count.isdigit() and 1 <= int(number) <= int(count)):
        raise argparse.ArgumentTypeError(f"expected K/N with 1 <= K <= N, got {text!r}")
    return int(number), int(count)


def pytest_configure(config: pytest.Config) -> None:
    name = config.getoption("--backend")
    if not name:
        raise pytest.UsageError("torpor.testing needs --backend NAME")
    try:
        register_by_path(name)
        make(name)
    except (AttributeError, ImportError, BackendError) as error:
        raise pytest.UsageError(f"--backend {name}: {error}") from error
    card = config.stash[CARD] = Scorecard(name, config.getoption("--device"))
    try:
        gatherer = Gatherer(config, card)
    except ValueError as error:
        raise pytest.UsageError(f"--journal: {error}") from error
    config.pluginmanager.register(gatherer, "torpor-scorecard")


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """The backend under test, fresh, in strict mode: no silent fallback to the reference."""
    option = request.config.getoption
    settings = torpor.config
    before = settings.strict, settings.compile_after, settings.cache
    settings.strict, settings.compile_after, settings.cache = True, 0, False
    kit = Kit(option("--backend"), option("--device"), option("--bit-exact"))
    try:
        yield kit
    finally:
        kit.close()
        settings.strict, settings.compile_after, settings.cache = before


class Gatherer:
    """Collects the results of all tests, from all processes, and reports them at the end."""

    def __init__(self, config: pytest.Config, card: Scorecard) -> None:
        self.config = config
        self.card = card
        # In a pytest-xdist worker: the data sent by its main process.
        self.worker: dict[str, Any] | None = getattr(config, "workerinput", None)
        self.journal = None if self.worker is not None else _journal(config)
        self.done: set[str] = set()
        if self.worker is not None:
            self.done.update(self.worker["torpor_done"])
        elif self.journal is not None:
            self.done.update(self.journal.records)
            card.points += [Point(**record) for record in self.journal.of("point")]
            card.ops += [OpResult.from_json(record) for record in self.journal.of("op")]

    @pytest.hookimpl(optionalhook=True)
    def pytest_configure_node(self, node: Any) -> None:
        """Tell every pytest-xdist worker, including late ones, which tests need not run."""
        node.workerinput["torpor_done"] = sorted(self.done)

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            function = getattr(item, "function", None)
            item.user_properties.append(("torpor_doc", (function and function.__doc__) or ""))
        if over := [item for item in items if _key(item) in self.done]:
            self.config.hook.pytest_deselected(items=over)
            items[:] = [item for item in items if _key(item) not in self.done]

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        key = _key(report)
        module, _, name = key.partition("::")
        found = dict(report.user_properties)
        if report.when == "call" and "torpor_op" in found:
            self.add_op(key, OpResult.from_json(json.loads(str(found["torpor_op"]))))
        elif report.when != "call" and report.passed:
            return  # the outcome of the test itself is another report
        elif module != "test_operators":
            self.add_point(key, _point(report, module, name, str(found.get("torpor_doc", ""))))
        elif report.failed:
            entry = name.partition("[")[2].removesuffix("]")
            self.add_op(key, OpResult(entry, "wrong", report.longreprtext))

    def add_op(self, key: str, result: OpResult) -> None:
        self.card.ops.append(result)
        if self.journal is not None:
            self.journal.add(key, "op", asdict(result))

    def add_point(self, key: str, point: Point) -> None:
        self.card.points.append(point)
        if self.journal is not None:
            self.journal.add(key, "point", asdict(point))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"backend {self.card.backend} on {self.card.device}")
        terminalreporter.write_line(self.card.text())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if self.worker is not None:
            return
        if self.done:  # results of an earlier run count too
            ended = pytest.ExitCode.OK if self.card.held else pytest.ExitCode.TESTS_FAILED
            if session.exitstatus in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
                session.exitstatus = ended
        html, path = self.config.getoption("--html"), self.config.getoption("--scorecard")
        if html:
            write_html(self.card, Path(html))
        if path:
            Path(path).write_text(json.dumps(self.card.to_json(), indent=2), encoding="utf-8")


def _journal(config: pytest.Config) -> Journal | None:
    path = config.getoption("--journal")
    if not path:
        return None
    settings = ("--backend", "--device", "--samples", "--dtypes", "--bit-exact")
    run = {name.removeprefix("--"): config.getoption(name) for name in settings}
    return Journal(Path(path), {**run, "torch": torch.__version__, "torpor": torpor.__version__})


def _key(test: pytest.Item | pytest.TestReport) -> str:
    """A test's name, wherever the kit is installed: `test_operators::test_operator[add]`."""
    file, _, name = test.nodeid.partition("::")
    module = Path(file or test.location[0]).stem
    if not module:  # its process died, and the report names no file
        module = "test_operators" if name.startswith("test_operator[") else "test_process"
    return f"{module}::{name}"


def _sentence(name: str) -> str:
    """A test's name as a sentence, with its parameter unchanged."""
    words, bracket, parameter = name.partition("[")
    return words.replace("_", " ") + (f" {bracket}{parameter}" if bracket else "")


def _point(report: pytest.TestReport, module: str, name: str, doc: str) -> Point:
    detail = ""
    if report.failed:
        detail = report.longreprtext
    elif report.skipped and isinstance(report.longrepr, tuple):
        detail = report.longrepr[2]
    return Point(
        section=module.removeprefix("test_"),
        name=_sentence(name.removeprefix("test_")),
        outcome="held" if report.passed else "broken" if report.failed else "skipped",
        detail=detail,
        doc=" ".join(doc.split()),
    )
