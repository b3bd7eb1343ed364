"""Exporting all entries of a store to one file, and importing them on another machine.

The file is a zip; `manifest.json` lists the entries, each with the digest of its contents. These
will be run as code, so importing asserts that they come from a trusted source; imported entries are
signed like those made here.
"""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from torpor.cache.store import Damaged, NotUsable, Store, is_key
from torpor.errors import TorporError

_FORMAT: Final = 1
_MANIFEST: Final = "manifest.json"
_LARGEST_MANIFEST: Final = 64 << 20

Advance = Callable[[str], None]  # called for each entry that is done


class ArchiveError(TorporError):
    """A file is not an archive of compiled graphs, or is damaged; the message says why."""


def pack_store(store: Store, path: Path, advance: Advance) -> int:
    """Write every valid entry of `store` to `path`; returns their number."""
    listed: list[dict[str, Any]] = []
    unfinished = path.with_name(path.name + ".unfinished")
    try:
        with zipfile.ZipFile(unfinished, "w", zipfile.ZIP_DEFLATED) as archive:
            for entry in store.entries():
                try:
                    about, payload = store.load(entry.path)
                except (Damaged, NotUsable, FileNotFoundError) as problem:
                    advance(f"left out: {problem}")
                    continue
                digest = hashlib.sha256(payload).hexdigest()
                listed.append({"about": about, "sha256": digest, "nbytes": len(payload)})
                archive.writestr(_member(entry.key), payload)
                advance(entry.key[:12])
            archive.writestr(_MANIFEST, json.dumps({"format": _FORMAT, "entries": listed}))
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)
    return len(listed)


class Archive:
    """An archive opened for reading."""

    def __init__(self, path: Path) -> None:
        try:
            self._zip = zipfile.ZipFile(path)
        except zipfile.BadZipFile as error:
            raise ArchiveError(f"{path} is no archive of compiled graphs: {error}") from error
        try:
            self.entries = _listed(self._zip)
        except (zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
            self._zip.close()
            raise ArchiveError(f"{path} is no archive of compiled graphs: {error}") from error

    def __enter__(self) -> Archive:
        return self

    def __exit__(self, *_: object) -> None:
        self._zip.close()

    def unpack(self, store: Store, advance: Advance) -> int:
        """Write every entry to `store`, signed as its own; returns their number."""
        for entry in self.entries:
            payload = self._payload(entry)
            about = {**entry["about"], "imported": True}
            if not store.write(entry["about"]["key"], about, payload):
                raise ArchiveError(f"{store.directory} takes no more entries")
            advance(entry["about"]["key"][:12])
        return len(self.entries)

    def _payload(self, entry: dict[str, Any]) -> bytes:
        key = entry["about"]["key"]
        try:
            with self._zip.open(_member(key)) as file:
                payload = file.read(entry["nbytes"] + 1)  # bounded, in case of a zip bomb
        except (KeyError, zipfile.BadZipFile, OSError, EOFError) as error:
            raise ArchiveError(f"entry {key} cannot be read: {error}") from error
        if hashlib.sha256(payload).hexdigest() != entry["sha256"]:
            raise ArchiveError(f"entry {key} is damaged")
        return payload


def _listed(archive: zipfile.ZipFile) -> list[dict[str, Any]]:
    with archive.open(_MANIFEST) as file:
        manifest = json.loads(file.read(_LARGEST_MANIFEST))
    if manifest["format"] != _FORMAT:
        raise ValueError(f"its format is {manifest['format']}, not {_FORMAT}")
    for entry in manifest["entries"]:
        if not is_key(entry["about"]["key"]) or type(entry["nbytes"]) is not int:
            raise ValueError("an entry without a key or a size")
    return list(manifest["entries"])


def _member(key: str) -> str:
    return f"entries/{key}"
