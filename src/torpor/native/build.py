"""Building the native recorder: a little C++, one call of the compiler, one library on disk.

    <cache directory>/native/<key>.so        the library
    <cache directory>/native/<key>.failed    by which compiler it could not be built, and why
    <cache directory>/native/<key>.lock      locked by who is building it
    <cache directory>/native/<key>.started   locked by a process that was started to build it

The key stands for all that the library depends on: the source, torch, Python. A library is built
under another name, tried out in a process of its own and then renamed, so nobody ever loads half of
one, or one that does not work. A process that is killed meanwhile leaves its lock, which ends with
it, and a file that the next one removes.
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
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch

from torpor.cache.store import NotUsable, check_directory, directory
from torpor.compiling import processes
from torpor.errors import NativeError

if sys.platform != "win32":
    import fcntl

SOURCE: Final = Path(__file__).with_name("recorder.cpp")
_FLAGS: Final = ("-std=c++20", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", "-w")
_ROOM: Final = 64 << 20
"""Bytes that have to be free where libraries are kept."""
_KEPT_SECONDS: Final = 60 * 24 * 3600
"""How long a library that nobody uses is kept: it may be another environment's."""
_BUILD: Final = "from torpor.cli import main; main(['native', 'build', '--quiet'])"
_UNFINISHED: Final = ".unfinished-"
_TRY_OUT: Final = "import sys, torpor.native.attach as n; n.try_out(sys.argv[1])"


def compiler() -> str | None:
    """The C++ compiler: `CXX`, or the first that is found; None if there is none."""
    if sys.platform == "win32":  # whose compilers are called otherwise
        return None
    for name in (os.environ.get("CXX", ""), "g++", "c++", "clang++"):
        found = shutil.which(name) if name else None
        if found is not None:
            return os.path.realpath(found)
    return None


def key() -> str:
    """What tells a library from those of other sources, torches and Pythons."""
    digest = hashlib.sha256()
    for path in sources():
        digest.update(path.read_bytes())
    facts = [torch.__version__, str(torch.version.git_version), sys.version, platform.machine()]
    digest.update("\0".join([*facts, *_FLAGS]).encode())
    return digest.hexdigest()


def sources() -> list[Path]:
    """All that is compiled."""
    return sorted(path for path in SOURCE.parent.iterdir() if path.suffix in (".h", ".cpp"))


def folder() -> Path:
    """Where libraries are kept."""
    return directory() / "native"


def library() -> Path:
    """The library of this torch and this Python, whether it is there or not."""
    return folder() / f"{key()}.so"


def is_built(path: Path) -> bool:
    """The library at `path` is there, and nobody but the user can have written it."""
    try:
        about = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return False
    check_directory(path.parent)
    return not hasattr(os, "geteuid") or (
        about.st_uid == os.geteuid() and not about.st_mode & 0o022 and path.is_file()
    )


def failure(path: Path) -> str | None:
    """Why this compiler could not build the library at `path`; None if nobody has tried in vain."""
    try:
        by, _, words = path.with_suffix(".failed").read_text().partition("\n")
    except OSError:
        return None
    return words if by == _identity() else None


def _identity() -> str:
    """The compiler, and which version of it."""
    found = compiler()
    if found is None:
        return "none"
    about = os.stat(found)
    return f"{found} {about.st_size} {about.st_mtime_ns}"


def has_room(path: Path) -> bool:
    """The library can be kept at `path`: the disk can be written to, and is not full."""
    folder = path.parent
    while not folder.exists():
        folder = folder.parent
    return os.access(folder, os.W_OK) and shutil.disk_usage(folder).free > _ROOM


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


def build(again: bool = True) -> Path:
    """Build the library, try it out and put it in its place; `NativeError` if that cannot be.

    Who else is building it is waited for; what he built is good enough, unless `again`.
    """
    path = library()
    with _keeping(), alone(path, wait=True):
        if again or not is_built(path):
            _build(path)
    return path


def build_unless_another_does() -> None:
    """The same, but for a library that is there, or that another process is building."""
    path = library()
    with _keeping(), alone(path) as is_alone:
        if is_alone and not is_built(path):
            _build(path)


@contextlib.contextmanager
def _keeping() -> Iterator[None]:
    if compiler() is None:
        raise NativeError("the native recorder needs a C++ compiler: g++, clang++, or `CXX`")
    try:
        yield
    except OSError as error:
        raise NativeError(f"the native recorder cannot be kept: {error}") from None


def _build(path: Path) -> None:
    found = str(compiler())
    unfinished = path.with_suffix(f"{_UNFINISHED}{secrets.token_hex(8)}.so")
    try:
        _run(command(found, unfinished), "could not be compiled")
        _run([sys.executable, "-c", _TRY_OUT, str(unfinished)], "does not work here")
        os.chmod(unfinished, 0o700)
        os.replace(unfinished, path)
        _prune(path.parent)
    except NativeError as error:
        path.with_suffix(".failed").write_text(f"{_identity()}\n{error}")
        raise
    finally:
        unfinished.unlink(missing_ok=True)
    path.with_suffix(".failed").unlink(missing_ok=True)


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
    done = subprocess.run(
        command, capture_output=True, text=True, env=processes.environment({}), check=False
    )
    if done.returncode:
        words = "\n".join((done.stderr or done.stdout).splitlines()[-40:])
        raise NativeError(f"the native recorder {what} ({' '.join(command[:2])} ...):\n{words}")


def is_being_built(path: Path) -> bool:
    """Somebody is building the library at `path` now."""
    try:
        with open(path.with_suffix(".lock"), "rb") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    return False


def _make_folder(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        os.makedirs(path.parent, mode=0o700)
    check_directory(path.parent)


@contextlib.contextmanager
def alone(path: Path, *, wait: bool = False) -> Iterator[bool]:
    """Whether nobody else builds the library at `path` while the body runs; or wait until so."""
    _make_folder(path)
    with open(path.with_suffix(".lock"), "ab") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
        except BlockingIOError:
            yield False
            return
        for left in path.parent.glob(f"{path.stem}{_UNFINISHED}*"):
            left.unlink(missing_ok=True)  # of a process that was killed
        yield True


def start() -> None:
    """Let a process of low priority build the library; nobody waits for it."""
    python = processes.interpreter()
    if python is None:
        return
    command = processes.command(python, _BUILD, detached=True)
    settings = {"TORPOR_CACHE_DIR": os.path.abspath(directory())}
    args = (library(), command, settings)
    threading.Thread(target=_start, args=args, name="torpor-build", daemon=True).start()


def _start(path: Path, command: list[str], settings: dict[str, str]) -> None:
    """Start a process, unless one that was started earlier, maybe by another program, still runs.

    It inherits the lock and so holds it until it ends. A busy machine lets it wait for long.
    """
    with contextlib.suppress(OSError, NotUsable):  # it is locked; no memory, too many processes
        _make_folder(path)
        with open(path.with_suffix(".started"), "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            subprocess.run(
                command, env=processes.environment(settings), check=False,
                stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                pass_fds=(file.fileno(),),
                process_group=0,  # Ctrl-C is not meant for it
            )  # fmt: skip
