"""The import lint finds planted violations and lets the allowed ways through."""

from pathlib import Path

import pytest

from scripts import lint_imports


def lint(root: Path, files: dict[str, str]) -> list[str]:
    """Lint a package of the given files (path without ``.py`` -> source)."""
    for name, source in files.items():
        path = root / f"{name}.py"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return [f"{Path(v.path).name}:{v.line} {v.rule}" for v in lint_imports.check_package(root)]


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("errors", "torpor.ir.node"),
        ("ir/node", "torpor.ops"),
        ("ops/table", "torpor.backend.data"),
        ("backend/registry", "torpor.execute"),
        ("execute/sync", "torpor.trace.tensor"),
        ("ir/node", "torpor.cli"),
        ("backends/reference/runtime", "torpor.trace"),
        ("backends/reference/runtime", "torpor.execute.queue"),
        ("symbols/expressions", "torpor.ops.spec"),
        ("symbols/symbolic_types", "torpor.symbols.leaves"),
        ("symbols/__init__", "torpor.symbols.symbolic_types"),
        ("text/anything", "torpor.inference.infer"),
        ("ir/node", "torpor.symbols.symbolic_nodes"),
        ("execute/sync", "torpor.native.attach"),
        ("backends/reference/runtime", "torpor.cache.store"),
    ],
)
def test_an_upward_import_is_refused(tmp_path, importer, imported):
    found = lint(tmp_path, {importer: f"import os\nimport {imported}\n"})
    assert [line.split(":")[1] for line in found] == ["2 direction"]


@pytest.mark.parametrize(
    ("importer", "imported"),
    [
        ("metrics", "torpor.errors"),
        ("ir/node", "torpor.errors"),
        ("ir/node", "torpor.ir.types"),
        ("execute/sync", "torpor.backend"),
        ("trace/tensor", "torpor.ir"),
        ("trace/tensor", "torpor.execute.sync"),
        ("backends/reference/runtime", "torpor.backend"),
        ("debug/explain", "torpor.trace"),
        ("testing/conformance", "torpor.backends.reference"),
        ("compat/torch_lazy", "torpor.execute"),
        ("cli/info", "torpor.trace"),
        ("ir/node", "torpor.symbols.expressions"),
        ("ir/node", "torpor.symbols"),
        ("execute/sync", "torpor.symbols.leaves"),
        ("symbols/symbolic_nodes", "torpor.trace.values"),
        ("backends/reference/runtime", "torpor.overrides.draws"),
    ],
)
def test_a_downward_import_is_allowed(tmp_path, importer, imported):
    assert lint(tmp_path, {importer: f"import {imported}\n"}) == []


def test_every_spelling_of_an_upward_import_is_found(tmp_path):
    source = (
        "from torpor.trace import tensor\n"
        "from torpor import trace\n"
        "from ..trace import tensor\n"
        "from .. import trace\n"
        "import importlib\n"
        "def later():\n"
        "    import torpor.trace\n"
        "importlib.import_module('torpor.trace')\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n"
        "    from torpor.trace.tensor import LazyTensor\n"
    )
    found = lint(tmp_path, {"ir/node": source})
    assert [int(line.split(":")[1].split()[0]) for line in found] == [1, 2, 3, 4, 7, 8, 11]


def test_relative_imports_in_a_package_init_are_resolved(tmp_path):
    assert lint(tmp_path, {"ir/__init__": "from .node import Node\nfrom . import types\n"}) == []
    assert lint(tmp_path, {"ir/__init__": "from ..ops import table\n"}) == [
        "__init__.py:1 direction"
    ]


def test_a_layer_may_not_import_the_top_level_package(tmp_path):
    found = lint(tmp_path, {"execute/sync": "import torpor\nfrom torpor import use\n"})
    assert found == ["sync.py:1 direction", "sync.py:2 direction"]


@pytest.mark.parametrize("importer", ["execute/sync", "trace/devices", "ops/table"])
def test_a_layer_sees_backends_only_through_backend(tmp_path, importer):
    found = lint(tmp_path, {importer: "from torpor.backends import reference\n"})
    assert [line.split()[1] for line in found] == ["backends"]


