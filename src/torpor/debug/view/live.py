"""The page of a running program: `TORPOR_VIEW=1 python train.py`.

The address is printed once, and saved in a folder that only this user can read, where `torpor view`
finds it.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import multiprocessing
import os
import stat
import sys
import tempfile
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from torpor import config
from torpor.debug.view.server import ViewServer
from torpor.debug.view.sources import LiveSource, program_name

_PRIVATE: Final = 0o700


@dataclass(frozen=True)
class RunningProgram:
    """A running program with a page."""

    pid: int
    program: str
    address: str


def start() -> ViewServer | None:
    """Serve the page of this process, and print its address; None in a child process."""
    if multiprocessing.parent_process() is not None:
        return None
    server = _server(LiveSource())
    if server is None:
        return None
    server.start()
    _leave_address(RunningProgram(os.getpid(), program_name(), server.address))
    _say(f"torpor view: {server.address}")
    return server


def _server(source: LiveSource) -> ViewServer | None:
    """A server on the configured port, or on any if that is taken, as by other ranks of a job."""
    problem: Exception | None = None
    for port in (config.view_port, 0):
        try:
            return ViewServer(source, port)
        except (OSError, OverflowError) as error:
            problem = error
    _say(f"torpor view: cannot listen on 127.0.0.1: {problem}")
    return None


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)  # noqa: T201  # the user asked for it


# -- addresses ---------------------------------------------------------------------------------


def _folder() -> Path:
    user = os.getuid() if hasattr(os, "getuid") else 0
    return Path(os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir(), f"torpor-view-{user}")


def _private_folder() -> Path | None:
    """The folder, if it is ours and private."""
    folder = _folder()
    try:
        folder.mkdir(mode=_PRIVATE, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return None
    ours = not hasattr(os, "getuid") or found.st_uid == os.getuid()
    private = os.name == "nt" or not found.st_mode & 0o077
    return folder if stat.S_ISDIR(found.st_mode) and ours and private else None


def _leave_address(program: RunningProgram) -> None:
    folder = _private_folder()
    if folder is None:
        return
    path = folder / f"{program.pid}.json"
    try:
        path.unlink(missing_ok=True)
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(number, "w", encoding="utf-8") as file:
            json.dump(asdict(program), file)
    except OSError:  # for example a full disk; the address was printed anyway
        return
    atexit.register(_remove_address, path, program.pid)


def _remove_address(path: Path, pid: int) -> None:
    if os.getpid() == pid:  # forked processes inherit this handler
        path.unlink(missing_ok=True)


def running() -> list[RunningProgram]:
    """This user's running programs with a page, newest first."""
    folder = _private_folder()
    found: list[tuple[float, RunningProgram]] = []
    for path in [] if folder is None else folder.glob("*.json"):
        with contextlib.suppress(OSError, ValueError, TypeError):  # concurrent exit or write
            program = RunningProgram(**json.loads(path.read_text(encoding="utf-8")))
            if _is_alive(program.pid):
                found.append((path.stat().st_mtime, program))
            else:
                path.unlink(missing_ok=True)
    return [program for _, program in sorted(found, key=lambda item: -item[0])]


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
