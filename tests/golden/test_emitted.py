"""The code that is emitted for one op of each kind."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from torpor.codegen import own_ops
from torpor.codegen.emit_nodes import node_class
from torpor.codegen.emit_types import rule_of
from torpor.codegen.torch_schemas import schemas

OPS = (
    "aten.add.Tensor",
    "aten.add_.Tensor",
    "aten.add.out",
    "aten.cat.default",
    "aten.embedding_dense_backward.default",
    "aten.empty.memory_format",
    "aten._foreach_add.List",
    "aten._foreach_add_.List",
    "aten.index.Tensor",
    "aten.native_batch_norm.default",
    "aten.slice_scatter.default",
    "aten.split.Tensor",
    "aten.view.default",
    "aten.where.self",
)


def emitted(name: str) -> str:
    """All that is generated for an op."""
    schema = schemas()[name]
    return (
        f"# {schema.signature}\n"
        f"# facts: {'; '.join(schema.facts)}\n"
        f"# types: {rule_of(schema).value}\n\n"
        f"# nodes.pyi\n\n{node_class(schema)}"
    )


@pytest.mark.skipif(not own_ops.is_for_this_torch(), reason="written for another torch")
@pytest.mark.parametrize("name", OPS)
def test_emitted_code(name: str, golden: Callable[[str, str], None]) -> None:
    golden(f"{name}.txt", emitted(name))


def test_no_golden_file_is_left_over() -> None:
    there = {file.name for file in (Path(__file__).parent / "expected").iterdir()}
    assert there == {f"{name}.txt" for name in OPS}
