"""`torpor codegen`: the package of a backend from its file, and what it covers."""

from __future__ import annotations

import ast
import copy
import difflib
import importlib
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import torpor
from torpor.backend import registry
from torpor.backends.declared import EAGER
from torpor.cli import main
from torpor.errors import BackendError
from torpor.ir import TensorType

SOURCE = Path(torpor.__file__).resolve().parents[1]
TEXT = """\
backend: {name}
full_codegen:
  - add.Tensor
  - addmm
  - mm
  - native_batch_norm
  - relu
  - sum.dim_IntList
  - _foreach_add.List
  - random.from
supported:
  - fill_.Scalar
  - split.Tensor
autograd:
  - max_pool3d
non_native:
  - func: view(Tensor input, int[] output_size) -> Tensor
  - func: twice(Tensor x, *, int times=2) -> Tensor
    opkind: acme_twice
"""


class Project:
    """A backend's file and the folder its package is written to."""

    def __init__(self, folder: Path, name: str, text: str = TEXT) -> None:
        self.name, self.out, self.file = name, folder / "out", folder / f"{name}.yaml"
        self.package = f"torpor_{name}"
        self.put(text.format(name=name))

    def put(self, text: str) -> None:
        self.file.write_text(text, encoding="utf-8")

    def add(self, op: str, after: str) -> None:
        self.put(self.file.read_text().replace(f"  - {after}\n", f"  - {after}\n  - {op}\n"))

    def codegen(self, *options: str) -> int:
        return main(["codegen", str(self.file), "--out", str(self.out), *options])

    def files(self) -> dict[str, bytes]:
        found = [path for path in self.out.rglob("*") if path.is_file()]
        return {
            str(path.relative_to(self.out)): path.read_bytes()
            for path in found
            if "__pycache__" not in path.parts
        }

    def load(self, module: str = "") -> Any:
        return importlib.import_module(self.package + module)


@pytest.fixture
def project(tmp_path: Path) -> Project:
    return Project(tmp_path, "acme")


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Project]:
    """A package that can be imported; its backend is known while these tests run."""
    made = Project(tmp_path_factory.mktemp("generated"), "gen_acme")
    assert made.codegen() == 0
    sys.path.insert(0, str(made.out))
    made.load()
    yield made
    torpor.use("reference")
    sys.path.remove(str(made.out))
    registry._factories.pop(made.name)
    for module in [name for name in sys.modules if name.partition(".")[0] == made.package]:
        del sys.modules[module]


@pytest.fixture
def on_it(generated: Project) -> Iterator[Project]:
    with torpor.using(generated.name):
        torpor.metrics.reset()
        yield generated
        torpor.sync(wait=True)


def fallbacks() -> set[str]:
    names = torpor.metrics.counters()
    return {n.removeprefix("fallback::") for n in names if n.startswith("fallback::")}


# -- writing -----------------------------------------------------------------------------------


def test_a_package_is_written_and_the_files_are_listed(project: Project, capsys) -> None:
    assert project.codegen("--json") == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["written"] == sorted(project.files())
    assert reported["package"] == "torpor_acme"
    assert reported["declared"]["non_native"] == [
        "torpor_acme.view.default",
        "torpor_acme.twice.default",
    ]
    assert reported["covered"]["ATen overloads"]["covered"] == 10
    for path, text in project.files().items():
        if path.endswith((".py", ".pyi")):
            ast.parse(text)


def test_the_table_of_coverage_is_printed(project: Project, capsys) -> None:
    assert project.codegen() == 0
    reported = capsys.readouterr().out
    for what in ("ATen overloads", "core ATen", "op_db entries, forward"):
        assert what in reported
    assert f"{len(project.files())} files written" in reported


def test_without_a_folder_the_file_is_checked_alone(project: Project, capsys) -> None:
    assert main(["codegen", str(project.file)]) == 0
    assert "nothing was written" in capsys.readouterr().out
    assert not project.out.exists()


