"""Hold the import directions of the package: ``python scripts/lint_imports.py [root of torpor]``.

For someone whose import was refused. The rules, each with the name that is printed:

``direction``
    ``errors, config, metrics, _torch <- ir <- ops <- passes <- backend <- execute <- native <-
    trace``. A layer imports the layers to its left and nothing else of torpor. A module of a
    supporting package belongs to the layer that ``ROOMS`` assigns it to, and follows that layer's
    rule. ``backends/`` builds on ``backend``; ``codegen`` on ``ops``.
``backends``
    Only ``backend`` finds a concrete backend, by name (``importlib.import_module``). No layer
    imports ``torpor.backends``.
``tools``
    Nothing imports ``debug``, ``testing``, ``compat`` or ``bench``. The facade (``cli``, ``bench``,
    and ``torpor/__init__.py`` inside a function or for types) may: they load when asked for.
``private-torch``
    Only ``_torch/`` touches torch's private names, so a new torch release is one package's work.
``dependencies``
    What ``import torpor`` loads needs torch and the standard library only.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

BASE = ("errors", "config", "metrics", "_torch")
LAYERS = ("ir", "ops", "passes", "backend", "execute", "native", "trace")
ROOMS = {
    "adaptive": "execute",
    "adaptive.bound": "trace",
    "adaptive.choice": "trace",
    "cache": "execute",
    "capture": "trace",
    "compiling": "execute",
    "custom": "ops",
    "distributed": "ops",
    "distributed.agreement": "execute",
    "distributed.data_parallel": "trace",
    "distributed.fully_shard": "trace",
    "distributed.plain": "trace",
    "distributed.recorders": "trace",
    "distributed.switch": "execute",
    "frontend": "trace",
    "inference": "ops",
    "native.attach": "trace",
    "observe": "execute",
    "observe.lines": "ir",
    "observe.scope": "trace",
    "observe.site": "trace",
    "overrides": "trace",
    "overrides.draws": "ops",
    "overrides.grad_mode": "ops",
    "overrides.rnn_ops": "ops",
    "overrides.storage_ops": "ops",
    "passes.interpreter": "ir",
    "symbols": "ir",
    "symbols.arguments": "ops",
    "symbols.symbolic_types": "ops",
    "symbols.leaves": "execute",
    "symbols.offsets": "trace",
    "symbols.symbolic_nodes": "trace",
    "symbols.scalars": "trace",
    "text": "ir",
    "text.torch_parser": "ops",
    "transactions": "execute",
}
"""Supporting packages: the layer of each, and of modules that belong to another one.

