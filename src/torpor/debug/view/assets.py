"""The files of the page: built from `web/` by `make page`, and part of the package."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from importlib.resources import files
from itertools import combinations, pairwise
from typing import Any, Final

from torpor.debug.view.document import Source

_STYLE: Final = '<link rel="stylesheet" href="app.css">'
_SCRIPT: Final = '<script src="app.js" defer></script>'
_END: Final = "</body>"
_DATA: Final = '<script type="application/json" id="data">'
_META: Final = '<meta charset="utf-8">'
_MOST_COMPARED: Final = 12
"""With up to this many graphs, a file contains all pairwise comparisons; else neighbours only."""


@functools.cache
def asset(name: str) -> bytes:
    """One file of the page."""
    return (files(__package__) / "page" / name).read_bytes()


def html_file(source: Source) -> str:
    """The page as one self-contained file, which loads nothing from elsewhere."""
    style, script = asset("app.css").decode(), asset("app.js").decode()
    data = json.dumps(_everything(source), separators=(",", ":")).replace("<", "\\u003c")
    policy = (
        f"default-src 'none'; script-src '{_digest(script)}'; style-src '{_digest(style)}'; "
        "img-src data:; base-uri 'none'; form-action 'none'"
    )
    page = asset("index.html").decode()
    for old, new in (
        (_META, f'{_META}<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        (_STYLE, f"<style>{style}</style>"),
        (_SCRIPT, ""),
        (_END, f"{_DATA}{data}</script><script>{script}</script>{_END}"),
    ):
        before, found, after = page.partition(old)
        assert found, f"index.html holds {old}"
        page = before + new + after
    return page


def _digest(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _everything(source: Source) -> dict[str, Any]:
    summary = source.summary()
    numbers = [row.number for row in summary.graphs if row.known]
    few = len(numbers) <= _MOST_COMPARED
    compared = combinations(numbers, 2) if few else pairwise(numbers)
    graphs = {number: source.graph(number) for number in numbers}
    return {
        "summary": {**summary.to_json(), "live": False, "state": ""},
        "graphs": [graph.to_json() for graph in graphs.values() if graph is not None],
        "differences": [[a, b, source.difference(a, b)] for a, b in compared],
        "passes": [[number, source.passes(number)] for number in numbers],
    }
