"""What is covered: counted right, and written down."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from scripts.op_db_ops import measure
from torpor.codegen import coverage
from torpor.codegen.torch_schemas import schemas
from torpor.codegen.yaml_file import read

ROOT = Path(__file__).resolve().parents[3]
SAME_TORCH = torch.__version__.startswith(coverage.op_db_version())
needs_that_torch = pytest.mark.skipif(
    not SAME_TORCH, reason=f"written down with torch {coverage.op_db_version()}"
)


@pytest.fixture(scope="module")
def own() -> coverage.OwnCoverage:
    return coverage.of_torpor()


def test_two_thousand_overloads_have_a_constructor_and_a_type_rule(own) -> None:
    assert own.overloads == len(schemas())
    assert 2_000 <= own.typed < own.constructors < own.overloads


def test_every_kind_of_type_rule_is_in_the_table(own) -> None:
    _, rows = coverage.rule_table(own)
    assert len(rows) == len(own.rules) == len(coverage.Rule)


def test_every_overload_is_counted_once(own) -> None:
    rows = own.families.values()
    assert sum(row["overloads"] for row in rows) == own.overloads
    assert sum(row[how] for row in rows for how in coverage.HOW) == own.overloads
    assert sum(row["constructor"] for row in rows) == own.constructors == sum(own.rules.values())


@pytest.mark.parametrize(
    ("op", "how"),
    [
        ("aten.add.Tensor", "node"),
        ("aten.add_.Tensor", "node"),
        ("aten.view.default", "view"),
        ("aten.dropout.default", "composite"),
        ("aten.item.default", "composite"),
        ("aten.rand.default", "random"),
        ("aten._local_scalar_dense.default", "eager"),
        ("aten.resize_.default", "metadata"),
    ],
)
def test_how_an_op_is_recorded(op: str, how: str) -> None:
    assert coverage.how_recorded(schemas()[op]) == how


@needs_that_torch
def test_the_page_is_what_the_command_writes(own) -> None:
    assert (ROOT / "docs" / "coverage.md").read_text(encoding="utf-8") == coverage.page(own)


@needs_that_torch
def test_what_entries_bring_to_a_backend_is_written_down_right() -> None:
    names = ["addmm", "nn_functional_linear", "softmax", "nn_functional_layer_norm", "T"]
    assert measure(names) == {name: coverage.op_db()[name] for name in names}


def test_in_place_ops_go_with_their_functional_form() -> None:
    known = schemas()
    chosen = ["aten.add.Tensor", "aten.relu.default", "aten.view.default", "aten.mm.default",
              "aten._foreach_add.List", "aten.fill.Scalar", "aten.cat.default"]  # fmt: skip
    found = coverage.twins(known[name] for name in chosen)
    assert {name: op.name for name, op in found.items()} == {
        "aten.add_.Tensor": "aten.add.Tensor",
        "aten.relu_.default": "aten.relu.default",
        "aten.fill_.Scalar": "aten.fill.Scalar",
    }


def test_a_backends_shares_are_those_of_its_ops(tmp_path: Path) -> None:
    path = tmp_path / "a.yaml"
    path.write_text(
        "backend: a\nfull_codegen: [add.Tensor, relu]\nsupported: [threshold_backward]\n"
    )
    covered = coverage.of_backend(read(path))
    shares = {share.what: share for share in covered.shares}
    assert (shares["ATen overloads"].covered, shares["ATen overloads"].total) == (3, len(schemas()))
    assert shares["of those that reach a backend"].covered == 5  # add_ and relu_ too
    assert shares["core ATen"].covered == 2
    entries = coverage.op_db()
    ops = {"aten.add.Tensor", "aten.add_.Tensor", "aten.relu.default", "aten.relu_.default",
           "aten.threshold_backward.default"}  # fmt: skip
    expected = [e for e in entries.values() if e["forward"] and ops.issuperset(e["forward"])]
    assert shares["op_db entries, forward"].covered == len(expected) > 1
    assert "aten.mm.default" in covered.uncovered_core
    assert "aten.relu.default" not in covered.uncovered_core
    assert covered.to_json()["covered"]["core ATen"] == {
        "covered": 2,
        "of": shares["core ATen"].total,
    }
