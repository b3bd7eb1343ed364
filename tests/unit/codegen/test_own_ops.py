"""torpor's own generated files: fresh, reproducible, and right for the running torch."""

from __future__ import annotations

import ast
import importlib
import sys
from pathlib import Path
from types import FunctionType

import pytest
import torch

from torpor.codegen import own_ops
from torpor.codegen.emit_types import Rule, rule_of
from torpor.codegen.torch_schemas import fingerprint, schemas, target_of
from torpor.ops import recorders
from torpor.ops._generated.recorders import binary
from torpor.ops.recorder_source import source
from torpor.ops.spec import spec_of
from torpor.trace.recorder import make_recorder

MADE = own_ops.files()
aten = torch.ops.aten
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
    (tmp_path / "recorders" / "views.py").unlink()
    (tmp_path / "recorders" / "left_over.py").write_text("", encoding="utf-8")
    found = ["elementwise.py", "recorders/left_over.py", "recorders/views.py"]
    assert own_ops.stale(tmp_path, MADE) == found
    assert own_ops.write(tmp_path) == found
    assert own_ops.stale(tmp_path, MADE) == []


@this_torch
def test_check_fails_on_stale_files(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(own_ops, "files", lambda: MADE | {"elementwise.py": "new"})
    assert own_ops.main(["--check"]) == 1
    assert "stale: src/torpor/ops/_generated/elementwise.py" in capsys.readouterr().out


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


def test_the_model_and_the_running_torch_give_the_same_recorders() -> None:
    for schema in schemas().values():
        assert source(schema) == source(spec_of(target_of(schema))), schema.name


def test_keyword_arguments_are_not_named_like_what_recorders_use() -> None:
    for schema in own_ops.recorded():
        (function,) = ast.parse(source(schema)).body
        assert isinstance(function, ast.FunctionDef)
        keywords = {argument.arg for argument in function.args.kwonlyargs}
        stored = {
            name.id
            for name in ast.walk(function)
            if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)
        }
        assert keywords & stored <= {"device"}, schema.name  # which gets its number


def test_families_are_the_modules_there_are() -> None:
    made = {path.split("/")[1] for path in MADE if path.startswith("recorders/")}
    assert made == {"__init__.py", *(f"{f}.py{i}" for f in recorders.FAMILIES for i in ("", "i"))}


@this_torch
def test_every_generated_recorder_is_used_by_the_running_torch() -> None:
    for family in recorders.FAMILIES:
        importlib.import_module(f"{recorders.PACKAGE}.{family}")
    for schema in own_ops.recorded():
        spec = spec_of(target_of(schema))
        code = recorders.recorder_code(spec)
        assert "_generated" in code.co_filename, schema.name
        assert code.co_qualname == f"record {schema.name}"


def test_ops_of_one_shape_have_code_and_defaults_of_their_own() -> None:
    add, sub = (make_recorder(spec_of(op)) for op in (aten.add.Tensor, aten.sub.Tensor))
    assert isinstance(add, FunctionType)
    assert isinstance(sub, FunctionType)
    assert add.__code__.co_code == sub.__code__.co_code
    assert add.__code__ is not sub.__code__
    assert add.__kwdefaults__ == {"alpha": 1}
    norm = make_recorder(spec_of(aten.native_layer_norm.default))
    softmax = make_recorder(spec_of(aten.linalg_vector_norm.default))
    assert norm.__defaults__ == ()  # type: ignore[attr-defined]  # a function
    assert softmax.__defaults__ == (2, None, False)  # type: ignore[attr-defined]  # a function


def test_another_schema_gets_a_recorder_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in another torch release: the generated text is not for this op."""
    _, function = binary.RECORDERS["aten.add.Tensor"]
    other = ("aten::add.Tensor(Tensor self) -> Tensor", function)
    monkeypatch.setitem(binary.RECORDERS, "aten.add.Tensor", other)
    code = recorders.recorder_code(spec_of(aten.add.Tensor))
    assert code.co_filename == "<torpor recorder aten.add.Tensor>"
    monkeypatch.delitem(binary.RECORDERS, "aten.add.Tensor")
    code = recorders.recorder_code(spec_of(aten.add.Tensor))
    assert code.co_filename == "<torpor recorder aten.add.Tensor>"


def test_an_installation_without_generated_files_records(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("torpor.ops._generated.recorders", "torpor.no_such_package"):
        monkeypatch.setattr(recorders, "PACKAGE", package)
        monkeypatch.setattr(recorders, "family", lambda op: "no_such_module")
        code = recorders.recorder_code(spec_of(aten.add.Tensor))
        assert code.co_filename == "<torpor recorder aten.add.Tensor>"


def test_a_module_is_not_compiled_again_in_every_process(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Where Python may not keep what it compiles, the one recorder is compiled alone."""
    name = f"{recorders.PACKAGE}.factories"
    monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setattr(sys, "pycache_prefix", str(tmp_path))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    code = recorders.recorder_code(spec_of(aten.empty.memory_format))
    assert code.co_filename == "<torpor recorder aten.empty.memory_format>"
    assert name not in sys.modules
    monkeypatch.setattr(sys, "dont_write_bytecode", False)
    code = recorders.recorder_code(spec_of(aten.empty.memory_format))
    assert code.co_filename.endswith("factories.py")
