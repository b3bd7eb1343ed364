"""The YAML file of a backend: what it says, and every mistake in it with its line."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from torpor.codegen import yaml_file
from torpor.codegen.yaml_file import BackendFile, PyYamlMissing, YamlErrors, read

pytest.importorskip("yaml")

EVERY_KEY = """\
backend: Acme_Chip
class_name: Acme
cpp_namespace: acme::lazy
extra_headers: |
  #include <acme.h>
use_out_as_primary: false
device_guard: true
full_codegen:
  - add.Tensor   # a comment
  - mm
  - "slice_scatter"
ir_gen: [selu]
supported:
  - clone
  - fill_.Scalar
  - relu(Tensor self) -> Tensor
autograd:
  - max_pool3d
symint:
  - slice_scatter
non_native:
  - func: scalar(Scalar value, ScalarType type) -> Tensor
    opkind: at::prim::Constant
    properties:
      - ShapeCompute
      - TreatScalarsAsConstants
  - func: expand(Tensor input, int[] size, bool is_scalar_expand=False) -> Tensor
"""


@pytest.fixture
def written(tmp_path: Path):
    def write(text: str) -> Path:
        path = tmp_path / "acme.yaml"
        path.write_text(text, encoding="utf-8")
        return path

    return write


def errors_of(path: Path) -> YamlErrors:
    with pytest.raises(YamlErrors) as caught:
        read(path)
    return caught.value


def names(ops) -> list[str]:
    return [op.name for op in ops]


def test_every_key_of_ltc_is_read(written) -> None:
    file = read(written(EVERY_KEY))
    assert (file.backend, file.name, file.package) == ("Acme_Chip", "acme_chip", "torpor_acme_chip")
    assert file.camel == "Acme"
    assert names(file.full_codegen) == [
        "aten.add.Tensor",
        "aten.mm.default",
        "aten.slice_scatter.default",
    ]
    assert names(file.ir_gen) == ["aten.selu.default"]
    assert names(file.supported) == ["aten.clone.default", "aten.fill_.Scalar", "aten.relu.default"]
    assert names(file.autograd) == ["aten.max_pool3d.default"]
    assert names(file.symint) == ["aten.slice_scatter.default"]
    assert file.ignored == ("cpp_namespace", "extra_headers", "use_out_as_primary", "device_guard")
    scalar, expand = file.non_native
    assert scalar.name == "torpor_acme_chip.scalar.default"
    assert (scalar.opkind, scalar.line) == ("at::prim::Constant", 22)
    assert scalar.properties == ("ShapeCompute", "TreatScalarsAsConstants")
    assert expand.schema.arguments[2].default is False


def test_ops_know_their_lines(written) -> None:
    file = read(written(EVERY_KEY))
    assert [op.line for op in file.full_codegen] == [9, 10, 11]


def test_a_name_is_made_of_the_backends(written) -> None:
    file = read(written("backend: two_words\n"))
    assert (file.camel, file.lowered, file.non_native) == ("TwoWords", (), ())


@pytest.mark.parametrize("empty", ["", " []", " null", "\n  # nothing yet"])
def test_a_list_may_be_empty(written, empty: str) -> None:
    assert read(written(f"backend: acme\nfull_codegen:{empty}\n")).full_codegen == ()


ONE_MISTAKE = [
    # text, line, what is told
    ("full_codegn:\n  - mm", 2, "unknown key 'full_codegn'; did you mean 'full_codegen'?"),
    ("whatever: 1", 2, "unknown key 'whatever'; the keys are backend, class_name"),
    ("backend: other", 2, "key 'backend' is there twice: see line 1"),
    ("full_codegen:\n  - ad.Tensor", 3, "unknown op 'ad.Tensor'; did you mean 'add.Tensor'?"),
    ("full_codegen:\n  - qqqqqqqqqqqq", 3, "unknown op 'qqqqqqqqqqqq'"),
    ("full_codegen:\n  - aten::mm", 3, "unknown op 'aten::mm'; did you mean 'mm'?"),
    ("full_codegen:\n  - mm.default", 3, "unknown op 'mm.default'; did you mean 'mm'?"),
    ("full_codegen:\n  - add.Tensr", 3, "'add' has no overload 'Tensr' in this torch; did you mean "
     "'add.Tensor'?"),
    ("full_codegen:\n  - sub", 3, "'sub' has no overload without a name in this torch; there are "
     "sub.Scalar, sub.Scalar_out, sub.Tensor, sub.out"),
    ("full_codegen:\n  - mm\n  - relu\n  - mm", 5, "'mm' is in full_codegen twice: see line 3"),
    ("full_codegen: [mm, mm]", 2, "'mm' is in full_codegen twice: see line 2"),
    ("full_codegen: [mm]\nsupported:\n  - mm", 4, "'mm' is in full_codegen (line 2) and in "
     "supported; an op is in one list"),
    ("supported: [mm]\nautograd: [mm]", 3, "'mm' is in supported (line 2) and in autograd"),
    ("ir_gen: [mm]\nsymint: [mm, mm]", 3, "'mm' is in symint twice: see line 3"),
    ("symint:\n  - view", 3, "'view' is in symint and in no list of ops; put it in one of "
     "full_codegen, ir_gen, supported, autograd too"),
    ("full_codegen:\n  - mm(Tensor self, Tensor mat2) -> Tensr", 3, "this torch has no such schema "
     "of 'mm'; its schema is 'aten::mm(Tensor self, Tensor mat2) -> Tensor'"),
    ("full_codegen:\n  - mm(Tensor self", 3, "not a schema"),
    ("full_codegen:\n  - mmm(Tensor self) -> Tensor", 3, "unknown op 'mmm'; did you mean 'mm'?"),
    ("full_codegen: mm", 2, "full_codegen is a list, not a text; begin each item with '- '"),
    ("full_codegen:\n  mm: 1", 3, "full_codegen is a list, not keys and values"),
    ("full_codegen:\n  - 3.5", 3, "an op in full_codegen is a text, not a number (float); put it "
     "in quotes: '3.5'"),
    ("full_codegen:\n  - no", 3, "is a text, not a truth value; put it in quotes: 'no'"),
    ("full_codegen:\n  - [mm]", 3, "is a text, not a list"),
    ("full_codegen:\n  - func: mm", 3, "is a text, not keys and values"),
    ("class_name: 9lives", 2, "class_name is part of Python names, which '9lives' cannot be"),
    ("class_name: class", 2, "which 'class' cannot be"),
    ("class_name: [a]", 2, "class_name is a text, not a list"),
    ("cpp_namespace: 3", 2, "cpp_namespace is a text, not a number (int)"),
    ("device_guard: maybe", 2, "device_guard is true or false, not a text"),
    ("extra_headers:\n  a: b", 3, "extra_headers is a text or a list of texts"),
    ("non_native:\n  - cast", 3, "an op in non_native has a key 'func', this is a text"),
    ("non_native:\n  - opkind: x", 3, "an op in non_native needs the key 'func'"),
    ("non_native:\n  - func: f(Tensr x) -> Tensor", 3, "not a schema: unknown type specifier"),
    ("non_native:\n  - func: f(Tensor x) > Tensor", 3, "not a schema"),
    ("non_native:\n  - func: 'f(Tensor x, int lambda) -> Tensor'", 3, "a Python keyword cannot be"),
    ("non_native:\n  - func: f(Tensor x) -> Tensor\n    kind: y", 4, "unknown key 'kind' of an op "
     "in non_native; did you mean 'opkind'?"),
    ("non_native:\n  - func: f(Tensor x) -> Tensor\n    func: g(Tensor x) -> Tensor", 4,
     "key 'func' is there twice"),
    ("non_native:\n  - func: f(Tensor x) -> Tensor\n    properties: [ShapeCash]", 4,
     "unknown property 'ShapeCash'; did you mean 'ShapeCache'?"),
    ("non_native:\n  - func: f(Tensor x) -> Tensor\n  - func: f(Tensor y) -> Tensor", 4,
     "'f' is in non_native twice: see line 3"),
    ("non_native:\n  - func: f.x(Tensor x) -> Tensor\n  - func: f_x(Tensor x) -> Tensor", 4,
     "'f.x' (line 3) and 'f_x' have one name in Python; its node class would be OwnFX too"),
    ("non_native:\n  - func: a_b(Tensor x) -> Tensor\n  - func: aB(Tensor x) -> Tensor", 4,
     "'a_b' (line 3) and 'aB' have one name in Python"),
    ("non_native:\n  - func: g(Tensor self, Tensor self_) -> Tensor", 3,
     "arguments 'self' and 'self_' are both called 'self_' in Python; choose another name"),
    ("non_native:\n  - func: g(Tensor lower_, int lower) -> Tensor", 3,
     "arguments 'lower_' and 'lower' are both called 'lower_' in Python"),
    ("non_native:\n  - func: g(Tensor x, Tensor x) -> Tensor", 3, "two arguments are called 'x'"),
    ("non_native:\n  - func: g(Tensor node, Tensor node_) -> Tensor", 3,
     "an argument cannot be called 'node'"),
    ("non_native:\n  - func: g(Tensor cls) -> Tensor", 3, "an argument cannot be called 'cls'"),
    ("non_native:\n  - func: g(Tensor __debug__) -> Tensor", 3, "cannot be called '__debug__'"),
    ("non_native:\n  - func: __init__(Tensor x) -> Tensor", 3, "an op cannot be called '__init__'"),
    ("non_native:\n  - func: name(Tensor x) -> Tensor", 3, "an op cannot be called 'name'"),
    ("non_native:\n  - func: f.op(Tensor x) -> Tensor", 3, "an op cannot be called 'f.op'"),
    ("non_native:\n  - func: ''", 3, "func is empty"),
    ("non_native:\n  - func: 'f(int[] x=" + "[" * 3000 + "]" * 3000 + ") -> Tensor'", 3,
     "not a schema"),
    ("full_codegen:\n  - 'f(int[] x=" + "[" * 3000 + "]" * 3000 + ") -> Tensor'", 3,
     "not a schema"),
    ("full_codegen: ['']", 2, "an op in full_codegen is empty"),
    ("full_codegen:\n  - mm\n  - '  '", 4, "an op in full_codegen is empty"),
    ("class_name: ''", 2, "class_name is empty"),
    ("full_codegen: " + "[" * 3000 + "]" * 3000, 2, "nested more than 20 deep"),
    ("full_codegen:\n  " + "- " * 3000 + "mm", 3, "nested more than 20 deep"),
    ("full_codegen:" + "".join("\n" + " " * i + "a:" for i in range(1, 3000)), 22,
     "nested more than 20 deep"),
    ("full_codegen: [mm", 3, "not YAML"),
    ("full_codegen:\n\t- mm", 3, "not YAML: found character '\\t'"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "line", "reported"), ONE_MISTAKE)
def test_a_mistake_is_told_with_its_line(written, text: str, line: int, reported: str) -> None:
    path = written(f"backend: acme\n{text}\n")
    (problem,) = errors_of(path).problems
    assert problem.line == line
    assert reported in str(problem)
    assert str(errors_of(path)).startswith(f"{path}:{line}: ")


@pytest.mark.parametrize(
    ("text", "reported"),
    [
        ("", "the file is empty"),
        ("# only a comment\n", "the file is empty"),
        ("full_codegen: [mm]\n", "key 'backend' is missing"),
        ("- mm\n", "expected keys and values, not a list"),
        ("backend:\n", "backend is a text, not nothing"),
        ("backend: ''\n", "backend is empty"),
        ("backend: '  '\n", "backend is empty"),
        ("backend: 3\n", "backend is a text, not a number (int); put it in quotes: '3'"),
        ("backend: a-b\n", "backend is part of Python names, which 'a-b' cannot be"),
        ("backend: Inductor\n", "'Inductor' is taken"),
    ],
)
def test_a_file_without_a_backend_is_refused(written, text: str, reported: str) -> None:
    (problem,) = errors_of(written(text)).problems
    assert (problem.line, reported in str(problem)) == (1, True)


@pytest.mark.parametrize(
    ("data", "line", "reported"),
    [
        (b"backend: acme\nfull_codegen:\n  - \xff\n", 3, "not UTF-8 text"),
        (b"backend: acme\n# \x00\n", 1, "not YAML"),
        (b"backend: acme\n---\nbackend: other\n", 2, "not YAML: but found another document"),
        (b"backend: *name\n", 1, "not YAML: found undefined alias"),
    ],
)
def test_what_is_no_yaml_is_refused(tmp_path: Path, data: bytes, line: int, reported: str) -> None:
    path = tmp_path / "acme.yaml"
    path.write_bytes(data)
    (problem,) = errors_of(path).problems
    assert problem.line == line
    assert reported in str(problem)


def test_a_byte_order_mark_does_no_harm(tmp_path: Path) -> None:
    path = tmp_path / "acme.yaml"
    path.write_bytes(b"\xef\xbb\xbfbackend: acme\n")
    assert read(path).name == "acme"


@pytest.mark.parametrize("func", ["g(Tensor self, Tensor other) -> Tensor",
                                  "g(Tensor lower, Tensor self) -> Tensor",
                                  "names(Tensor x) -> Tensor"])  # fmt: skip
def test_names_that_need_an_underscore_are_no_mistake(written, func: str) -> None:
    (op,) = read(written(f"backend: acme\nnon_native:\n  - func: {func}\n")).non_native
    assert op.schema.signature == f"torpor_acme::{func}"


def test_texts_without_meaning_may_be_empty(written) -> None:
    text = "cpp_namespace: ''\nnon_native:\n  - func: f(Tensor x) -> Tensor\n    opkind: ''\n"
    assert read(written(f"backend: acme\n{text}")).non_native[0].opkind == ""


def test_all_mistakes_are_told_at_once_in_the_order_of_their_lines(written) -> None:
    text = "backend: acme\nsuported: []\nfull_codegen:\n  - mm\n  - nm\n  - mm\nsymint: 3\n"
    errors = errors_of(written(text))
    assert [problem.line for problem in errors.problems] == [2, 5, 6, 7]
    reported = str(errors).splitlines()
    assert reported[1] == "     2 | suported: []"
    assert reported[3] == "     5 |   - nm"
    assert errors.to_json()[0]["hint"] == "did you mean 'supported'?"


def test_without_pyyaml_it_says_what_to_install(written, monkeypatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "yaml", None)
    with pytest.raises(PyYamlMissing, match=r"pip install 'torpor\[codegen\]'"):
        read(written("backend: acme\n"))


LIKE_TORCHS_OWN = """\
backend: Lazy
cpp_namespace: torch::lazy
full_codegen:
  - _adaptive_avg_pool2d
  - arange.start_out
  - bernoulli
  - bernoulli.p
  - norm.ScalarOpt_dim
  - random.from
  - zero
  # ops that return lists of tensors are not there yet
  #- split_copy.Tensor
  - slice_copy.Tensor
