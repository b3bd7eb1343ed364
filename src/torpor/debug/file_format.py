"""Record files: checksummed binary blobs and a JSON manifest. They contain no code.

    "torpor record 1\\n"                            16 bytes: file type and version
    blob, blob, ...                                raw bytes, each aligned to 64
    manifest                                       JSON, UTF-8
    offset, length, SHA-256 of the manifest        8 + 8 + 32 bytes, little-endian
    "the end\\n"                                    8 bytes: the file is complete

The manifest lists the blobs (offset, length, SHA-256) and refers to them by number. A reader checks
every length against the file size before reading, every checksum and every field before use;
problems are reported as `RecordFileError`, with what and where.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import struct
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final, NoReturn

from torpor.debug.plain_text import printable
from torpor.errors import RecordFileError

MAGIC: Final = b"torpor record 1\n"
END: Final = b"the end\n"
_FAMILY: Final = b"torpor record "
_TRAILER: Final = struct.Struct("<QQ32s8s")
_ALIGNMENT: Final = 64
MAX_MANIFEST: Final = 256 << 20
MAX_TEXT: Final = 256 << 20
_DEEPEST_JSON: Final = 12
_LARGEST_INT: Final = 1 << 62
_MANIFEST: Final = object()  # the default of `within`


class Writer:
    """Writes a record file: blobs first, then the manifest, then the rename.

    Until `close` the contents are in a temporary file next to the target, so that the target is
    always complete. Blobs with equal contents are stored once.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        number, name = tempfile.mkstemp(prefix=f".{self.path.name}.", dir=self.path.parent)
        self._temporary = Path(name)
        self._file: BinaryIO = os.fdopen(number, "wb")
        self._file.write(MAGIC)
        self.size = len(MAGIC)
        self.parts: list[list[Any]] = []
        self._known: dict[bytes, int] = {}

    def add(self, contents: bytes | memoryview) -> int:
        """Store a blob; returns its number."""
        digest = hashlib.sha256(contents).digest()
        number = self._known.get(digest)
        if number is None:
            self._pad()
            number = self._known[digest] = len(self.parts)
            self.parts.append([self.size, len(contents), digest.hex()])
            self._write(contents)
        return number

    def _pad(self) -> None:
        self._write(bytes(-self.size % _ALIGNMENT))

    def _write(self, contents: bytes | memoryview) -> None:
        self._file.write(contents)
        self.size += len(contents)

    def close(self, manifest: dict[str, Any]) -> None:
        """Write the manifest and rename the file to its target."""
        whole = {**manifest, "blobs": self.parts}
        text = json.dumps(whole, allow_nan=False, separators=(",", ":")).encode()
        offset, digest = self.size, hashlib.sha256(text).digest()
        self._write(text + _TRAILER.pack(offset, len(text), digest, END))
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(self._temporary, 0o666 & ~umask)  # temporary files are private to their owner
        os.replace(self._temporary, self.path)

    def discard(self) -> None:
        """Close without leaving a file."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)


class Reader:
    """An open record file: its manifest, and its blobs on demand."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        try:
            self._file: BinaryIO = open(self.path, "rb")  # noqa: SIM115  # closed by `close`
        except OSError as error:
            raise RecordFileError(f"{self.path}: {error.strerror or error}") from error
        try:
            self._end = self._read_trailer()
            self.manifest = self._read_manifest()
            self._parts = self._read_table()
        except BaseException:
            self._file.close()
            raise

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._file.close()

    def fail(self, what: str) -> NoReturn:
        """Raise `RecordFileError` for this file."""
        raise RecordFileError(f"{self.path}: {printable(what)}") from None

    # -- reading -------------------------------------------------------------------------------

    def _at(self, offset: int, length: int, what: str) -> bytes:
        try:
            self._file.seek(offset)
            found = self._file.read(length)
        except (OSError, ValueError) as error:
            self.fail(f"{what} cannot be read: {error}")
        if len(found) != length:
            self.fail(f"{what} is cut off: {len(found)} of {length} bytes at {offset}")
        return found

    def _read_trailer(self) -> int:
        """Check both ends of the file; returns the position of the trailer (its last 56 bytes)."""
        start = self._file.read(len(MAGIC))
        if start != MAGIC:
            if start.startswith(_FAMILY):
                version = start[len(_FAMILY) :].split(b"\n")[0].decode("ascii", "replace")
                self.fail(f"a record of version {version}; this torpor reads version 1")
            self.fail("not a torpor record file")
        size = self._file.seek(0, os.SEEK_END)
        if size < len(MAGIC) + _TRAILER.size:
            self.fail(f"cut off after {size} bytes")
        return size - _TRAILER.size

    def _read_manifest(self) -> dict[str, Any]:
        trailer = self._at(self._end, _TRAILER.size, "the end of the file")
        offset, length, digest, end = _TRAILER.unpack(trailer)
        if end != END:
            self.fail("cut off, or damaged at its end")
        if length > MAX_MANIFEST:
            self.fail(f"the manifest is {length} bytes long; {MAX_MANIFEST} are allowed")
        if offset < len(MAGIC) or offset + length != self._end:
            self.fail(f"the manifest cannot be {length} bytes at {offset}")
        self._end = offset  # of the blobs, from here on
        text = self._at(offset, length, "the manifest")
        if hashlib.sha256(text).digest() != digest:
            self.fail(f"the manifest at {offset} is damaged: its SHA-256 is another")
        return self._decoded(text)

    def _decoded(self, text: bytes) -> dict[str, Any]:
        if _depth(text) > _DEEPEST_JSON:
            self.fail(f"the manifest is nested more than {_DEEPEST_JSON} deep")
        try:
            found = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_constant)
        except (ValueError, RecursionError) as error:
            self.fail(f"the manifest is not the JSON it should be: {error}")
        if not isinstance(found, dict):
            self.fail("the manifest is not a JSON object")
        return found

    def _read_table(self) -> list[tuple[int, int, bytes]]:
        return [self._entry(entry, i) for i, entry in enumerate(self.list_of("blobs"))]

    def _entry(self, entry: Any, number: int) -> tuple[int, int, bytes]:
        where = f"blob {number}"
        if not isinstance(entry, list) or len(entry) != 3 or not isinstance(entry[2], str):
            self.fail(f"{where}: expected offset, length and SHA-256")
        offset, length = self.integer(entry[0], where), self.integer(entry[1], where)
        if offset < len(MAGIC) or offset + length > self._end:
            self.fail(f"{where}: {length} bytes at {offset} are not in the file")
        try:
            return offset, length, bytes.fromhex(entry[2])
        except ValueError:
            self.fail(f"{where}: its SHA-256 is no hexadecimal number")

    # -- checked access ------------------------------------------------------------------------

    def blob(self, number: Any, where: str, length: int | None = None) -> bytes:
        """A blob, after checking its checksum, and its length if given."""
        offset, size, digest = self._parts[self._number(number, len(self._parts), where)]
        if length is not None and size != length:
            self.fail(f"{where}: blob {number} has {size} bytes where {length} belong")
        contents = self._at(offset, size, f"{where}: blob {number}")
        if hashlib.sha256(contents).digest() != digest:
            self.fail(f"{where}: blob {number} at {offset} is damaged: its SHA-256 is another")
        return contents

    def text(self, number: Any, where: str) -> str:
        """A blob as text."""
        place = self._number(number, len(self._parts), where)
        if self._parts[place][1] > MAX_TEXT:
            self.fail(f"{where}: a text of {self._parts[place][1]} bytes is too long")
        try:
            return self.blob(number, where).decode()
        except UnicodeDecodeError:
            self.fail(f"{where}: blob {number} is not UTF-8")

    def json(self, number: Any, where: str) -> Any:
        """A blob as a JSON object."""
        return self._decoded(self.text(number, where).encode())

    def _number(self, number: Any, count: int, where: str) -> int:
        place = self.integer(number, where)
        if place >= count:
            self.fail(f"{where}: there is no number {place}, only {count} of them")
        return place

    def integer(self, found: Any, where: str) -> int:
        """`found`, checked to be a nonnegative integer."""
        if type(found) is not int or not 0 <= found < _LARGEST_INT:
            self.fail(f"{where}: expected an integer from 0 up, found {_short(found)}")
        return found

    def integers(self, found: Any, where: str, longest: int = 64) -> tuple[int, ...]:
        """`found`, checked to be a short list of integers."""
        if not isinstance(found, list) or len(found) > longest:
            self.fail(f"{where}: expected at most {longest} integers, found {_short(found)}")
        return tuple(self.integer(item, where) for item in found)

    def index(self, found: Any, among: Sequence[Any], where: str) -> int:
        """`found`, checked to be an index into `among`."""
        return self._number(found, len(among), where)

    def list_of(self, name: str, within: Any = _MANIFEST, where: str = "manifest") -> list[Any]:
        """The list named `name`."""
        return self.field(name, list, within, where)  # type: ignore[no-any-return]  # checked there

    def field(self, name: str, kind: type, within: Any = _MANIFEST, where: str = "manifest") -> Any:
        """The field named `name`, checked to be a `kind`."""
        within = self.manifest if within is _MANIFEST else within
        if not isinstance(within, dict):
            self.fail(f"{where}: expected an object, found {_short(within)}")
        if name not in within:
            self.fail(f"{where}: {name!r} is missing")
        if type(within[name]) is not kind:
            self.fail(f"{where}: {name!r} is {_short(within[name])}, not a {kind.__name__}")
        return within[name]


def _short(found: Any) -> str:
    text = repr(found)
    return text if len(text) < 60 else f"{text[:60]}..."


_STRING_OR_BRACKET: Final = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)


def _depth(text: bytes) -> int:
    """The nesting depth of lists and objects in a JSON text."""
    deepest = depth = 0
    for found in _STRING_OR_BRACKET.finditer(text):
        mark = found[0]
        if mark in (b"[", b"{"):
            depth += 1
            deepest = max(deepest, depth)
        elif mark in (b"]", b"}"):
            depth -= 1
    return deepest


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a name stands twice in one object")
    return found


def _no_constant(word: str) -> NoReturn:
    raise ValueError(f"{word} is no JSON")
