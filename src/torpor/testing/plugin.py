"""The pytest side of the kit: its options, its fixture, and the scorecard at the end."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

import torpor
from torpor.backend.registry import make
from torpor.errors import BackendError
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
    group.addoption("--samples", type=int, default=3, help="samples per op (default: %(default)s)")
    group.addoption(
        "--dtypes", default="float32", help="dtypes of the samples (default: %(default)s)"
    )
    group.addoption("--bit-exact", action="store_true", help="allow no difference from eager")
    group.addoption("--html", metavar="FILE", help="write a report for people")
    group.addoption("--scorecard", metavar="FILE", help="write the scorecard as JSON")


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
    config.pluginmanager.register(Gatherer(config, card), "torpor-scorecard")


@pytest.fixture
def kit(request: pytest.FixtureRequest) -> Iterator[Kit]:
    """The backend under test, fresh, in strict mode: nothing stands in for it unseen."""
    option = request.config.getoption
    strict, torpor.config.strict = torpor.config.strict, True
    kit = Kit(option("--backend"), option("--device"), option("--bit-exact"))
    try:
        yield kit
    finally:
        kit.close()
        torpor.config.strict = strict


class Gatherer:
    """Collects what every test found out, from all processes, and shows it at the end."""

    def __init__(self, config: pytest.Config, card: Scorecard) -> None:
        self.config = config
        self.card = card
        self.told: dict[str, str] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        for item in items:
            function = getattr(item, "function", None)
            item.user_properties.append(("torpor_doc", (function and function.__doc__) or ""))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        module = Path(report.location[0]).stem
        found = dict(report.user_properties)
        if report.when == "call" and "torpor_op" in found:
            self.card.ops.append(OpResult.from_json(json.loads(str(found["torpor_op"]))))
        elif module != "test_operators" and (report.when == "call" or not report.passed):
            self.card.points.append(_point(report, module, str(found.get("torpor_doc", ""))))

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        terminalreporter.section(f"backend {self.card.backend} on {self.card.device}")
        terminalreporter.write_line(self.card.text())

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self) -> None:
        if hasattr(self.config, "workerinput"):
            return
        html, path = self.config.getoption("--html"), self.config.getoption("--scorecard")
        if html:
            write_html(self.card, Path(html))
        if path:
            Path(path).write_text(json.dumps(self.card.to_json(), indent=2), encoding="utf-8")


def _sentence(name: str) -> str:
    """A test's name as it reads; its parameter as it is."""
    words, bracket, parameter = name.partition("[")
    return words.replace("_", " ") + (f" {bracket}{parameter}" if bracket else "")


def _point(report: pytest.TestReport, module: str, doc: str) -> Point:
    name = report.location[2].removeprefix("test_")
    detail = ""
    if report.failed:
        detail = report.longreprtext
    elif report.skipped and isinstance(report.longrepr, tuple):
        detail = report.longrepr[2]
    return Point(
        section=module.removeprefix("test_"),
        name=_sentence(name),
        outcome="held" if report.passed else "broken" if report.failed else "skipped",
        detail=detail,
        doc=" ".join(doc.split()),
    )
