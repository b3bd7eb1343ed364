"""The page of `torpor view` on a graph of 10,000 nodes: every panel, by mouse and by keyboard."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page, expect

from tests.browser.conftest import Open, results
from torpor.debug.view.assets import html_file
from torpor.debug.view.server import ViewServer
from torpor.debug.view.sources import FileSource

PANELS = ["Timeline", "Graphs", "Explorer", "Diff", "Memory", "Passes"]
PAINT_MS = 2000  # until something is to be seen

# Every text on the screen that has less contrast to what is behind it than people need.
FAINT = """() => {
  const parts = (text) => (text.match(/[\\d.]+/g) || []).map(Number);
  const light = ([r, g, b]) => {
    const linear = (v) => (v <= 10.3 ? v / 3294.6 : ((v / 255 + 0.055) / 1.055) ** 2.4);
    return 0.2126 * linear(r) + 0.7152 * linear(g) + 0.0722 * linear(b);
  };
  const behind = (element) => {
    for (let e = element; e; e = e.parentElement) {
      const colour = parts(getComputedStyle(e).backgroundColor);
      if (colour.length === 3 || colour[3] > 0.5) return colour;
    }
    return [255, 255, 255];
  };
  const found = [];
  for (const element of document.querySelectorAll("body *")) {
    const own = [...element.childNodes].some((n) => n.nodeType === 3 && n.textContent.trim());
    if (!own || !element.checkVisibility() || element.closest("noscript, .skip, .hidden")) continue;
    const [a, b] = [light(parts(getComputedStyle(element).color)), light(behind(element))];
    const contrast = (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05);
    if (contrast < 4.5) found.push([contrast, element.tagName, element.textContent]);
  }
  return found;
}"""


def open_panel(page: Page, name: str) -> None:
    page.get_by_role("tab", name=name).click()
    expect(page.get_by_role("tabpanel", name=name)).to_be_visible()


def when(page: Page, mark: str) -> float:
    """Milliseconds from the request to something that the browser notes."""
    (found,) = page.evaluate(
        "(name) => performance.getEntriesByName(name).map((entry) => entry.startTime)", mark
    )
    return float(found)


def fact(page: Page, name: str) -> str:
    """What the details say under `name`."""
    term = page.locator(".details dt", has_text=re.compile(f"^{name}$"))
    return term.locator("xpath=following-sibling::dd[1]").inner_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_panel_of_a_large_graph(large: ViewServer, open_page: Open, scheme: str) -> None:
    opened = open_page(large.address, color_scheme=scheme)
    page = opened.page
    paints = page.evaluate(
        "performance.getEntriesByType('paint').map((e) => [e.name, e.startTime])"
    )
    assert dict(paints)["first-contentful-paint"] < PAINT_MS
    (ready,) = page.evaluate("performance.getEntriesByName('page-ready').map((e) => e.startTime)")
    assert ready < PAINT_MS
    assert page.evaluate("document.documentElement.dataset.theme") == scheme

    for panel, check in (
        ("Timeline", check_timeline),
        ("Graphs", check_graphs),
        ("Explorer", check_explorer),
        ("Diff", check_difference),
        ("Memory", check_memory),
        ("Passes", check_passes),
    ):
        open_panel(page, panel)
        check(page)
        assert page.evaluate(FAINT) == []
    own = f"http://127.0.0.1:{large.port}/{large.token}/"
    asked = [url for url in opened.requests if not url.startswith(("data:", own))]
    assert asked == []


def check_timeline(page: Page) -> None:
    chart = page.get_by_role("img", name=re.compile("^Timeline of"))
    expect(chart.locator("canvas")).to_be_visible()
    assert colours_in(page, ".chart canvas") > 3
    rows = page.get_by_role("table", name="Steps: where the time went").get_by_role("row")
    assert rows.count() > 4
    expect(page.get_by_role("columnheader", name="Idle")).to_be_visible()
    page.get_by_role("button", name="Took").click()
    expect(page.get_by_role("columnheader", name="Took")).to_have_attribute(
        "aria-sort", "descending"
    )
    for name in ("Zoom in", "Later", "Earlier", "Zoom out", "Show all of the time"):
        page.get_by_role("button", name=name, exact=True).and_(page.locator(":visible")).click()


def colours_in(page: Page, selector: str) -> int:
    """How many colours a canvas shows."""
    count = (
        page.locator(selector)
        .and_(page.locator(":visible"))
        .first.evaluate(
            """(canvas) => {
          const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
          const found = new Set();
          for (let i = 0; i < data.length; i += 4 * 97) {
            if (data[i + 3] === 255) found.add((data[i] << 16) | (data[i + 1] << 8) | data[i + 2]);
          }
          return found.size;
        }"""
        )
    )
    return int(count)


def check_graphs(page: Page) -> None:
    table = page.get_by_role("table", name="Graphs, as they were met")
    rows = table.get_by_role("row")
    assert rows.count() >= 3
    expect(table.get_by_role("columnheader", name="Hits")).to_be_visible()
    sizes = [text.replace(",", "") for text in table.locator("td:nth-child(2)").all_inner_texts()]
    assert max(map(int, sizes)) > 10_000


def check_explorer(page: Page) -> None:
    tree = page.get_by_role("tree", name="Outline of the graph")
    forward = tree.get_by_role("treeitem", name=re.compile("^forward, "))
    expect(forward).to_have_attribute("aria-expanded", "false")
    drawing = page.locator(".drawing")
    few = int(drawing.get_attribute("data-items") or 0)
    assert 3 <= few < 50
    page.get_by_role("button", name="Unfold more").click()
    expect(forward).to_have_attribute("aria-expanded", "true")
    assert int(drawing.get_attribute("data-items") or 0) > few
    expect(tree.get_by_role("treeitem", name=re.compile("^CharGPT, ")).first).to_be_visible()
    page.get_by_label("Search nodes").fill("blocks.17.attention.qkv mm.default")
    expect(results(page).first).to_be_visible()
    results(page).first.click()
    check_details(page)
    assert colours_in(page, ".drawing canvas:nth-of-type(3)") >= 3
    page.get_by_role("button", name="Fold all").click()
    assert int(drawing.get_attribute("data-items") or 0) == few


def check_details(page: Page) -> None:
    details = page.get_by_role("complementary", name="Details")
    expect(details.get_by_role("heading", name="aten.mm.default")).to_be_visible()
    assert fact(page, "Shape") == "[4,24]"
    assert fact(page, "Dtype") == "float32"
    assert "operations" in fact(page, "Cost")
    assert "alive" in fact(page, "Memory")
    assert "char_gpt.py" in fact(page, "Source line")
    assert fact(page, "Module") == "forward: CharGPT.blocks.17.attention.qkv"
    expect(details.locator("pre mark")).to_contain_text("aten.mm.default")
    details.get_by_role("button", name=re.compile("^All .* lines$")).click()
    dialog = page.get_by_role("dialog", name=re.compile("^Generated code of"))
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)
    operand = details.locator(".links button").first
    words = operand.inner_text().split()[-1]
    operand.click()
    expect(details.get_by_role("heading", level=3)).to_contain_text(words)


def check_difference(page: Page) -> None:
    before, after = page.get_by_label("Before"), page.get_by_label("After")
    before.select_option(index=0)
    after.select_option(index=1)
    panel = page.get_by_role("tabpanel", name="Diff")
    expect(panel.get_by_role("status")).to_contain_text("added")
    expect(page.get_by_label("What differs first")).not_to_be_empty()
    after.select_option(index=0)
    expect(panel.get_by_role("status")).to_have_text(re.compile("^Nodes: 0 added, 0 removed"))
    after.select_option(index=1)


def check_memory(page: Page) -> None:
    chart = page.get_by_role("img", name=re.compile("^Memory over the"))
    expect(chart.locator("canvas")).to_be_visible()
    table = page.get_by_role("table", name="Memory by line")
    assert table.get_by_role("row").count() > 5
    page.get_by_role("button", name="Show the node at the peak").click()
    expect(page.get_by_role("tabpanel", name="Explorer")).to_be_visible()
    expect(page.get_by_role("complementary", name="Details").locator("dt").first).to_be_visible()
    open_panel(page, "Memory")


def check_passes(page: Page) -> None:
    panel = page.get_by_role("tabpanel", name="Passes")
    text = panel.get_by_label("The graph as text")
    expect(text).to_have_text(re.compile(r"^graph\([\s\S]*\breturn %"))
    recorded = text.inner_text()
    after = panel.get_by_label(re.compile("^Pass"))
    assert after.locator("option").all_inner_texts() == ["recorded", "expand (nothing to do)"]
    after.select_option(index=1)
    expect(panel.get_by_role("status")).not_to_have_text(re.compile("^before"))
    assert text.inner_text() == recorded


# -- keyboard ----------------------------------------------------------------------------------


def focused(page: Page) -> str:
    found = page.evaluate(
        "document.activeElement.getAttribute('aria-label') || document.activeElement.textContent"
    )
    return str(found)


def test_the_keyboard_alone_reaches_everything(large: ViewServer, open_page: Open) -> None:
    page = open_page(large.address).page
    press = page.keyboard.press
    press("Tab")
    assert focused(page) == "Skip to the panel"
    press("Tab")
    assert focused(page).startswith("Switch to")
    press("Tab")
    assert focused(page) == "Timeline"
    for name in (*PANELS[1:], PANELS[0]):
        press("ArrowRight")
        assert focused(page) == name
        expect(page.get_by_role("tabpanel", name=name)).to_be_visible()
    press("End")
    assert focused(page) == "Passes"
    press("/")
    expect(page.get_by_label("Search nodes")).to_be_focused()
    expect(page.locator(".drawing[data-items]")).to_be_visible()
    page.keyboard.type("%100 ")
    expect(results(page).first).to_be_visible()
    press("ArrowDown")
    press("Enter")
    expect(page.locator(".details dt").first).to_be_visible()
    press("Escape")
    expect(page.get_by_label("Search nodes")).to_be_focused()
    press("Escape")
    expect(page.get_by_label("Search nodes")).to_have_value("")
    expect(page.locator("[role=treeitem]:focus")).to_have_count(1)


def test_the_outline_by_keyboard(large: ViewServer, open_page: Open) -> None:
    page = open_page(f"{large.address}#explorer").page
    press = page.keyboard.press
    page.locator(".drawing[data-items]").wait_for()
    page.get_by_label("Search nodes").focus()
    press("Tab")
    assert focused(page).startswith("forward, ")
    press("ArrowRight")
    here = page.locator("[role=treeitem]:focus")
    expect(here).to_have_attribute("aria-expanded", "true")
    press("ArrowRight")
    assert focused(page).startswith("CharGPT, ")
    expect(page.locator(".details h3")).to_have_text("CharGPT")
    press("Enter")
    expect(here).to_have_attribute("aria-expanded", "false")
    press("Enter")
    expect(here).to_have_attribute("aria-expanded", "true")
    press("ArrowDown")
    assert not focused(page).startswith("CharGPT")
    press("Escape")
    assert focused(page).startswith("CharGPT, ")
    press("ArrowLeft")
    press("ArrowLeft")
    assert focused(page).startswith("forward, ")
    press("End")
    press("Home")
    assert focused(page).startswith("forward, ")


def test_the_drawing_by_keyboard_and_mouse(large: ViewServer, open_page: Open) -> None:
    page = open_page(f"{large.address}#explorer").page
    drawing = page.locator(".drawing[data-items]")
    drawing.focus()
    for key in ("ArrowLeft", "ArrowDown", "+", "-", "0"):
        page.keyboard.press(key)
    few = int(drawing.get_attribute("data-items") or 0)
    tree = page.get_by_role("tree")
    tree.get_by_role("treeitem", name=re.compile("^optimizer, ")).locator(".label").first.click()
    box = drawing.bounding_box()
    assert box is not None
    page.mouse.dblclick(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    page.mouse.wheel(0, -200)
    drawing.focus()
    page.keyboard.press("Enter")
    assert int(drawing.get_attribute("data-items") or 0) >= few


# -- people who do not see it ------------------------------------------------------------------

NAMED = {
    "button", "tab", "treeitem", "option", "combobox", "searchbox", "image", "img", "table",
    "tabpanel", "tree", "dialog", "toolbar", "tablist", "textbox", "link", "complementary",
}  # fmt: skip


@pytest.mark.parametrize("panel", PANELS)
def test_everything_has_a_name(large: ViewServer, open_page: Open, panel: str) -> None:
    page = open_page(large.address).page
    open_panel(page, panel)
    if panel == "Explorer":
        page.locator(".drawing[data-items]").wait_for()
    session = page.context.new_cdp_session(page)
    nodes: list[dict[str, Any]] = session.send("Accessibility.getFullAXTree")["nodes"]
    shown = [node for node in nodes if not node["ignored"]]
    roles = {node["role"]["value"] for node in shown}
    assert {"tab", "tabpanel", "heading", "button"} <= roles
    nameless = [
        node
        for node in shown
        if node["role"]["value"] in NAMED and not node.get("name", {}).get("value", "").strip()
    ]
    assert nameless == []


def test_headings_landmarks_and_language(large: ViewServer, open_page: Open) -> None:
    page = open_page(large.address).page
    assert page.locator("html").get_attribute("lang") == "en"
    assert page.title().endswith("torpor view")
    expect(page.get_by_role("heading", level=1)).to_have_text("torpor view")
    for role in ("main", "banner"):
        expect(page.get_by_role(role)).to_have_count(1)  # type: ignore[arg-type]  # both are roles
    for panel in PANELS:
        open_panel(page, panel)
        expect(page.get_by_role("tabpanel").get_by_role("heading", level=2)).to_have_count(1)


# -- colours -----------------------------------------------------------------------------------


def test_the_switch_changes_the_colours_and_is_remembered(
    large: ViewServer, open_page: Open
) -> None:
    page = open_page(large.address, color_scheme="light").page

    def background() -> Any:
        return page.evaluate("getComputedStyle(document.body).backgroundColor")

    light = background()
    page.get_by_role("button", name="Switch to dark colours").click()
    dark = background()
    assert light != dark
    page.reload()
    page.get_by_role("button", name="Switch to light colours").wait_for()
    assert background() == dark


def test_the_system_changes_the_colours(large: ViewServer, open_page: Open) -> None:
    page = open_page(large.address, color_scheme="light").page
    page.emulate_media(color_scheme="dark")
    expect(page.locator("html")).to_have_attribute("data-theme", "dark")


# -- one file ----------------------------------------------------------------------------------


def test_one_file_works_without_any_network(
    large_file: Path, open_page: Open, tmp_path: Path
) -> None:
    out = tmp_path / "page.html"
    out.write_text(html_file(FileSource(large_file)), encoding="utf-8")
    opened = open_page(out.as_uri(), offline=True)
    page = opened.page
    assert when(page, "first-contentful-paint") < PAINT_MS
    checks = (
        check_timeline, check_graphs, check_explorer, check_difference, check_memory, check_passes,
    )  # fmt: skip
    for panel, check in zip(PANELS, checks, strict=True):
        open_panel(page, panel)
        check(page)
    assert [u for u in opened.requests if not u.startswith(("data:", out.as_uri()))] == []


def test_a_narrow_window_is_not_wider_than_it_is(large: ViewServer, open_page: Open) -> None:
    page = open_page(large.address, viewport={"width": 480, "height": 800}).page
    for panel in PANELS:
        open_panel(page, panel)
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert page.evaluate(wide) <= 0