def test_writing_again_changes_no_byte(project: Project, capsys) -> None:
    project.codegen()
    before = project.files()
    capsys.readouterr()
    assert project.codegen() == 0
    assert "nothing has changed" in capsys.readouterr().out
    assert project.files() == before
    for path in before:
        (project.out / path).unlink()
    project.codegen()
    assert project.files() == before


def test_the_order_of_ops_in_the_file_does_not_matter(project: Project) -> None:
    project.codegen()
    before = project.files()
    text = project.file.read_text()
    project.put(
        text.replace("  - mm\n", "").replace("  - add.Tensor\n", "  - mm\n  - add.Tensor\n")
    )
    project.codegen()
    assert project.files() == before


def test_an_op_more_touches_its_own_lines_only(project: Project) -> None:
    project.codegen()
    before = project.files()
    project.add("mul.Tensor", after="relu")
    assert project.codegen() == 0
    after = project.files()
    changed = {path for path in after if before.get(path) != after[path]}
    names = ("README.md", "declared.py", "lowering.py", "nodes.py", "nodes.pyi")
    assert changed == {f"torpor_acme/_generated/{name}" for name in names}
    for path in changed - {"torpor_acme/_generated/README.md"}:
        old, new = before[path].decode().splitlines(), after[path].decode().splitlines()
        lines = [line for line in difflib.ndiff(old, new) if line[0] in "+-"]
        assert not [line for line in lines if line.startswith("-")], path
        block = "\n".join(lines)
        assert "mul.Tensor" in block or "MulTensor" in block
        others = ("add_Tensor", "AddTensor", "relu", "addmm", "sum_dim")
        assert not [other for other in others if other in block], path


def test_a_file_of_the_authors_is_never_touched(project: Project) -> None:
    project.codegen()
    mine = project.out / "torpor_acme" / "lowering.py"
    mine.write_text("# mine\n")
    notes = project.out / "torpor_acme" / "_generated" / "notes.md"
    notes.write_text("mine too\n")
    project.add("mul.Tensor", after="relu")
    assert project.codegen() == 0
    assert mine.read_text() == "# mine\n"
    assert notes.read_text() == "mine too\n"


def test_what_is_no_longer_generated_is_removed(project: Project) -> None:
    project.codegen()
    text = project.file.read_text()
    project.put(text[: text.index("non_native:")])
    project.codegen()
    assert "torpor_acme/_generated/ops.py" not in project.files()
    assert "torpor_acme/type_rules.py" in project.files()  # the author's


def test_check_tells_what_is_stale_and_writes_nothing(project: Project, capsys) -> None:
    assert project.codegen("--check") == 1
    assert not project.out.exists()
    project.codegen()
    capsys.readouterr()
    assert project.codegen("--check") == 0
    assert "up to date" in capsys.readouterr().out
    project.add("mul.Tensor", after="relu")
    before = project.files()
    assert project.codegen("--check") == 1
    assert "_generated/lowering.py" in capsys.readouterr().out
    assert project.codegen("--check", "--json") == 1
    assert "torpor_acme/_generated/declared.py" in json.loads(capsys.readouterr().out)["stale"]
    assert project.files() == before


def test_a_generated_file_that_was_edited_is_stale(project: Project, capsys) -> None:
    project.codegen()
    edited = project.out / "torpor_acme" / "_generated" / "declared.py"
    before = edited.read_bytes()
    for changed in (before + b"# edited\n", before.replace(b"\n", b"\r\n"), before + b"\xff"):
        edited.write_bytes(changed)
        capsys.readouterr()
        assert project.codegen("--check") == 1
        assert f"stale: {edited}" in capsys.readouterr().out
        assert project.codegen("--diff") == 0
        assert "+++ b/torpor_acme/_generated/declared.py" in capsys.readouterr().out
        assert edited.read_bytes() == changed
        assert project.codegen() == 0
        assert edited.read_bytes() == before
    assert project.codegen("--check") == 0


