"""Serializes the code that Inductor made of a piece.

For the CPU, Inductor generates a Python module: C++ kernels, compiled when the module is executed,
and a function that calls them. Stored are the kernels' shared libraries and the part of the module
that the function needs. So a later process needs neither a C++ compiler nor Inductor's lowerings
and imports, which alone take longer than everything else. A module that is not understood is not
stored. GPU code, with its Triton kernels, is stored the way Inductor's own cache stores it.
"""

from __future__ import annotations

import ast
import io
import json
import tempfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import BuiltinFunctionType, ModuleType, SimpleNamespace
from typing import Any, Final

import torch

from torpor import _torch
from torpor.backend.pack import pack, unpack
from torpor.backends.blocks.program import Compiled
from torpor.backends.inductor.tape import keep_library

_ENTRY: Final = "call"  # the module's entry point
_EXTERN: Final = "extern_kernels"  # its name for eager's kernels
_COMPILES: Final = "async_compile"  # its name for what compiles its kernels
SOURCE: Final = "__source__"  # the global of a restored module that holds its source

Restored = tuple[Compiled, Callable[[], str]]
Inputs = Callable[[], tuple[list[torch.Tensor], Any]]


def dump_code(code: Any) -> bytes | None:
    """Serialize code that Inductor made; None if that is impossible."""
    made = _torch.inductor_module(code)
    if made is not None:
        slim = _slim(*made)
        return None if slim is None else slim.packed()
    pickled = _torch.inductor_pickle(code)
    return None if pickled is None else pack({"pickled": pickled})


def load_code(saved: bytes, inputs: Inputs) -> Restored:
    """Restore code from `dump_code`; `inputs()` gives fake inputs and their mode, for GPU code."""
    parts = unpack(saved)
    if "pickled" in parts:
        code = _torch.inductor_unpickle(parts["pickled"], *inputs())
        return code, lambda: str(code.source_code)
    return _restored(parts)


# -- modules for the CPU ---------------------------------------------------------------------------


@dataclass(slots=True)
class _Slim:
    """A module of Inductor's, minus the parts that compile its kernels."""

    source: str
    whole: str  # the original source, for people
    kernels: dict[str, tuple[str, str]] = field(default_factory=dict)  # name -> library, function
    extern: dict[str, str] = field(default_factory=dict)  # eager's kernels -> their names in torch
    libraries: dict[str, bytes] = field(default_factory=dict)
    constants: dict[str, torch.Tensor] = field(default_factory=dict)

    def packed(self) -> bytes:
        facts = {"kernels": self.kernels, "extern": self.extern}
        parts = {"facts": json.dumps(facts).encode(), "source": self.source.encode()}
        parts["whole"] = zlib.compress(self.whole.encode(), 1)
        parts |= {f"library {name}": library for name, library in self.libraries.items()}
        if self.constants:
            stream = io.BytesIO()
            torch.save(self.constants, stream)
            parts["constants"] = stream.getvalue()
        return pack(parts)


def _slim(source: str, names: dict[str, Any], constants: dict[str, torch.Tensor]) -> _Slim | None:
    """The part of a module that its entry point needs; None if it is not understood."""
    slim = _Slim("", source, constants=constants)
    makers: dict[str, ast.stmt] = {}
    for statement in ast.parse(source).body:
        defined = _defined(statement)
        if defined is None or defined & makers.keys():
            return None
        makers |= dict.fromkeys(defined, statement)
    needed = _needed(makers, {name for name, thing in names.items() if _library(thing)})
    for name in needed:
        library = _library(names.get(name))
        if library is not None:
            path = Path(str(library.__file__))
            slim.kernels[name] = (path.stem, names[name].__name__)
            slim.libraries.setdefault(path.stem, path.read_bytes())
    if _COMPILES in needed or _ENTRY not in needed:
        return None
    kept = [s for s in dict.fromkeys(makers.values()) if _defined(s) & needed - {*slim.kernels}]  # type: ignore[operator]  # none is None
    if _EXTERN in needed:
        extern = _extern(kept, names[_EXTERN])
        if extern is None:
            return None
        slim.extern = extern
        kept = [s for s in kept if _defined(s) != {_EXTERN}]
    slim.source = "\n".join(map(ast.unparse, kept))
    return slim