def test_the_registry_finds_backends_by_name_only(tmp_path):
    dynamic = "import importlib\nimportlib.import_module('torpor.backends.reference')\n"
    assert lint(tmp_path, {"backend/registry": dynamic}) == []
    static = "import torpor.backends.reference\n"
    assert lint(tmp_path, {"backend/registry": static}) == ["registry.py:1 backends"]


@pytest.mark.parametrize("tool", ["debug", "testing", "compat"])
def test_nothing_imports_the_tools(tmp_path, tool):
    files = {
        "trace/tensor": f"from torpor import {tool}\n",
        "codegen/emit": f"import torpor.{tool}",
    }
    assert [line.split()[1] for line in lint(tmp_path, files)] == ["tools", "tools"]


def test_the_facade_loads_tools_when_asked_for(tmp_path):
    deferred = "def explain():\n    from torpor.debug import explain\n"
    assert lint(tmp_path, {"__init__": deferred, "cli/view": "import torpor.debug\n"}) == []
    assert lint(tmp_path, {"__init__": "from torpor import debug\n"}) == ["__init__.py:1 tools"]


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C\n",
        "import torch._C as C\n",
        "from torch import _C\n",
        "from torch._subclasses import FakeTensorMode\n",
        "from torch.utils import _pytree as pytree\n",
        "from torch.utils._pytree import tree_map\n",
        "import torch; torch._C.Graph()\n",
        "import torch.utils; torch.utils._pytree.tree_map\n",
        "import torch as t; t._dynamo\n",
        "from torch import utils as u; u._pytree.tree_map\n",
        "import torch; torch.Tensor._make_wrapper_subclass\n",
        "import torch; getattr(torch, '_C')\n",
        "import importlib; importlib.import_module('torch._inductor.compile_fx')\n",
        "def f():\n    import torch; return torch._C.Graph\n",
    ],
)
def test_private_torch_names_belong_to_one_package(tmp_path, source):
    found = lint(tmp_path, {"backend/lowering": source})
    assert [line.split()[1] for line in found] == ["private-torch"]
    assert lint(tmp_path, {"backend/lowering": "", "_torch/ops": source}) == []


def test_public_torch_names_are_free(tmp_path):
    source = (
        "import torch\n"
        "from torch.utils.data import DataLoader\n"
        "torch.ops.aten._softmax.default\n"
        "torch.__version__\n"
        "torch.Tensor.__torch_dispatch__\n"
        "class A:\n"
        "    def f(self):\n"
        "        return self._private.torch._C\n"
    )
    assert lint(tmp_path, {"trace/tensor": source}) == []


def test_import_torpor_needs_only_torch_and_the_standard_library(tmp_path):
    assert lint(tmp_path, {"ir/printer": "import rich\n"}) == ["printer.py:1 dependencies"]
    optional = "try:\n    import rich\nexcept ImportError:\n    rich = None\n"
    deferred = "def show():\n    import rich\n"
    assert (
        lint(tmp_path, {"ir/printer": optional, "ops/show": deferred, "cli/x": "import rich\n"})
        == []
    )


def test_a_backend_may_need_what_it_is_made_of(tmp_path):
    assert lint(tmp_path, {"backends/xla/compile": "import jax\n"}) == []
    assert lint(tmp_path, {"backends/fx/trace": "import jax\n"}) == ["trace.py:1 dependencies"]


def test_a_report_names_file_line_and_remedy(tmp_path, capsys):
    (tmp_path / "ir").mkdir()
    file = tmp_path / "ir" / "node.py"
    file.write_text("\nfrom torpor.trace import tensor\n")
    assert lint_imports.main([str(tmp_path)]) == 1
    report = capsys.readouterr().out
    assert f"{file}:2: [direction] torpor.ir.node imports torpor.trace.tensor" in report
    assert "instead: move the shared name down into ir" in report


def test_every_room_is_there():
    package = Path(lint_imports.__file__).parents[1] / "src" / "torpor"
    rooms = [package.joinpath(*name.split(".")) for name in lint_imports.ROOMS]
    assert [r for r in rooms if not r.is_dir() and not r.with_suffix(".py").is_file()] == []


def test_the_package_itself_is_clean():
    assert lint_imports.main([]) == 0
