"""Writes the package of a backend from its file.

    out/torpor_acme/
        __init__.py  backend.py  lowering.py     the author's: written once, never again
        type_rules.py                            likewise, where the backend has ops of its own
        _generated/                              rewritten each time; nothing else is touched
            declared.py                          what was declared, as data
            lowering.py                          one method for each op
            nodes.py(i)  own_nodes.py(i)         typed node classes
            ops.py                               the backend's own ops, defined
            test_declared.py  README.md          what must hold; what is covered

The same file gives the same bytes, and an op more in it adds the lines of that op: everything is
sorted by name, one op a line or a block.
"""

from __future__ import annotations

import difflib
import os
import tempfile
from pathlib import Path

from torpor.codegen import emit_nodes, own_ops, package_text
from torpor.codegen.model import LazyIrSchema
from torpor.codegen.package_text import FOLDER, starters
from torpor.codegen.yaml_file import BackendFile


def generated(file: BackendFile) -> dict[str, str]:
    """The files in `_generated/`, by their paths from the folder that holds the package."""
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
    """The ops that get a node class: declared so, and of those that can be nodes."""
    declared = {op.name for op in (*file.full_codegen, *file.ir_gen)}
    return [schema for schema in own_ops.nodes() if schema.name in declared]


def stale(file: BackendFile, out: Path) -> dict[str, tuple[str | None, str | None]]:
    """Generated files that are not what they would be written as: what is there, what would be."""
    made = generated(file)
    there = {path: (out / path).read_text(encoding="utf-8") for path in _present(file, out)}
    return {
        path: (there.get(path), made.get(path))
        for path in sorted({*made, *there})
        if there.get(path) != made.get(path)
    }


def _present(file: BackendFile, out: Path) -> list[str]:
    """The files in `_generated/` that this command wrote, and those in the place of such."""
    folder = out / file.package / FOLDER
    kinds = (".py", ".pyi", ".md")
    found = sorted(p for p in folder.glob("*") if p.is_file() and p.suffix in kinds)
    paths = [str(path.relative_to(out)) for path in found if _is_generated(path)]
    return sorted({*paths, *(path for path in generated(file) if (out / path).exists())})


def _is_generated(path: Path) -> bool:
    """A file that says so in its first lines."""
    start = path.read_text(encoding="utf-8").splitlines()[:4]
    return any("by `torpor codegen" in line for line in start)


def write(file: BackendFile, out: Path) -> list[str]:
    """Bring `_generated/` up to date and write the author's files that are missing.

    What is written, removed files included. Each file is put in place at once.
    """
    changed = stale(file, out)
    begun = {path: text for path, text in starters(file).items() if not (out / path).exists()}
    for path, new in {**begun, **{path: new for path, (_, new) in changed.items()}}.items():
        if new is None:
            (out / path).unlink()
        else:
            _put(out / path, new)
    return sorted({*changed, *begun})


def _put(path: Path, text: str) -> None:
    """Write a file so that nobody ever sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(text)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise


def diff(file: BackendFile, out: Path) -> str:
    """A unified diff from what is there to what would be written."""
    parts = []
    for path, (old, new) in stale(file, out).items():
        names = (
            "/dev/null" if old is None else f"a/{path}",
            "/dev/null" if new is None else f"b/{path}",
        )
        lines = difflib.unified_diff(_lines(old), _lines(new), *names)
        parts += [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return "".join(parts)


def _lines(text: str | None) -> list[str]:
    return (text or "").splitlines(keepends=True)
