"""Writes generated files: instantiates skeletons, updates folders."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

SUFFIX = ".txt"
"""The suffix of every file in a skeleton, so that they are not modules of torpor."""

Changes = dict[str, tuple[bytes | None, bytes | None]]
"""By path: the present and the new content; None: no file."""


def skeleton(package: str, folder: str, names: Mapping[str, str]) -> dict[str, str]:
    """The files of a skeleton by path, with `{{name}}` replaced using `names`, in paths NAME."""
    made = {}
    for path, text in _files(resources.files(package) / folder, ""):
        for name, word in names.items():
            text = text.replace("{{" + name + "}}", word)
        made[path.replace("NAME", names["name"]).removesuffix(SUFFIX)] = text
    return made


def _files(folder: Traversable, prefix: str) -> Iterator[tuple[str, str]]:
    for item in folder.iterdir():
        if item.is_dir():
            yield from _files(item, f"{prefix}{item.name}/")
        elif item.name.endswith(SUFFIX):
            yield f"{prefix}{item.name}", item.read_text(encoding="utf-8")


def changes(folder: Path, made: Mapping[str, str], too_many: Iterable[str] = ()) -> Changes:
    """The changes to a folder if `made` is written and the files `too_many` are removed."""
    wanted = {path: text.encode() for path, text in made.items()}
    paths = sorted({*wanted, *too_many})
    there = {path: (folder / path).read_bytes() for path in paths if (folder / path).exists()}
    pairs = {path: (there.get(path), wanted.get(path)) for path in paths}
    return {path: (old, new) for path, (old, new) in pairs.items() if old != new}


def write(folder: Path, changed: Changes) -> list[str]:
    """Apply these changes, each file atomically; returns the paths."""
    for path, (_, new) in changed.items():
        if new is None:
            (folder / path).unlink()
        else:
            _put(folder / path, new)
    return list(changed)


def _put(path: Path, content: bytes) -> None:
    """Write a file atomically."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        os.unlink(temporary)
        raise