@pytest.mark.parametrize("name", ["backend.py", "__init__.py", "lowering.py", "type_rules.py"])
def test_a_file_of_the_authors_that_is_missing_is_stale(project: Project, name, capsys) -> None:
    project.codegen()
    missing = project.out / "torpor_acme" / name
    missing.unlink()
    capsys.readouterr()
    assert project.codegen("--check") == 1
    assert f"stale: {missing}" in capsys.readouterr().out
    assert not missing.exists()
    project.codegen()
    assert project.codegen("--check") == 0


FOREIGN = [b"# mine\n", b"", b"\xff\xfe", b"# mine\n# Generated by `torpor codegen`\n"]


@pytest.mark.parametrize("content", FOREIGN)
@pytest.mark.parametrize("options", [(), ("--check",), ("--diff",), ("--json",)])
def test_what_was_not_generated_is_never_overwritten(
    project: Project, content: bytes, options, capsys
) -> None:
    mine = project.out / "torpor_acme" / "_generated" / "nodes.py"
    mine.parent.mkdir(parents=True)
    mine.write_bytes(content)
    assert project.codegen(*options) == 1
    reported = capsys.readouterr().err
    assert f"not written by this command: {mine}; move" in reported
    assert "Nothing was written" in reported
    assert project.files() == {"torpor_acme/_generated/nodes.py": content}


def test_what_was_not_generated_is_never_removed(project: Project) -> None:
    project.codegen()
    folder = project.out / "torpor_acme" / "_generated"
    text = (folder / "ops.py").read_text()
    mine = {"ops.py": f"# mine\n{text}", "notes.md": f"# mine\n{text}", "copy.py": text}
    for name, content in mine.items():
        (folder / name).write_text(content)
    all_of_it = project.file.read_text()
    project.put(all_of_it[: all_of_it.index("non_native:")])
    assert project.codegen() == 0
    assert {name: (folder / name).read_text() for name in mine} == mine
    assert not (folder / "own_nodes.py").exists()
    assert project.codegen("--check") == 0


def test_diff_shows_what_would_change_and_writes_nothing(project: Project, capsys) -> None:
    project.codegen()
    project.add("mul.Tensor", after="relu")
    before = project.files()
    capsys.readouterr()
    assert project.codegen("--diff") == 0
    reported = capsys.readouterr().out
    assert "--- a/torpor_acme/_generated/declared.py\n+++ b/torpor_acme/_generated/" in reported
    assert '+    "aten.mul.Tensor",\n' in reported
    assert project.files() == before
    assert project.codegen("--diff", "--check") == 1
    project.codegen()
    capsys.readouterr()
    assert project.codegen("--diff", "--check") == 0
    assert capsys.readouterr().out == ""


# -- mistakes ----------------------------------------------------------------------------------


def test_a_mistake_in_the_file_leaves_everything_as_it_is(project: Project, capsys) -> None:
    project.codegen()
    before = project.files()
    project.add("mull.Tensor", after="relu")
    project.put(project.file.read_text() + "suported: []\n")
    capsys.readouterr()
    for options in ((), ("--check",), ("--diff",), ("--json",)):
        assert project.codegen(*options) == 1
        reported = capsys.readouterr()
        assert (
            f"{project.file}:8: unknown op 'mull.Tensor'; did you mean 'mul.Tensor'?"
            in reported.err
        )
        assert "     8 |   - mull.Tensor" in reported.err
        assert "did you mean 'supported'?" in reported.err
        assert "2 errors; nothing was written" in reported.err
    errors = json.loads(reported.out)["errors"]
    assert [error["line"] for error in errors] == [8, 21]
    assert project.files() == before


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--coverage", "--own"],
        ["--coverage", "--stubs"],
        ["--stubs", "{file}"],
        ["{file}", "--stubs", "x"],
        ["--markdown"],
        ["--out", "x"],
        ["no_such_file.yaml"],
        ["{file}", "--check"],
        ["{file}", "--diff"],
        ["{file}", "--coverage"],
        ["{file}", "--out", "{file}"],
    ],
)
def test_arguments_that_do_not_go_together(arguments, project: Project, capsys) -> None:
    filled = [argument.format(file=project.file) for argument in arguments]
    assert main(["codegen", *filled]) == 2
    assert capsys.readouterr().err.startswith("torpor codegen: ")


