"""The pictures of docs/view.md: ``python -m scripts.view_pictures``, with playwright and Chromium.

Runs `torpor demo` with `TORPOR_VIEW=1` and looks at it while it trains.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

PICTURES = Path(__file__).resolve().parent.parent / "docs" / "pictures"
SIZE = {"width": 1280, "height": 800}


def demo() -> tuple[subprocess.Popen[str], str]:
    """The demo, running; and the address of its page."""
    command = [sys.executable, "-m", "torpor", "demo", "--steps", "1000"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "TORPOR_VIEW": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    found = re.search(r"http://\S+", process.stderr.readline())
    assert found is not None, "the address is the first line"
    return process, found[0]


def take(page: Page, name: str) -> None:
    page.wait_for_timeout(600)
    page.screenshot(path=PICTURES / f"view_{name}.png")
    print(PICTURES / f"view_{name}.png")


def timeline(page: Page, scheme: str) -> None:
    page.get_by_role("tab", name="Timeline").click()
    page.wait_for_timeout(1500)
    for _ in range(3):  # its beginning, in which steps can be told apart
        page.get_by_role("button", name="Zoom in").first.click()
    for _ in range(40):
        page.get_by_role("button", name="Earlier").click()
    take(page, f"timeline_{scheme}")


def graph(page: Page, scheme: str) -> None:
    page.get_by_role("tab", name="Explorer").click()
    page.locator(".drawing[data-items]").wait_for()
    tree = page.get_by_role("tree")
    tree.get_by_role("treeitem", name=re.compile("^forward, ")).locator(".mark").first.click()
    blocks = tree.get_by_role("treeitem", name=re.compile("^blocks, ")).first
    blocks.locator(".mark").first.click()
    tree.get_by_role("treeitem", name=re.compile("×3")).locator(".label").first.click()
    page.get_by_role("button", name="Fit the drawing to its frame").click()
    take(page, f"graph_{scheme}")


def main() -> int:
    process, address = demo()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(
                executable_path=shutil.which("chromium"), args=["--no-sandbox"]
            )
            for scheme in ("light", "dark"):
                page = browser.new_context(color_scheme=scheme, viewport=SIZE).new_page()  # type: ignore[arg-type]  # one of its words
                page.goto(address)
                page.locator("tbody tr").nth(40).wait_for(timeout=100_000)  # it trains lazily now
                timeline(page, scheme)
                graph(page, scheme)
            browser.close()
    finally:
        process.terminate()
        process.wait()
    return 0


if __name__ == "__main__":
    sys.exit(main())
