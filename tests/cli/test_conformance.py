"""`torpor conformance`: the scorecard as text, as JSON and as a page; the exit status says it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from html.parser import HTMLParser

import pytest

import torpor
from torpor.cli import main

SMALL = ["--section", "operators", "--ops", "^(add|sort|nonzero)$", "--samples", "1"]


@pytest.fixture(autouse=True)
def back_to_the_reference() -> Iterator[None]:
    yield
    torpor.use("reference")


def test_the_scorecard_of_the_reference_backend(capsys):
    assert main(["conformance", "reference", *SMALL]) == 0
    reported = capsys.readouterr()
    assert re.search(r"native\s+2", reported.out)
    assert re.search(r"core\s+1", reported.out)
    assert reported.out.splitlines()[-1] == "conforms"
    assert "3/3" in reported.err


def test_json_is_one_object_a_program_can_read(capsys):
    assert main(["conformance", "reference", *SMALL, "--json"]) == 0
    card = json.loads(capsys.readouterr().out)
    assert card["backend"] == "reference"
    assert card["held"] is True
    assert card["operators"]["native"] == 2
    assert {op["op"]: op["status"] for op in card["ops"]}["nonzero"] == "core"


def test_a_broken_backend_is_told_and_the_status_is_1(capsys):
    options = ["--section", "errors", "--section", "operators", "--ops", "^nan_to_num$"]
    assert main(["conformance", "tests.backends.faults:FlushedNaN", *options]) == 0
    capsys.readouterr()
    options = ["--section", "operators", "--ops", "^add$"]
    assert main(["conformance", "tests.backends.faults:WrongDtype", *options]) == 1
    reported = capsys.readouterr().out
    assert "wrong: add: float32 sample 0 forward" in reported
    assert reported.splitlines()[-1] == "does not conform"


@pytest.mark.parametrize(
    "name", ["nosuch", "nosuch.module:Factory", "tests.backends.faults:Nosuch"]
)
def test_a_backend_that_is_not_there_is_told_and_the_status_is_2(name, capsys):
    assert main(["conformance", name, *SMALL]) == 2
    reported = capsys.readouterr()
    assert name.rpartition(":")[2] in reported.err
    assert reported.out == ""


class Page(HTMLParser):
    """Tags that were opened and not closed, and the text of the page."""

    void = frozenset({"meta", "input", "br"})

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        if tag not in self.void:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def test_the_page_is_whole_and_needs_nothing_else(tmp_path, capsys):
    path = tmp_path / "deep" / "report.html"
    faulty = "tests.backends.faults:NoText"
    options = ["--section", "contract", "--section", "operators", "--ops", "^(add|sort)$"]
    assert main(["conformance", faulty, *options, "--html", str(path)]) == 1
    text = path.read_text(encoding="utf-8")
    page = Page()
    page.feed(text)
    assert page.open == []
    assert "the text of a computation is text" in page.text
    assert "does not conform" in page.text
    assert not re.search(r'(?:src|href)="|@import|url\(', text)