A package itself (its `__init__.py`) is of the lowest layer among its modules: all of them load it.
"""
TOOLS = ("debug", "testing", "compat", "bench")
FACADE = ("", "cli", "bench", "__main__")  # "" is torpor/__init__.py
PRIVATE_TORCH_ALLOWED_IN = "_torch"
# Packages that load when they are asked for by name, and what they need besides.
OPTIONAL = {"torpor.backends.xla": ("jax", "jaxlib", "numpy")}


def _visible_layers() -> dict[str, tuple[str, ...]]:
    """What each restricted part may import: its left neighbours and itself."""
    visible: dict[str, tuple[str, ...]] = dict.fromkeys(BASE, BASE)
    for i, layer in enumerate(LAYERS):
        visible[layer] = BASE + LAYERS[: i + 1]
    visible["backends"] = (*visible["backend"], "backends")
    visible["codegen"] = (*visible["ops"], "codegen")
    return visible


VISIBLE = _visible_layers()


@dataclass(frozen=True, order=True)
class Violation:
    """One refused import; prints as ``file:line: [rule] what; what to do instead``."""

    path: str
    line: int
    rule: str
    what: str
    instead: str

    def __str__(self) -> str:
        return f"{self.path}:{self.line}: [{self.rule}] {self.what}\n    instead: {self.instead}"


@dataclass(frozen=True)
class Import:
    """One imported dotted name and where it stands."""

    name: str
    line: int
    deferred: bool  # inside a function: not run by `import torpor`
    guarded: bool  # inside `try`, or under TYPE_CHECKING: may be absent at run time
    dynamic: bool  # importlib.import_module("...")
    for_types: bool  # under TYPE_CHECKING: never run


class _Collector(ast.NodeVisitor):
    """Collects imports and uses of private torch names from one module."""

    def __init__(self, package: tuple[str, ...]) -> None:
        self.package = package  # dotted package of the module, for relative imports
        self.imports: list[Import] = []
        self.private_uses: list[tuple[str, int]] = []
        self.aliases: dict[str, str] = {}  # local name -> dotted torch name
        self._functions = 0
        self._guards = 0
        self._types = 0

    def _add(self, name: str, line: int, dynamic: bool = False) -> None:
        places = self._functions > 0, self._guards > 0, dynamic, self._types > 0
        self.imports.append(Import(name, line, *places))

    def visit_Import(self, node: ast.Import) -> None:
        for alias in node.names:
            self._add(alias.name, node.lineno)
            if _top(alias.name) == "torch":
                self.aliases[alias.asname or "torch"] = alias.name if alias.asname else "torch"

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        module = node.module or ""
        if node.level:
            parents = self.package[: len(self.package) - node.level + 1]
            module = ".".join((*parents, module)).rstrip(".")
        for alias in node.names:
            self._add(f"{module}.{alias.name}", node.lineno)
            if _top(module) == "torch":
                self.aliases[alias.asname or alias.name] = f"{module}.{alias.name}"

    def visit_Attribute(self, node: ast.Attribute) -> None:
        if dotted := self._torch_name(node):
            self._note_private(dotted, node.lineno)
        else:
            self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        called = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        called = node.func.id if isinstance(node.func, ast.Name) else called
        texts = [a.value if isinstance(a, ast.Constant) else None for a in node.args]
        match called, texts:
            case (("import_module" | "__import__"), [str(module), *_]):
                self._add(module, node.lineno, dynamic=True)
            case (("getattr" | "setattr" | "hasattr"), [_, str(attribute), *_]):
                owner = self._torch_name(node.args[0]) or ""
                self._note_private(f"{owner}.{attribute}", node.lineno)
        self.generic_visit(node)

    def visit_FunctionDef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        for outside in (*node.decorator_list, node.args, node.returns):
            if outside is not None:
                self.visit(outside)
        self._functions += 1
        for statement in node.body:
            self.visit(statement)
        self._functions -= 1

    def visit_AsyncFunctionDef(self, node: ast.AsyncFunctionDef) -> None:
        self.visit_FunctionDef(node)

    def visit_Try(self, node: ast.Try) -> None:
        self._guards += 1
        self.generic_visit(node)
        self._guards -= 1

    def visit_If(self, node: ast.If) -> None:
        guard = "TYPE_CHECKING" in ast.dump(node.test)
        self._guards += guard
        self._types += guard
        self.generic_visit(node)
        self._guards -= guard
        self._types -= guard

    def _torch_name(self, node: ast.AST) -> str | None:
        """The dotted torch name an expression spells, through local aliases."""
        parts: list[str] = []
        while isinstance(node, ast.Attribute):
            parts.append(node.attr)
            node = node.value
        if not isinstance(node, ast.Name) or node.id not in self.aliases:
            return None
        return ".".join((self.aliases[node.id], *reversed(parts)))

    def _note_private(self, dotted: str, line: int) -> None:
        if private := _private_torch_name(dotted):
            self.private_uses.append((private, line))


def _top(dotted: str) -> str:
    return dotted.partition(".")[0]


def _private_torch_name(dotted: str) -> str | None:
    """The name up to its first private part: ``torch._C.Graph`` -> ``torch._C``; None if public.

    ``torch.ops.aten._softmax`` is an operator's name, not a private API.
    """
    parts = dotted.split(".")
    if parts[0] != "torch" or parts[:2] == ["torch", "ops"]:
        return None
    for i, part in enumerate(parts):
        if part.startswith("_") and not part.startswith("__"):
            return ".".join(parts[: i + 1])
    return None


def _part(dotted: str) -> str:
    """The part of torpor a name is in: ``torpor.ir.node.Node`` -> ``ir``; ``torpor`` -> nothing."""
    parts = dotted.split(".")
    return parts[1] if len(parts) > 1 else ""


def _layer(dotted: str) -> str:
    """The layer a name is in: that of its module in `ROOMS`, or else its part of torpor."""
    parts = dotted.split(".")[1:]
    if len(parts) == 1 and parts[0] in ROOMS:
        return _door(parts[0])
    for end in range(len(parts), 0, -1):
        if layer := ROOMS.get(".".join(parts[:end])):
            return layer
    return _part(dotted)


def _door(room: str) -> str:
    """The layer of a supporting package: the lowest of its modules."""
    inside = [layer for name, layer in ROOMS.items() if f"{name}.".startswith(f"{room}.")]
    return min(inside, key=LAYERS.index)


def _with_layer(dotted: str) -> str:
    """A name, with its layer where that is not its package."""
    layer = _layer(dotted)
    return dotted if layer == _part(dotted) else f"{dotted} (layer {layer})"


def _module_name(file: Path, root: Path) -> str:
    parts = ("torpor", *file.relative_to(root).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _check_import(
    imported: Import, module: str, parts: frozenset[str]
) -> tuple[str, str, str] | None:
    """``(rule, what, instead)`` if ``module`` must not import this; None if it may."""
    importer = _layer(module)
    if _top(imported.name) != "torpor":
        return _check_outside_import(imported, module, importer)
    part = _layer(imported.name)
    # `from torpor import sync` names something of torpor/__init__.py, not a part.
    target = part if part in parts else ""
    what = f"{_with_layer(module)} imports {_with_layer(imported.name)}"
    if importer == target:
        return None
    if target in TOOLS:
        if importer in FACADE and (imported.deferred or imported.for_types or importer != ""):
            return None
        return ("tools", what, _instead_of_tool(importer, target))
    if target == "backends" and importer in LAYERS + BASE:
        if importer == "backend" and imported.dynamic:
            return None
        hint = "import_module inside a function, by name" if importer == "backend" else None
        return ("backends", what, hint or "ask torpor.backend for the backend by name")
    if importer in VISIBLE and target not in VISIBLE[importer]:
        return ("direction", what, _instead_of_direction(importer, target))
    return None


def _check_outside_import(
    imported: Import, module: str, importer: str
) -> tuple[str, str, str] | None:
    top = _top(imported.name)
    if any(module.startswith(package) and top in own for package, own in OPTIONAL.items()):
        return None
    if importer not in (*BASE, *LAYERS, "", "backends") or imported.deferred or imported.guarded:
        return None
    if top in ("torch", "torchgen") or top in sys.stdlib_module_names:
        return None
    return ("dependencies", f"imports {top}", "import it where it is used, inside the function")


def _instead_of_tool(importer: str, target: str) -> str:
    if importer == "":
        return "import it inside the public function that needs it"
    return f"let {target} import {importer or 'torpor'}; pass a hook or a callback downwards"


def _instead_of_direction(importer: str, target: str) -> str:
    seen = ", ".join(name for name in VISIBLE[importer] if name != importer)
    if target == "":
        return f"import the module that defines the name; {importer} sees {seen}"
    return f"move the shared name down into {importer}, or pass it in; {importer} sees {seen}"


def check_file(file: Path, root: Path, parts: frozenset[str]) -> Iterator[Violation]:
    module = _module_name(file, root)
    is_package = file.name == "__init__.py"
    package = tuple(module.split("."))[: None if is_package else -1]
    found = _Collector(package)
    found.visit(ast.parse(file.read_text(encoding="utf-8"), filename=str(file)))
    for imported in found.imports:
        if problem := _check_import(imported, module, parts):
            yield Violation(str(file), imported.line, *problem)
    if _part(module) == PRIVATE_TORCH_ALLOWED_IN:
        return
    imported_private = [(_private_torch_name(i.name), i.line) for i in found.imports]
    for name, line in (*imported_private, *found.private_uses):
        if name is not None:
            instead = "give it a name in a module of torpor/_torch/, import that"
            yield Violation(
                str(file), line, "private-torch", f"{name} is private to torch", instead
            )


def check_package(root: Path) -> list[Violation]:
    """All violations in the package at ``root`` (the folder ``src/torpor``), in file order."""
    children = root.iterdir()
    parts = frozenset(p.stem for p in children if p.is_dir() or p.suffix == ".py")
    parts |= {*VISIBLE, *TOOLS, "cli"}
    files = sorted(root.rglob("*.py"))
    return sorted({v for file in files for v in check_file(file, root, parts)})


def main(argv: list[str]) -> int:
    root = Path(argv[0]) if argv else Path(__file__).resolve().parent.parent / "src" / "torpor"
    violations = check_package(root)
    for violation in violations:
        print(violation)
    checked = sum(1 for _ in root.rglob("*.py"))
    if violations:
        print(f"{len(violations)} refused imports in {checked} files")
    else:
        print(f"{checked} files: all imports point the right way")
    return 1 if violations else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
