"""The page a sweep leaves behind, written from what the runs noted."""

from __future__ import annotations

from argparse import Namespace
from dataclasses import asdict
from pathlib import Path

import pytest

from scripts import sweep_backends
from torpor.testing.journal import Journal
from torpor.testing.scorecard import OpResult, Point

STATUSES = ("native", "decomposed", "fallback", "core", "wrong", "skipped")
KIT_RUN = {"backend": "inductor", "device": "lazy", "dtypes": "float32"}
RESULTS = (
    OpResult("add", "native", samples=4),
    OpResult("sort", "fallback", "eager's kernels for aten.sort", ["aten.sort"], samples=2),
    OpResult("mm", "native", "", [], ["aten.t"], samples=2),
    OpResult("exp", "wrong", "float32 sample 0: a | b\nmore", samples=1),
)


@pytest.fixture
def page(tmp_path: Path) -> str:
    kit, models = tmp_path / "kit.jsonl", tmp_path / "models.jsonl"
    journal = Journal(kit, KIT_RUN)
    for result in RESULTS:
        journal.add(result.op, "op", asdict(result))
    broken = Point("contract", "a name", "broken", "x\nE   AssertionError: no name\n")
    journal.add("a", "point", asdict(broken))
    journal.add("b", "point", asdict(Point("errors", "a fix", "held")))
    notes = Journal(models, {"backend": "inductor"})
    counters = {"fallback::aten.sort": 2, "CompileFailed": 1, "UncachedCompile": 4, "Other": 9}
    row = {"outcome": "passed", "detail": "", "model": ("bert", "encoder", "lazy"), "by eager": 2}
    notes.add("test_training_equals_eager[bert-lazy]", "model", {**row, "counters": counters})
    crash = {"outcome": "failed", "detail": "worker 'gw0' crashed"}
    notes.add("test_training_equals_eager[gpt2-lazy]", "model", crash)
    return sweep_backends._page("inductor", kit, models, Namespace(samples=3))


@pytest.mark.parametrize(
    "line",
    [
        "# inductor against eager",
        "| verdict | does not conform |",
        "| contract | 0 | 1 | 0 |",
        "| contract | a name | AssertionError: no name |",
        "4 entries of op_db, 9 samples run forward or backward.",
        "### wrong (1)",
        "| exp | float32 sample 0: a \\| b |",
        "### fallback (1)",
        "| sort | eager's kernels for aten.sort |",
        "### fallback in the backward only (1)",
        "| mm | aten.t |",
        "| bert | encoder | yes | 3 | 2 | 4 | 0 |  |",
        "| gpt2 |  | no | 0 | 0 | 0 | 0 | worker 'gw0' crashed |",
    ],
)
def test_the_page_tells(page: str, line: str) -> None:
    assert line in page.splitlines()


def test_a_sweep_that_stopped_writes_no_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_backends, "PAGES", tmp_path)
    monkeypatch.setattr(sweep_backends, "_run", lambda backend, command: 2)
    assert sweep_backends.main(["torchscript"]) == 2
    assert list(tmp_path.iterdir()) == []


def test_the_page_of_xla_shows_what_is_asked_of_it() -> None:
    lines = (sweep_backends.PAGES / "xla.md").read_text(encoding="utf-8").splitlines()
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines if line[:1] == "|"]
    entries = {row[0]: int(row[1]) for row in rows if row[0] in STATUSES and len(row) == 3}
    assert sum(entries.values()) == 702
    assert entries["wrong"] == 0
    assert entries["native"] + entries["decomposed"] >= 550
    models = [row for row in rows if len(row) == 8 and row[2] in ("yes", "no")]
    assert len(models) >= 20
    assert all(agrees == "yes" for _, _, agrees, *_ in models)
    assert max(int(a_step) for *_, a_step, _, _, _ in models) <= 3
