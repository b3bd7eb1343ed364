"""Entries on disk: bytes under keys, for all processes of one user.

    <directory>/secret              32 random bytes, made by the first process
    <directory>/entries/<key>       one entry

An entry is written to a temporary file, flushed to disk and then renamed, so no process ever sees
part of one; two processes that write the same entry write the same contents. It is signed with the
secret: an entry that is damaged, truncated, or from another user or cache counts as missing, and is
replaced by the next write. A directory or file that others can write to is not used at all. Errors
of the disk cause a warning and nothing more.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import json
import os
import re
import secrets
import stat
import struct
import time
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from torpor import config, metrics
from torpor.errors import TorporWarning

MAGIC: Final = b"torpor cache entry 1\n"
_SIGNATURE_BYTES: Final = 32
_SECRET_BYTES: Final = 32
_LENGTH: Final = struct.Struct("<I")
_HEAD_BYTES: Final = len(MAGIC) + _SIGNATURE_BYTES + _LENGTH.size
_LONGEST_HEADER: Final = 1 << 16
_KEY: Final = re.compile(r"[0-9a-f]{64}")
_UNFINISHED: Final = ".unfinished-"
_UNFINISHED_SECONDS: Final = 3600
"""The age at which a temporary file, left by a process that was killed, is removed by another."""


class NotUsable(Exception):
    """A directory or a file must not be used; the message says why."""


class Damaged(Exception):
    """An entry is not what was written; the message says what is wrong."""


def key_of(*parts: str) -> str:
    """A key for the contents that `parts` describe completely."""
    digest = hashlib.sha256()
    for part in parts:
        data = part.encode()
        digest.update(_LENGTH.pack(len(data)) + data)
    return digest.hexdigest()


def is_key(text: str) -> bool:
    """Whether `text` has the form of a key."""
    return _KEY.fullmatch(text) is not None


def default_directory() -> Path:
    """Where entries are kept by default."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    root = Path(base) if os.path.isabs(base) else Path.home() / ".cache"
    return root / "torpor"


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as listed, without its contents."""

    key: str
    path: Path
    nbytes: int
    used: float  # time of last use, in seconds since 1970


class Store:
    """The entries in one directory."""

    def __init__(self, directory: Path, max_bytes: int | None = None) -> None:
        self.directory = directory
        self.max_bytes = max_bytes  # None: `config.cache_bytes`
        self.writable = True  # False after an error
        self._secret: bytes | None = None

    # -- reading -----------------------------------------------------------------------------------

    def read(self, key: str) -> bytes | None:
        """The contents of the entry for `key`; None if it is missing or invalid."""
        path = self._path(key)
        try:
            if not path.exists():
                return None
            _, payload = self.load(path)
        except FileNotFoundError:  # removed meanwhile by another process
            return None
        except (Damaged, NotUsable) as problem:
            metrics.count("DiskCacheRefused")
            self.remove(key)
            if isinstance(problem, NotUsable):
                warn_once(f"an entry of the cache of compiled graphs is not used: {problem}")
            return None
        except OSError as error:
            warn_once(f"the cache of compiled graphs cannot be read: {error}")
            return None
        with contextlib.suppress(OSError):  # on a read-only disk, the time of use is not recorded
            os.utime(path)
        return payload

    def load(self, path: Path) -> tuple[dict[str, Any], bytes]:
        """The description and contents of the entry at `path`; raises if it is invalid."""
        data = _read_ours(path)
        if not data.startswith(MAGIC) or len(data) < _HEAD_BYTES:
            raise Damaged("it does not begin as an entry does")
        signature = data[len(MAGIC) : len(MAGIC) + _SIGNATURE_BYTES]
        signed = memoryview(data)[len(MAGIC) + _SIGNATURE_BYTES :]
        if not hmac.compare_digest(signature, self._sign(signed)):
            raise Damaged("its signature is wrong: it is damaged, or was not written here")
        (length,) = _LENGTH.unpack_from(signed)
        about = json.loads(bytes(signed[_LENGTH.size : _LENGTH.size + length]))
        if about["key"] != path.name:
            raise Damaged("it is the entry of another key")
        return about, bytes(signed[_LENGTH.size + length :])

    def about(self, entry: Entry) -> dict[str, Any]:
        """The description of an entry, for display: its signature is not verified."""
        return self.head(entry.key)

    def head(self, key: str) -> dict[str, Any]:
        """The description of the entry for `key`, not verified; empty if there is none."""
        path = self._path(key)
        with contextlib.suppress(OSError, ValueError, struct.error), open(path, "rb") as file:
            head = file.read(_HEAD_BYTES)
            (length,) = _LENGTH.unpack(head[-_LENGTH.size :])
            found = json.loads(file.read(min(length, _LONGEST_HEADER)))
            if head.startswith(MAGIC) and isinstance(found, dict):
                return found
        return {}

    def entries(self) -> list[Entry]:
        """Every entry, the least recently used first."""
        found = []
        for item in self._files():
            if is_key(item.name):
                with contextlib.suppress(FileNotFoundError):
                    facts = item.stat(follow_symlinks=False)
                    found.append(Entry(item.name, Path(item), facts.st_size, facts.st_mtime))
        return sorted(found, key=lambda entry: (entry.used, entry.key))

    # -- writing -----------------------------------------------------------------------------------

    def write(self, key: str, about: Mapping[str, Any], payload: bytes) -> bool:
        """Keep `payload` under `key`, with a description; False if that fails."""
        if not self.writable:
            return False
        try:
            data = self._entry(key, about, payload)
            if len(data) > self._limit():
                return False
            _make_directory(self._folder)
            place(self._path(key), data)
            self.trim()
        except (OSError, NotUsable) as error:
            self.writable = False
            warn_once(f"compiled graphs are not kept in {self.directory}: {error}")
            return False
        return True

    def remove(self, key: str) -> None:
        """Remove an entry, if it exists and the disk permits it."""
        with contextlib.suppress(OSError):
            self._path(key).unlink()

    def clear(self) -> int:
        """Remove every entry; returns their number."""
        entries = self.entries()
        for entry in entries:
            self.remove(entry.key)
        self._remove_unfinished(older_than=0.0)
        return len(entries)

    def trim(self) -> None:
        """Remove the least recently used entries until the rest fits, and old temporary files."""
        entries = self.entries()
        total = sum(entry.nbytes for entry in entries)
        for entry in entries:
            if total <= self._limit():
                break
            self.remove(entry.key)
            total -= entry.nbytes
        self._remove_unfinished(older_than=_UNFINISHED_SECONDS)

    def _remove_unfinished(self, older_than: float) -> None:
        """Remove temporary files of processes that were killed while writing."""
        now = time.time()
        for item in self._files():
            if item.name.startswith(_UNFINISHED):
                with contextlib.suppress(OSError):  # renamed or removed by another process
                    if now - item.stat().st_mtime >= older_than:
                        os.unlink(item)

    # -- inside ------------------------------------------------------------------------------------

    @property
    def _folder(self) -> Path:
        return self.directory / "entries"

    def _path(self, key: str) -> Path:
        if not is_key(key):
            raise ValueError(f"a key is 64 hexadecimal digits, not {key!r}")
        return self._folder / key

    def _files(self) -> Iterator[os.DirEntry[str]]:
        with contextlib.suppress(FileNotFoundError), os.scandir(self._folder) as found:
            yield from found

    def _limit(self) -> int:
        return config.cache_bytes if self.max_bytes is None else self.max_bytes

    def _entry(self, key: str, about: Mapping[str, Any], payload: bytes) -> bytes:
        header = json.dumps({**about, "key": key}).encode()
        signed = b"".join((_LENGTH.pack(len(header)), header, payload))
        return b"".join((MAGIC, self._sign(signed), signed))

    def _sign(self, data: bytes | memoryview) -> bytes:
        if self._secret is None:
            self._secret = _secret_in(self.directory)
        return hmac.digest(self._secret, data, "sha256")


# -- files and directories that belong to the user -------------------------------------------------


def check_directory(path: Path) -> None:
    """Reject a directory that does not belong to the user, or that others can write to."""
    facts = os.stat(path)
    if not stat.S_ISDIR(facts.st_mode):
        raise NotUsable(f"{path} is not a directory")
    _check_owner(path, facts)


def _check_owner(path: Path, facts: os.stat_result) -> None:
    if not hasattr(os, "geteuid"):
        return  # this platform has no owners and modes
    if facts.st_uid != os.geteuid():
        raise NotUsable(f"{path} belongs to another user")
    if facts.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotUsable(f"others can write to {path}: chmod go-w it, or name another directory")


def _make_directory(path: Path) -> None:
    """Make a directory that only the user can access; check one that exists."""
    with contextlib.suppress(FileExistsError):
        os.makedirs(path, mode=0o700)
    check_directory(path)


def _read_ours(path: Path) -> bytes:
    """The contents of a file that belongs to the user and is not a link."""
    try:
        handle = os.open(path, os.O_RDONLY | getattr(os, "O_NOFOLLOW", 0))
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise NotUsable(f"{path} is a link") from None
        raise
    with open(handle, "rb") as file:
        facts = os.fstat(handle)
        if not stat.S_ISREG(facts.st_mode):
            raise NotUsable(f"{path} is not a plain file")
        _check_owner(path, facts)
        return file.read()


def place(path: Path, data: bytes) -> None:
    """Atomically replace the contents of `path` by `data`."""
    unfinished = path.parent / f"{_UNFINISHED}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        _write_through(unfinished, data)
        os.replace(unfinished, path)
    except BaseException:
        with contextlib.suppress(OSError):
            unfinished.unlink()
        raise


def _write_through(path: Path, data: bytes) -> None:
    """Write a file that only the user can read, and flush it to disk."""
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(handle, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(handle)


def _secret_in(directory: Path) -> bytes:
    """The secret of a directory; made if there is none, or an invalid one."""
    path = directory / "secret"
    found = _read_secret(path)
    if found is not None:
        return found
    _make_directory(directory)
    _publish(path, secrets.token_bytes(_SECRET_BYTES))
    found = _read_secret(path)
    if found is None:
        raise NotUsable(f"{path} cannot be read back")
    return found


def _read_secret(path: Path) -> bytes | None:
    """The secret at `path`; None if there is none. A file of the wrong length is removed."""
    with contextlib.suppress(FileNotFoundError):
        check_directory(path.parent)
        found = _read_ours(path)
        if len(found) == _SECRET_BYTES:
            return found
        path.unlink()
    return None


def _publish(path: Path, data: bytes) -> None:
    """Atomically create `path` with the contents `data`, unless another process was faster."""
    unfinished = path.parent / f"{_UNFINISHED}{os.getpid()}-{secrets.token_hex(8)}"
    try:
        _write_through(unfinished, data)
        try:
            os.link(unfinished, path)
        except FileExistsError:
            return
        except OSError:  # the file system has no hard links
            os.replace(unfinished, path)
    finally:
        with contextlib.suppress(OSError):
            unfinished.unlink()


# -- the store of this process ---------------------------------------------------------------------

_stores: dict[Path, Store | None] = {}
_warned: set[str] = set()


def directory() -> Path:
    """The directory in use."""
    return Path(config.cache_dir).expanduser() if config.cache_dir else default_directory()


def store() -> Store | None:
    """The store in use; None if the user has disabled it, or it cannot be used."""
    if not config.cache:
        return None
    try:
        where = directory()
    except RuntimeError as error:  # there is no home directory
        warn_once(f"compiled graphs are neither kept nor looked up: {error}")
        return None
    if where not in _stores:
        _stores[where] = _open(where)
    return _stores[where]


def _open(where: Path) -> Store | None:
    try:
        check_directory(where)
    except FileNotFoundError:
        return Store(where)  # the directory is made on the first write
    except (OSError, NotUsable) as error:
        warn_once(f"compiled graphs are neither kept nor looked up: {error}")
        return None
    return Store(where)


def warn_once(text: str) -> None:
    """Warn about a problem that the program can do without; once for each text."""
    if text not in _warned:
        _warned.add(text)
        warnings.warn(text, TorporWarning, stacklevel=2)
