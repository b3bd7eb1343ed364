"""The texts of a backend's package: sound for any choice of ops, and each op's lines its own."""

from __future__ import annotations

import ast
import difflib
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor.codegen.backend_package import generated
from torpor.codegen.model import LazyIrSchema
from torpor.codegen.package_text import header, is_generated, method_name, starters
from torpor.codegen.torch_schemas import schemas
from torpor.codegen.yaml_file import BackendFile, DeclaredOp, OwnOp

OPS = sorted(schemas())
EMPTY = BackendFile("acme.yaml", "acme")


def declaring(names: list[str]) -> BackendFile:
    ops = tuple(DeclaredOp(schemas()[name], line) for line, name in enumerate(names))
    return replace(EMPTY, full_codegen=ops)


def test_no_two_ops_share_a_method_or_a_node_class() -> None:
    assert len({method_name(schema) for schema in schemas().values()}) == len(OPS)
    assert len({schema.class_name for schema in schemas().values()}) == len(OPS)


def test_a_package_with_every_op_of_aten_is_python() -> None:
    made = generated(declaring(OPS))
    for path, text in made.items():
        if path.endswith((".py", ".pyi")):
            ast.parse(text)
    tree = ast.parse(made["torpor_acme/_generated/lowering.py"])
    (lowering,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    assert sum(isinstance(node, ast.FunctionDef) for node in lowering.body) == len(OPS)


@settings(max_examples=20, deadline=None)
@given(st.sets(st.sampled_from(OPS), min_size=1, max_size=8), st.data())
def test_an_op_more_only_adds_lines(names: set[str], data: st.DataObject) -> None:
    new = data.draw(st.sampled_from(sorted(names)))
    before, after = generated(declaring(sorted(names - {new}))), generated(declaring(sorted(names)))
    assert list(before) == list(after)
    for path in before:
        if path.endswith((".py", ".pyi")) and len(names) > 1:
            gone = removed(before[path], after[path])
            assert [line for line in gone if new not in line] == [], path


def removed(old: str, new: str) -> list[str]:
    """The lines that are gone from `old`; an empty table that is filled now is none."""
    lines = [
        line[2:] for line in difflib.ndiff(old.splitlines(), new.splitlines()) if line[0] == "-"
    ]
    return [line for line in lines if not line.endswith(("= ()", "= {}"))]


def test_an_in_place_form_that_is_declared_is_no_longer_lowered_by_the_functional_one() -> None:
    before = generated(declaring(["aten.add.Tensor"]))
    after = generated(declaring(["aten.add.Tensor", "aten.add_.Tensor"]))
    path = "torpor_acme/_generated/lowering.py"
    assert '"aten.add_.Tensor": "lower_add_Tensor",' in before[path]
    assert '"aten.add_.Tensor": "lower_add__Tensor",' in after[path]
    assert '"aten.add_.Tensor": "lower_add_Tensor",' not in after[path]


@settings(max_examples=10, deadline=None)
@given(st.permutations(OPS[:200:10]))
def test_the_order_in_the_file_does_not_matter(names: list[str]) -> None:
    assert generated(declaring(names)) == generated(declaring(sorted(names)))


@pytest.mark.parametrize(
    ("op", "parameters"),
    [
        ("aten.add.Tensor", ["self", "node: Node", "self_: Operand", "other: Operand",
                             "alpha: Scalar"]),
        ("aten.cat.default", ["self", "node: Node", "tensors: tuple[Operand, ...]", "dim: int"]),
        ("aten.random.from", None),
        ("aten.index.Tensor", ["self", "node: Node", "self_: Operand",
                               "indices: tuple[Operand | None, ...]"]),
        ("aten.add_.Tensor", ["self", "node: Node", "self_: Value", "other: Operand",
                              "alpha: Scalar"]),
    ],
)  # fmt: skip
def test_a_method_has_the_ops_arguments_with_their_types(
    op: str, parameters: list[str] | None
) -> None:
    text = generated(declaring([op]))["torpor_acme/_generated/lowering.py"]
    method = text[text.index(f"    def {method_name(schemas()[op])}(") :]
    found = [line.strip().rstrip(",") for line in method.splitlines()[1:]]
    found = found[: found.index(") -> Any:")]
    assert "from_: int" in found if parameters is None else found == parameters


def test_ops_of_its_own_have_names_of_their_own() -> None:
    own = OwnOp(LazyIrSchema.parse("torpor_acme::scalar(Scalar value) -> Tensor"), 1)
    file = replace(declaring(["aten.relu.default"]), non_native=(own,))
    made = generated(file)
    assert "class OwnScalar(TypedNode)" in made["torpor_acme/_generated/own_nodes.pyi"]
    assert (
        '"OwnScalar": "torpor_acme.scalar.default"' in made["torpor_acme/_generated/own_nodes.py"]
    )
    assert "def lower_own_scalar(" in made["torpor_acme/_generated/lowering.py"]
    assert "torpor_acme/type_rules.py" in starters(file)
    assert "torpor_acme/type_rules.py" not in starters(EMPTY)


def test_nothing_is_left_to_fill_in() -> None:
    own = OwnOp(LazyIrSchema.parse("torpor_acme::scalar(Scalar value) -> Tensor"), 1)
    for file in (EMPTY, replace(EMPTY, non_native=(own,))):
        for text in (*generated(file).values(), *starters(file).values()):
            assert "{{" not in text


def test_generated_files_say_so_in_their_first_line_and_the_authors_do_not() -> None:
    own = OwnOp(LazyIrSchema.parse("torpor_acme::scalar(Scalar value) -> Tensor"), 1)
    file = replace(EMPTY, non_native=(own,))
    assert all(is_generated(text.encode()) for text in generated(file).values())
    assert not any(is_generated(text.encode()) for text in starters(file).values())


@pytest.mark.parametrize("start", [b"\n", b"\xef\xbb\xbf", b"x = 1  ", b"#"])
def test_the_header_is_of_no_account_elsewhere(start: bytes) -> None:
    line = header(EMPTY).encode()
    assert is_generated(line)
    assert is_generated(line.replace(b"\n", b"\r\n"))
    assert not is_generated(start + line)
    assert not is_generated(b"# Generated by `torpor codegen`, once\n")
    assert not is_generated(b"")
