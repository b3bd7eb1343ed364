"""The page of a program that runs, and of files that somebody else wrote."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from playwright.sync_api import Page, expect

import torpor
from tests.browser.conftest import Open, results
from torpor.debug.file_format import Reader, Writer
from torpor.debug.view.assets import html_file
from torpor.debug.view.server import ViewServer
from torpor.debug.view.sources import FileSource

PROGRAM = """
import sys, torch, torpor
x = torch.ones(3).to("lazy")
for line in sys.stdin:
    y = x
    for _ in range(int(line)):
        y = y * 2
    y.sum().item()
"""


def test_a_program_that_runs_is_followed(open_page: Open, tmp_path: Path) -> None:
    given = {**os.environ, "TORPOR_VIEW": "1", "XDG_RUNTIME_DIR": str(tmp_path)}
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM], env=given, text=True,
        stdin=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdin is not None
    assert process.stderr is not None
    found = re.search(r"http://\S+", process.stderr.readline())
    assert found is not None
    opened = open_page(found[0])
    page = opened.page
    expect(page.locator("#state")).to_have_text("● live")
    page.get_by_role("tab", name="Graphs").click()
    rows = page.get_by_role("table", name="Graphs, as they were met").locator("tbody tr")
    for count, nodes in enumerate((3, 5, 8), start=1):
        process.stdin.write(f"{nodes}\n")
        process.stdin.flush()
        expect(rows).to_have_count(count)
    process.stdin.write("3\n")
    process.stdin.flush()
    expect(rows.first.locator("td").nth(1)).to_have_text("1")  # hits
    page.get_by_role("tab", name="Explorer").click()
    expect(page.get_by_role("combobox", name="Graph").locator("option")).to_have_count(3)
    process.communicate("")
    expect(page.locator("#state")).to_have_text("the program has ended")
    expect(page.locator(".drawing[data-items]")).to_be_visible()
    opened.wrong = [text for text in opened.wrong if "net::ERR_" not in text]


# -- two graphs --------------------------------------------------------------------------------


def test_two_graphs_are_compared_node_by_node(open_page: Open, tmp_path: Path) -> None:
    torpor.use("reference")
    x = torch.ones(3).to("lazy")
    with torpor.record(tmp_path / "f"):
        ((x * 2).cos() + 1).sum().tolist()
        ((x * 2).exp().sin() + 1).sum().tolist()
        ((x * 3).cos() + 1).mean().tolist()
    with ViewServer(FileSource(tmp_path / "f")) as server:
        page = open_page(f"{server.address}#diff").page
        before, after = page.get_by_label("Before"), page.get_by_label("After")
        reported = page.get_by_role("tabpanel", name="Diff").get_by_role("status")
        rows = page.locator(".diff tbody tr")
        before.select_option("0")
        after.select_option("1")
        expect(reported).to_have_text("Nodes: 2 added, 1 removed, 3 the same.")
        expect(rows).to_have_text([
            re.compile("same.*mul"), re.compile("removed.*cos"), re.compile("added.*exp"),
            re.compile("added.*sin"), re.compile("same.*add"), re.compile("same.*sum"),
        ])  # fmt: skip
        after.select_option("2")
        expect(reported).to_have_text("Nodes: 2 added, 2 removed, 2 the same.")
        expect(page.get_by_label("What differs first")).to_contain_text("aten.")
        page.get_by_role("button", name="Swap").click()
        expect(before).to_have_value("2")
        rows.filter(has_text="removed").first.get_by_role("button").click()
        expect(page.get_by_role("complementary", name="Details")).to_contain_text("aten.mul.Tensor")


# -- hostile files -----------------------------------------------------------------------------

HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "</script><script>window.hacked = 1</script>",
    "__proto__",
    "constructor",
    "javascript:window.hacked=1",
    "\u202e\u2066\x00\u2028",
    "]]><!--",
]


def hostile_file(folder: Path) -> Path:
    """A record whose every text is somebody else's."""
    torpor.use("reference")
    x = torch.ones(3).to("lazy")
    with torpor.record(folder / "plain"):
        y = x
        for i, _ in enumerate(HOSTILE):
            y = y * (i + 2)
        y.tolist()
    with Reader(folder / "plain") as reader:
        manifest = dict(reader.manifest)
        parts = [reader.blob(i, "copy") for i in range(len(manifest.pop("blobs")))]
    facts = json.loads(parts[manifest["facts"]])
    every = " ".join(HOSTILE)
    places = list(range(len(HOSTILE)))
    facts["graphs"][0].update(
        name="__proto__", site=every, why=every, failure=every, backend="<b>bold</b>", code=every,
        scopes={"scopes": [["forward", f"Model.{text}"] for text in HOSTILE], "nodes": places},
    )  # fmt: skip
    facts["events"] = [["run", 0.0, 1.0, text, text, 0] for text in HOSTILE]
    facts["events"] += [["__proto__", 0.0, 1.0, "x", "y", 1], ["record", 0.0, 1.0, "", "", 0]]
    parts[manifest["facts"]] = json.dumps(facts).encode()
    lines = {"lines": HOSTILE, "nodes": places}
    parts[manifest["graphs"][0]["lines"]] = json.dumps(lines).encode()
    manifest["versions"] = {**manifest["versions"], "torch": HOSTILE[0], "__proto__": "x"}
    writer = Writer(folder / "<img src=x onerror=alert(1)>.torpor")
    for blob in parts:
        writer.add(blob)
    writer.close(manifest)
    return writer.path


def walk(page: Page) -> None:
    """Look at everything in which a hostile text could stand."""
    for panel in ("Timeline", "Graphs", "Diff", "Memory", "Passes", "Explorer"):
        page.get_by_role("tab", name=panel).click()
        expect(page.get_by_role("tabpanel", name=panel)).to_be_visible()
    page.locator(".drawing[data-items]").wait_for()
    for _ in range(4):
        page.get_by_role("button", name="Unfold more").click()
    items = page.get_by_role("treeitem")
    for i in range(items.count()):
        items.nth(i).locator(".label").first.click()
    for query in ("__proto__", "<script>", "constructor"):
        page.get_by_label("Search nodes").fill(query)
        results(page).first.click()


@pytest.mark.parametrize("form", ["server", "file"])
def test_hostile_texts_are_texts(open_page: Open, tmp_path: Path, form: str) -> None:
    source = FileSource(hostile_file(tmp_path))
    out = tmp_path / "page.html"
    out.write_text(html_file(source), encoding="utf-8")
    with ViewServer(source) as server:
        page = open_page(server.address if form == "server" else out.as_uri()).page
        walk(page)
        assert page.evaluate("[window.hacked, ({}).polluted, document.scripts.length]") == [
            None, None, 1 if form == "server" else 2,
        ]  # fmt: skip
        assert page.locator("img, b:not(#program b), main script").count() == 0
        page.get_by_role("tab", name="Graphs").click()
        shown = page.get_by_role("table", name="Graphs, as they were met")
        expect(shown).to_contain_text("<script>window.hacked = 1</script>")
        expect(shown).to_contain_text("__proto__")
        expect(page.locator("#program")).to_contain_text("<img src=x onerror=alert(1)>")
