"""Generates the package of a backend from its YAML file.

    out/torpor_acme/
        __init__.py  backend.py  lowering.py     the author's: written once, never again
        type_rules.py                            likewise, for a backend with ops of its own
        _generated/                              rewritten each time; nothing else is touched
            declared.py                          what was declared, as data
            lowering.py                          one method per op
            nodes.py(i)  own_nodes.py(i)         typed node classes
            ops.py                               definitions of the backend's own ops
            test_declared.py  README.md          tests; what is covered

Deterministic, with minimal diffs: everything is sorted by name, with one op per line or block, so
that adding an op to the file only adds lines.
"""

from __future__ import annotations

import difflib
from pathlib import Path

from torpor.codegen import emit_nodes, files, own_ops, package_text
from torpor.codegen.files import Changes
from torpor.codegen.model import LazyIrSchema
from torpor.codegen.package_text import FOLDER, starters
from torpor.codegen.yaml_file import BackendFile
from torpor.errors import TorporError


def generated(file: BackendFile) -> dict[str, str]:
    """The files in `_generated/`, by path relative to the folder that contains the package."""
    header = package_text.header(file)
    made = {
        "__init__.py": f'{header}"""Written by `torpor codegen`; do not edit."""\n',
        "declared.py": package_text.declared(file),
        "lowering.py": package_text.lowering(file),
        "test_declared.py": package_text.tests(file),
        "README.md": package_text.readme(file),
        **emit_nodes.emit(_node_schemas(file), header),
    }
    if file.non_native:
        made["ops.py"] = package_text.ops(file)
        made |= package_text.own_nodes(file)
    return {f"{file.package}/{FOLDER}/{path}": text for path, text in made.items()}


def _node_schemas(file: BackendFile) -> list[LazyIrSchema]:
    """The declared ops that get a node class, and can be nodes."""
    declared = {op.name for op in (*file.full_codegen, *file.ir_gen)}
    return [schema for schema in own_ops.nodes() if schema.name in declared]


class ForeignFiles(TorporError):
    """Files that the generator did not write are where it would write."""


_SOMETIMES = ("ops.py", "own_nodes.py", "own_nodes.pyi")
"""Files generated only for a backend with ops of its own, so they may have to be removed."""


def stale(file: BackendFile, out: Path) -> Changes:
    """The files that writing would change; raises `ForeignFiles`.

    Generated files that differ or are no longer generated, and the author's files that are missing.
    """
    made = generated(file)
    sometimes = {f"{file.package}/{FOLDER}/{name}" for name in _SOMETIMES}
    there = sorted(path for path in {*made, *sometimes} if (out / path).exists())
    foreign = {p for p in there if not package_text.is_generated((out / p).read_bytes())}
    clashes = sorted(foreign.intersection(made))
    if clashes:
        raise ForeignFiles(
            f"not written by this command: {', '.join(str(out / path) for path in clashes)}; move "
            "what is yours out of the way, or delete it. Nothing was written"
        )
    begun = {path: text for path, text in starters(file).items() if not (out / path).exists()}
    return files.changes(out, {**begun, **made}, sometimes - foreign)


def write(file: BackendFile, out: Path) -> list[str]:
    """Update `_generated/`, and write the author's files that are missing.

    Returns the paths written or removed. Each file is replaced atomically.
    """
    return files.write(out, stale(file, out))


def diff(file: BackendFile, out: Path) -> str:
    """A unified diff of what writing would change."""
    parts = []
    for path, (old, new) in stale(file, out).items():
        names = (
            "/dev/null" if old is None else f"a/{path}",
            "/dev/null" if new is None else f"b/{path}",
        )
        lines = difflib.unified_diff(_lines(old), _lines(new), *names)
        parts += [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return "".join(parts)


def _lines(content: bytes | None) -> list[str]:
    text = (content or b"").decode(errors="backslashreplace")
    return text.splitlines(keepends=True)