def test_without_pyyaml_it_says_what_to_install(project: Project, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert project.codegen() == 2
    assert "pip install 'torpor[codegen]'" in capsys.readouterr().err


def test_a_folder_that_cannot_be_written_to_is_named(project: Project, capsys) -> None:
    project.out.mkdir()
    (project.out / "torpor_acme").write_text("a file in its place")
    assert project.codegen() == 1
    assert "torpor_acme" in capsys.readouterr().err


# -- the package -------------------------------------------------------------------------------


class Net(nn.Module):
    """Linear layers, batch norm and dropout."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.3), nn.Linear(8, 3)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


class Attention(nn.Module):
    """An embedding, attention and a gated unit."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention = nn.Embedding(7, 8), nn.MultiheadAttention(8, 2)
        self.unit = nn.GRU(8, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.words((x * 3).abs().long() % 7)
        mixed, _ = self.attention(words, words, words)
        return self.unit(mixed)[0]


def train(model: nn.Module, place) -> list[float]:
    model = place(copy.deepcopy(model))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    torch.manual_seed(7)
    losses = []
    for _ in range(3):
        loss = model(place(torch.randn(6, 4))).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("network", [Net, Attention])
@pytest.mark.parametrize("place", [lambda t: t.to("lazy"), torpor.lazy], ids=["lazy", "concrete"])
def test_networks_train_on_it_as_in_eager(on_it: Project, network, place) -> None:
    torch.manual_seed(0)
    model = network()
    assert train(model, place) == train(model, lambda thing: thing)


def test_it_is_registered_and_says_what_it_declares(generated: Project) -> None:
    assert torpor.backends()[generated.name] == "available"
    declared = generated.load("._generated.declared")
    assert generated.name == declared.NAME
    assert "aten.addmm.default" in declared.FULL_CODEGEN
    assert declared.SUPPORTED == ("aten.fill_.Scalar", "aten.split.Tensor")
    assert declared.AUTOGRAD == ("aten.max_pool3d.default",)
    assert declared.NON_NATIVE == ("torpor_gen_acme.twice.default", "torpor_gen_acme.view.default")


def test_to_begin_with_every_op_falls_back_and_is_counted(on_it: Project) -> None:
    x = torch.ones(2, 3).to("lazy")
    y = (x + x).relu().sum(1)
    assert y.tolist() == [6.0, 6.0]
    assert fallbacks() == {"aten.add.Tensor", "aten.relu.default", "aten.sum.dim_IntList"}
    lowering = on_it.load(".lowering").GenAcmeLowering
    assert lowering.written() == []
    assert lowering.lower_relu.__doc__ == "aten::relu(Tensor self) -> Tensor"


@pytest.fixture
def overridden(on_it: Project, monkeypatch: pytest.MonkeyPatch):
    """Puts methods in the author's class, as an author would."""
    lowering = on_it.load(".lowering").GenAcmeLowering
    seen: list[Any] = []

    def override(method: str, kernel: Any) -> list[Any]:
        def lower(self: Any, node: Any, *args: Any) -> Any:
            seen.append((node.op.name, *args))
            return kernel

        monkeypatch.setattr(lowering, method, lower)
        torpor.use(on_it.name)
        torpor.metrics.reset()
        return seen

    return override


def test_an_overridden_method_gets_the_arguments_and_its_kernel_runs(on_it, overridden) -> None:
    seen = overridden("lower_add_Tensor", lambda x, y, alpha: torch.add(x, y, alpha=alpha) + 1000)
    x = torch.ones(2).to("lazy")
    y = torch.add(x, x, alpha=3)
    assert "lambda" in torpor.graph(y, "backend")
    assert y.tolist() == [1004.0, 1004.0]
    name, a, b, alpha = seen[-1]
    assert (name, a is b, alpha) == ("aten.add.Tensor", True, 3)
    assert fallbacks() == set()


def test_an_op_that_writes_is_lowered_by_its_functional_form(on_it, overridden) -> None:
    overridden("lower_add_Tensor", lambda x, y, alpha: torch.add(x, y, alpha=alpha) + 1000)
    x = torch.ones(2, dtype=torch.float16).to("lazy")
    old = x * 1
    x.add_(torch.ones(2).to("lazy"))
    assert x.tolist() == [1002.0, 1002.0]
    assert x.dtype is torch.float16
    assert old.tolist() == [1.0, 1.0]
    assert "aten.add_.Tensor" not in fallbacks()


def test_several_results_and_lists(on_it, overridden) -> None:
    overridden("lower_split_Tensor", lambda x, size, dim: [p + 1 for p in x.split(size, dim)])
    overridden("lower__foreach_add_List", lambda xs, ys, alpha: [x + y for x, y in zip(xs, ys)])
    x = torch.arange(4.0).to("lazy")
    first, second = torch.split(x, 2)
    sums = torch._foreach_add([x, x], [x, x])
    assert ((first + 0).tolist(), (second + 0).tolist()) == ([1.0, 2.0], [3.0, 4.0])
    assert [s.tolist() for s in sums] == [[0.0, 2.0, 4.0, 6.0]] * 2


@pytest.mark.parametrize(
    ("kernel", "reported"),
    [
        (lambda x: x.double(), "the kernel made torch.float64"),
        (lambda x: x[:1], r"the kernel made \(1,\)"),
        (lambda x: [x, x], "the kernel made 2 tensors, not 1"),
        (lambda x: None, "the kernel made None"),
    ],
)
def test_a_kernel_that_makes_something_else_is_named(on_it, overridden, kernel, reported) -> None:
    overridden("lower_relu", kernel)
    with pytest.raises(BackendError, match=reported) as caught:
        torch.ones(2).to("lazy").relu().tolist()
    assert "test_codegen.py" in str(caught.value)


def test_an_op_of_its_own_is_typed_recorded_and_lowered(on_it, overridden) -> None:
    overridden("lower_own_twice", lambda x, times: x * times)
    on_it.load("._generated.ops").tell_types({"twice": lambda x, *, times=2: x})
    own = torch.ops.torpor_gen_acme
    x = torch.arange(3.0).to("lazy")
    y = own.twice(x + 1, times=5)
    assert "torpor_gen_acme.twice.default" in torpor.graph(y)
    assert y.tolist() == [5.0, 10.0, 15.0]
    assert fallbacks() == {"aten.add.Tensor"}
    nodes = on_it.load("._generated.own_nodes")
    leaf = torpor.backend.get_backend().ir_builder().device_data(
        0, TensorType.contiguous((3,), torch.float32, torch.device("cpu"))
    )  # fmt: skip
    node = nodes.OwnTwice.create(leaf, times=4)
    assert (node.times, node.outputs[0].type) == (4, leaf.type)
    torpor.ops.unregister("torpor_gen_acme::twice")


def test_node_classes_are_those_of_the_declared_ops(generated: Project) -> None:
    nodes = generated.load("._generated.nodes")
    assert nodes.AddTensor.op.name == "aten.add.Tensor"
    assert "RandomFrom" not in nodes.OPS  # it is drawn, and never a node
    assert "FillScalar_" not in nodes.OPS  # supported: a method alone


RULES = "TYPE_RULES = {'halved': lambda x: x}"
ASKED = """\
import torch, torpor, torpor_late
torpor.use("late")
x = torch.ones(2).to("lazy")
print(torpor.graph(torch.ops.torpor_late.halved(x)))
"""


def run_python(project: Project, text: str) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(project.out), str(SOURCE)])
    return subprocess.run(
        [sys.executable, "-c", text], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": path}, timeout=300,
    )  # fmt: skip