supported:
  - _copy_from
  - empty.memory_format
  - logsumexp.out
symint:
  - empty.memory_format
  - slice_copy.Tensor
autograd:
  - max_pool3d

# Ops without a native schema
non_native:
  - func: view(Tensor input, int[] output_size) -> Tensor
    properties:
      - ShapeCompute

  - func: cast(Tensor input, ScalarType dtype, ScalarType? stype) -> Tensor
    opkind: ltc_cast
"""


def test_a_file_like_torchs_own_is_accepted(written) -> None:
    file = read(written(LIKE_TORCHS_OWN))
    assert len(file.lowered) == 11
    assert [op.schema.base for op in file.non_native] == ["view", "cast"]


def _torchs_own() -> Path | None:
    """PyTorch's `ts_native_functions.yaml`: a wheel leaves it out, a checkout has it."""
    import torchgen

    packaged = Path(torchgen.__file__).parent / "packaged" / "ATen" / "native"
    checkout = os.environ.get("TORPOR_TS_NATIVE_FUNCTIONS")
    candidates = [packaged / "ts_native_functions.yaml", *([Path(checkout)] if checkout else [])]
    return next((path for path in candidates if path.is_file()), None)


@pytest.mark.skipif(
    _torchs_own() is None,
    reason="torch's wheel has no ts_native_functions.yaml; name one in TORPOR_TS_NATIVE_FUNCTIONS",
)
def test_torchs_own_file_is_accepted_as_it_is() -> None:
    path = _torchs_own()
    assert path is not None
    file = read(path)
    assert isinstance(file, BackendFile)
    assert len(file.full_codegen) > 150
    assert len(file.non_native) > 10
    assert "aten.selu.default" in names(file.ir_gen)


def test_every_key_that_says_nothing_is_a_key() -> None:
    assert set(yaml_file.IGNORED) < set(yaml_file.KEYS)
