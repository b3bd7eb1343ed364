"""A headless Chromium of the system's, pages that note what goes wrong in them, a large graph."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

import torpor
from torpor.cli.char_gpt import Text, make_text
from torpor.cli.demo_training import DemoPlan, DemoTraining
from torpor.debug.view.server import ViewServer
from torpor.debug.view.sources import FileSource

if TYPE_CHECKING:
    from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

REQUIRED = os.environ.get("TORPOR_TEST_BROWSER") == "required"

if find_spec("playwright") is None and not REQUIRED:
    collect_ignore_glob = ["test_*.py"]  # nothing to drive a browser with: `pip install playwright`

LAYERS = 76  # of the demo's model: a step of more than 10,000 nodes


def chromium() -> str:
    """Where the browser is; tests are skipped without one, but not where it has to be there."""
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "chrome"))), None)
    if found is None and not REQUIRED:
        pytest.skip("no Chromium on this machine; install the package `chromium`")
    assert found is not None, "TORPOR_TEST_BROWSER=required and there is no Chromium"
    return found


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    path = chromium()
    from playwright.sync_api import expect, sync_playwright  # not everywhere

    expect.set_options(timeout=30_000)  # a busy machine compares two large graphs for seconds
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield browser
        browser.close()


@dataclass
class Opened:
    """A page, and what happened in it that should not."""

    page: Page
    wrong: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)


Open = Callable[..., Opened]


@pytest.fixture
def open_page(browser: Browser) -> Iterator[Open]:
    """Opens an address with the options of a browser context; nothing may go wrong in any page."""
    opened: list[Opened] = []

    def open_(address: str, **options: Any) -> Opened:
        options.setdefault("viewport", {"width": 1400, "height": 900})
        context = browser.new_context(**options)
        found = Opened(context.new_page())
        opened.append(found)

        def note(message: ConsoleMessage) -> None:
            if message.type in ("error", "warning"):
                found.wrong.append(message.text)

        found.page.on("console", note)
        found.page.on("pageerror", lambda error: found.wrong.append(str(error)))
        found.page.on("request", lambda request: found.requests.append(request.url))
        found.page.set_default_timeout(30_000)
        found.page.goto(address)
        found.page.locator("[role=tab][aria-selected=true]").wait_for()
        return found

    yield open_
    for each in opened:
        each.page.context.close()
        assert each.wrong == []


@pytest.fixture(scope="session")
def large_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The record of three training steps of the demo's model, very deep and very thin."""
    torpor.use("reference")
    path = tmp_path_factory.mktemp("view") / "large.torpor"
    torch.manual_seed(0)
    plan = DemoPlan(layers=LAYERS, width=8, length=4, batch=1)
    training = DemoTraining("lazy", plan, Text.encode(make_text(50)))
    training.step()
    with torpor.record(path, data=False):
        for _ in range(3):
            training.step()
        training.step().item()
    return path


@pytest.fixture(scope="session")
def large(large_file: Path) -> Iterator[ViewServer]:
    """A page of a graph of 10,000 nodes."""
    source = FileSource(large_file)
    assert max(map(len, source.graphs)) > 10_000
    with ViewServer(source) as server:
        yield server


def results(page: Page) -> Locator:
    """What the search found."""
    return page.get_by_role("listbox", name="Search results").get_by_role("option")
