"""Every name of `torpor._torch` has a test, and its modules import each other in one direction.

The test of `torpor._torch.<module>.<name>` is in `test_<module>.py`, `test_<name>` first in its
name: the ones that fail under a new torch say what has moved.
"""

import ast
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

from torpor import _torch

PACKAGE = "torpor._torch"
MODULES = {
    file.stem: ast.parse(file.read_text())
    for file in Path(_torch.__file__).parent.glob("*.py")
    if file.stem != "__init__"
}


def public_names(module: ast.Module) -> Iterator[str]:
    for node in module.body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        names = [target.id for target in targets if isinstance(target, ast.Name)]
        names += [node.name] if isinstance(node, ast.FunctionDef) else []
        yield from (name for name in names if not name.startswith("_"))


def test_every_name_has_a_test() -> None:
    untested = []
    for module, tree in MODULES.items():
        tests = (Path(__file__).parent / f"test_{module}.py").read_text()
        names = list(public_names(tree))
        assert names
        untested += [n for n in names if not any(f"def test_{c}" in tests for c in (n, n.lower()))]
    assert untested == []


def test_modules_import_each_other_in_one_direction() -> None:
    imported = {
        module: {
            node.module.removeprefix(f"{PACKAGE}.")
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node.module and PACKAGE in node.module
        }
        for module, tree in MODULES.items()
    }
    assert set().union(*imported.values()) <= set(MODULES)  # not the package itself
    TopologicalSorter(imported).prepare()  # raises CycleError