def test_own_ops_may_come_and_go_later(tmp_path: Path) -> None:
    project = Project(tmp_path, "late", "backend: {name}\nfull_codegen: [mm]\n")
    assert project.codegen() == 0
    without = project.file.read_text()
    project.put(f"{without}non_native:\n  - func: halved(Tensor self) -> Tensor\n")
    assert project.codegen() == 0
    rules = project.out / "torpor_late" / "type_rules.py"
    rules.write_text(f"from torpor_late._generated import own_nodes, ops\n\n{RULES}\n")
    done = run_python(project, ASKED)
    assert "torpor_late.halved.default" in done.stdout, done.stderr
    project.put(without)
    assert project.codegen() == 0
    done = run_python(project, "import torpor_late")
    assert done.returncode == 0, done.stderr


def test_the_eager_mark_says_what_it_is() -> None:
    assert str(EAGER) == "eager"


def test_the_tests_of_the_package_pass(generated: Project) -> None:
    lowering = generated.out / generated.package / "lowering.py"
    before = lowering.read_text()
    lowering.write_text(
        before + "\n    def lower_mm(self, node, self_, mat2):\n        return mm\n"
    )
    lowering.write_text(
        lowering.read_text().replace("\n\nclass", "\n\nfrom torch import mm\n\n\nclass")
    )
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(generated.out), str(SOURCE)]),
        "OMP_NUM_THREADS": "1",
    }
    command = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib"]
    chosen = ["-k", "contract or laziness or mm or relu", str(generated.out)]
    done = subprocess.run(
        [sys.executable, *command, *chosen], capture_output=True, text=True, env=environment,
        cwd=generated.out, timeout=500,
    )  # fmt: skip
    lowering.write_text(before)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "3 passed, 2 skipped" in done.stdout