def _defined(statement: ast.stmt) -> set[str] | None:
    """The names that a module-level statement defines; None if it has other effects."""
    match statement:
        case ast.Import(names=names) | ast.ImportFrom(names=names):
            return {(alias.asname or alias.name).partition(".")[0] for alias in names}
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            return {name}
        case ast.Assign(targets=[ast.Name(id=name)]):
            return {name}
        case ast.Expr(value=ast.Constant()) | ast.If(test=ast.Compare(left=ast.Name("__name__"))):
            return set()
        case ast.Expr() | ast.Delete() if _names_in(statement) <= {_COMPILES, "globals"}:
            return set()
    return None


def _needed(makers: dict[str, ast.stmt], kernels: set[str]) -> set[str]:
    """The names that the entry point needs, transitively; not followed into kernel definitions."""
    needed: set[str] = set()
    waiting = [_ENTRY]
    while waiting:
        name = waiting.pop()
        if name in makers and name not in needed:
            needed.add(name)
            waiting += [] if name in kernels else _names_in(makers[name])
    return needed


def _names_in(statement: ast.AST) -> set[str]:
    return {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}


def _library(thing: Any) -> ModuleType | None:
    """The shared library of a kernel; None if it is not a kernel."""
    owner = thing.__self__ if isinstance(thing, BuiltinFunctionType) else None
    if isinstance(owner, ModuleType) and owner.__name__.endswith(f".{thing.__name__}"):
        return owner if getattr(owner, "__file__", None) else None
    return None


def _extern(statements: list[ast.stmt], kernels: Any) -> dict[str, str] | None:
    """The eager kernels that are called, by name; None if one is not a function of torch's."""
    found: dict[str, str] = {}
    for attribute in _extern_used(statements):
        function = getattr(kernels, attribute, None)
        name = getattr(function, "__name__", "")
        if function is None or getattr(torch, name, None) is not function:
            return None
        found[attribute] = name
    return found


def _extern_used(statements: list[ast.stmt]) -> Iterator[str]:
    for statement in statements:
        for node in ast.walk(statement):
            match node:
                case ast.Attribute(value=ast.Name(id=name), attr=attribute) if name == _EXTERN:
                    yield attribute


def _restored(parts: dict[str, bytes]) -> Restored:
    """Execute a slim module, with its kernels loaded."""
    facts = json.loads(parts["facts"])
    libraries = {
        name.removeprefix("library "): blob
        for name, blob in parts.items()
        if name.startswith("library ")
    }
    names: dict[str, Any] = {"__name__": "torpor_cached_module"}
    names.update(_load_kernels(facts["kernels"], libraries))
    extern = {name: getattr(torch, function) for name, function in facts["extern"].items()}
    names[_EXTERN] = SimpleNamespace(**extern)
    if "constants" in parts:
        names |= torch.load(io.BytesIO(parts["constants"]), weights_only=True)
    names[SOURCE] = parts["source"].decode()
    exec(compile(names[SOURCE], "<torpor cache>", "exec"), names)
    return names[_ENTRY], lambda: zlib.decompress(parts["whole"]).decode()


def _load_kernels(
    kernels: dict[str, tuple[str, str]], libraries: dict[str, bytes]
) -> Iterator[tuple[str, Any]]:
    """Load kernels from shared libraries; their files may be deleted afterwards."""
    with tempfile.TemporaryDirectory(prefix="torpor-") as folder:
        paths = {name: Path(folder, f"{n}.so") for n, name in enumerate(libraries)}
        for library, path in paths.items():
            path.write_bytes(libraries[library])
        for name, (library, function) in kernels.items():
            module = _torch.load_kernel(f"{library}.{function}", str(paths[library]))
            keep_library(module)
            yield name, getattr(module, function)
