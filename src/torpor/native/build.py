"""Building the native recorder: a little C++, one call of the compiler, one library on disk.

    <cache directory>/native/<key>.so        the library
    <cache directory>/native/<key>.failed    why it could not be built, if it could not
    <cache directory>/native/<key>.building  somebody is building it now

The key stands for all that the library depends on: the source, torch, Python, the compiler. A
library is built under another name, tried out in a process of its own and then renamed, so nobody
ever loads half of one, or one that does not work.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import secrets
import shutil
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from torpor.errors import NativeError
from torpor.execute.persistent import check_directory, directory

SOURCE: Final = Path(__file__).with_name("recorder.cpp")
_FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_BUILDING_SECONDS: Final = 900
"""How old a sign that somebody is building may be, before it is one of a killed process."""
_KEPT_SECONDS: Final = 60 * 24 * 3600
"""How long a library that nobody uses is kept: it may be another environment's."""
_TRY_OUT: Final = "import sys, torpor.trace.native as n; n.try_out(sys.argv[1])"


def compiler() -> str | None:
    """The C++ compiler: `CXX`, or the first that is found; None if there is none."""
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return os.path.realpath(found)
    return None


def key(compiler: str | None) -> str:
    """What tells a library from those of other sources, torches, Pythons and compilers."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    facts = [torch.__version__, torch.version.git_version, sys.version, platform.machine(), *_FLAGS]
    if compiler is not None:
        about = os.stat(compiler)
        facts += [compiler, str(about.st_size), str(about.st_mtime_ns)]
    digest.update("\0".join(facts).encode())
    return digest.hexdigest()


def sources() -> list[Path]:
    """All that is compiled."""
    return sorted(path for path in SOURCE.parent.iterdir() if path.suffix in (".h", ".cpp"))


def folder() -> Path:
    """Where libraries are kept."""
    return directory() / "native"


def library() -> Path:
    """The library of this torch and this Python, whether it is there or not."""
    return folder() / f"{key(compiler())}.so"


def is_built(path: Path) -> bool:
    """The library at `path` is there, and nobody but the user can have written it."""
    try:
        about = os.lstat(path)
    except FileNotFoundError:
        return False
    check_directory(path.parent)
    return not hasattr(os, "geteuid") or (
        about.st_uid == os.geteuid() and not about.st_mode & 0o022 and path.is_file()
    )


def failure(path: Path) -> str | None:
    """Why the library at `path` could not be built; None if nobody has tried in vain."""
    try:
        return path.with_suffix(".failed").read_text()
    except OSError:
        return None


def command(compiler: str, out: Path) -> list[str]:
    """The call that compiles the source to `out`."""
    root = Path(torch.__file__).parent
    headers = (
        root / "include", root / "include/torch/csrc/api/include", sysconfig.get_path("include"),
    )  # fmt: skip
    libraries = root / "lib"
    return [
        compiler, *_FLAGS,
        f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
        *(f"-isystem{header}" for header in headers),
        str(SOURCE), "-o", str(out),
        f"-L{libraries}", "-lc10", "-ltorch_cpu", "-ltorch_python", f"-Wl,-rpath,{libraries}",
    ]  # fmt: skip


def build() -> Path:
    """Build the library, try it out and put it in its place; `NativeError` if that cannot be."""
    found = compiler()
    if found is None:
        raise NativeError("the native recorder needs a C++ compiler: g++, clang++, or `CXX`")
    path = library()
    with contextlib.suppress(FileExistsError):
        os.makedirs(path.parent, mode=0o700)
    check_directory(path.parent)
    unfinished = path.with_suffix(f".unfinished-{secrets.token_hex(8)}.so")
    try:
        _run(command(found, unfinished), "could not be compiled")
        _run([sys.executable, "-c", _TRY_OUT, str(unfinished)], "does not work here")
        os.chmod(unfinished, 0o700)
        os.replace(unfinished, path)
        _prune(path.parent)
    except NativeError as error:
        path.with_suffix(".failed").write_text(str(error))
        raise
    finally:
        unfinished.unlink(missing_ok=True)
    path.with_suffix(".failed").unlink(missing_ok=True)
    return path


def used(path: Path) -> Path:
    """The library at `path`, which is in use from now on and so is kept."""
    with contextlib.suppress(OSError):  # of a directory that can only be read
        os.utime(path)
    return path


def _prune(folder: Path) -> None:
    """Remove what nobody has used for long."""
    for path in folder.iterdir():
        with contextlib.suppress(OSError):  # somebody else removes it too
            if time.time() - path.stat().st_mtime > _KEPT_SECONDS:
                path.unlink()


def _run(command: list[str], what: str) -> None:
    environment = {**os.environ, "TORPOR_NATIVE": "off"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    if done.returncode:
        words = "\n".join((done.stderr or done.stdout).splitlines()[-40:])
        raise NativeError(f"the native recorder {what} ({' '.join(command[:2])} ...):\n{words}")


def is_being_built(path: Path) -> bool:
    """Somebody is building the library at `path` now."""
    try:
        return time.time() - path.with_suffix(".building").stat().st_mtime < _BUILDING_SECONDS
    except OSError:
        return False


@contextlib.contextmanager
def alone(path: Path) -> Iterator[bool]:
    """Whether nobody else is building the library at `path` while the body runs."""
    sign = path.with_suffix(".building")
    if not is_being_built(path):
        sign.unlink(missing_ok=True)  # of a process that was killed
    try:
        os.makedirs(sign.parent, mode=0o700, exist_ok=True)
        os.close(os.open(sign, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
    except OSError:
        yield False
        return
    try:
        yield True
    finally:
        sign.unlink(missing_ok=True)


_started: list[subprocess.Popen[bytes]] = []  # nobody waits for them


def start() -> None:
    """Let a process of low priority build the library, for processes to come."""
    process = subprocess.Popen(
        [sys.executable, "-m", "torpor", "native", "build", "--quiet"],
        env={**os.environ, "TORPOR_NATIVE": "off", "TORPOR_CACHE_DIR": str(directory())},
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        start_new_session=True,
    )  # fmt: skip
    _started.append(process)