# -- torpor itself -----------------------------------------------------------------------------


def test_stubs_are_written_checked_and_written_again(tmp_path: Path, capsys) -> None:
    folder = tmp_path / "site-packages"
    paths = [str(folder / "torpor-stubs" / path) for path in ("ops/nodes.pyi", "py.typed")]
    assert main(["codegen", "--stubs", str(folder), "--check", "--json"]) == 1
    assert json.loads(capsys.readouterr().out) == {"files": paths, "written": False}
    assert not folder.exists()
    assert main(["codegen", "--stubs", str(folder)]) == 0
    assert capsys.readouterr().out == f"written: {paths[0]}\nwritten: {paths[1]}\n2 files\n"
    assert main(["codegen", "--stubs", str(folder), "--check"]) == 0
    Path(paths[0]).write_text("# for another torch\n")
    assert main(["codegen", "--stubs", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out.splitlines()[-1])["files"] == paths[:1]
    assert "class AddTensor(TypedNode):" in Path(paths[0]).read_text()


def test_stubs_need_no_pyyaml(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setitem(sys.modules, "yaml", None)
    assert main(["codegen", "--stubs", str(tmp_path)]) == 0


def test_coverage_is_told_as_a_table_as_json_and_as_a_page(capsys) -> None:
    assert main(["codegen", "--coverage"]) == 0
    table = capsys.readouterr().out
    assert "in-place" in table
    assert "structured kernel" in table
    assert main(["codegen", "--coverage", "--json"]) == 0
    reported = json.loads(capsys.readouterr().out)
    assert reported["typed"] >= 2_000
    assert f"{reported['constructors']:,} have a node constructor" in table
    assert main(["codegen", "--coverage", "--markdown"]) == 0
    assert capsys.readouterr().out.startswith("# What torpor covers of ATen")
