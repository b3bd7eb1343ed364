"""torpor's own generated files: fresh, reproducible, and right for the running torch."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from torpor.codegen import own_ops
from torpor.codegen.emit_types import Rule, rule_of
from torpor.codegen.torch_schemas import fingerprint

MADE = own_ops.files()
this_torch = pytest.mark.skipif(
    not own_ops.is_for_this_torch(), reason="the committed files are for another torch"
)


def test_files_of_another_torch_are_not_compared(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.99.0+cpu")
    assert not own_ops.is_for_this_torch()
    assert own_ops.main(["--check"]) == 0
    assert "another torch than 2.99.0" in capsys.readouterr().out


@this_torch
def test_committed_files_are_fresh() -> None:
    assert own_ops.stale(made=MADE) == []


def test_generating_twice_gives_the_same_bytes(tmp_path: Path) -> None:
    assert own_ops.files() == MADE
    assert sorted(own_ops.write(tmp_path)) == sorted(MADE)
    assert own_ops.write(tmp_path) == []


def test_stale_names_what_is_changed_missing_or_too_much(tmp_path: Path) -> None:
    own_ops.write(tmp_path)
    (tmp_path / "elementwise.py").write_text("changed", encoding="utf-8")
    (tmp_path / "elementwise.pyi").unlink()
    (tmp_path / "left_over.py").write_text("", encoding="utf-8")
    found = ["elementwise.py", "elementwise.pyi", "left_over.py"]
    assert own_ops.stale(tmp_path, MADE) == found
    assert own_ops.write(tmp_path) == found
    assert own_ops.stale(tmp_path, MADE) == []


@this_torch
def test_check_fails_on_stale_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_ops, "files", lambda: MADE | {"elementwise.py": "new"})
    assert own_ops.main(["--check"]) == 1
    assert "stale: src/torpor/inference/_generated/elementwise.py" in capsys.readouterr().out


def test_every_file_names_its_inputs() -> None:
    for text in MADE.values():
        head = text.splitlines()[:2]
        assert "make codegen" in head[0]
        assert torch.__version__.partition("+")[0] in head[0]
        assert fingerprint() in head[1]


def test_two_thousand_overloads_have_a_recorder_a_constructor_and_a_type_rule() -> None:
    assert len(own_ops.recorded()) >= 2000
    typed = [schema for schema in own_ops.nodes() if rule_of(schema) is not Rule.NONE]
    assert len(typed) >= 2000
