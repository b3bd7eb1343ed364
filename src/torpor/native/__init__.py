"""The native recorder: C++ in front of the Python recorders, built on the user's machine.

`build` builds the library, `open_library` loads it; `native.attach` switches recording to it.
Without a compiler everything is recorded by Python.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import logging
import multiprocessing
from pathlib import Path
from typing import Any, Final

import torch

from torpor import config
from torpor.backend.native_library import NATIVE
from torpor.cache.store import NotUsable
from torpor.compiling import processes
from torpor.errors import NativeError
from torpor.native import build

_NAME: Final = "torpor_native"
_LOG: Final = logging.getLogger(__name__)


def find() -> Path | None:
    """The library to use according to `config.native`, built now or in the background if needed.

    None if there is none yet. If the setting is "on", a failed build raises.
    """
    if config.native == "on":
        path = build.library()
        return build.used(path) if build.is_built(path) else build.build(again=False)
    if not is_wanted():
        return None
    try:
        path = build.library()
        if build.is_built(path):
            return build.used(path)
        if _may_build() and _why_not(path) is None and not build.is_being_built(path):
            build.start()
    except (OSError, NotUsable, RuntimeError) as error:
        _LOG.info("the native recorder is not used: %s", error)
    return None


def appeared() -> Path | None:
    """The library, if it was built while the program ran; None if it does not exist."""
    try:
        path = build.library()
        return build.used(path) if build.is_built(path) else None
    except (OSError, NotUsable, RuntimeError):
        return None


def may_come() -> bool:
    """A library may be built while the program runs, by this process or another one."""
    try:
        return is_wanted() and _why_not(build.library()) is None
    except (OSError, NotUsable, RuntimeError):
        return False


def is_wanted() -> bool:
    """A library is to be used, if there is one now or later."""
    return config.native == "on" or (config.native == "auto" and config.cache)


def _may_build() -> bool:
    """This process is not a worker of another one, unless it is a rank of a process group."""
    distributed = torch.distributed
    is_rank = distributed.is_available() and distributed.is_initialized()
    return multiprocessing.parent_process() is None or is_rank


def _why_not(path: Path) -> str | None:
    """Why the library cannot be built; None if it can."""
    if build.compiler() is None:
        return "no C++ compiler (g++, clang++, or CXX)"
    failure = build.failure(path)
    if failure is not None:
        last = next((line for line in reversed(failure.splitlines()) if line.strip()), "")
        return f"failed: {last.strip()} (`torpor native status` shows all, `build` tries again)"
    if not build.has_room(path):
        return f"cannot be kept: {path.parent} is full, or cannot be written to"
    if processes.interpreter() is None:
        return "this process is no Python interpreter that could be started again"
    return None


def status() -> str:
    """Which recorder this process uses, or would use, and why."""
    if NATIVE.library is not None:
        return "C++"
    if config.native == "off":
        return "Python: off (config.native)"
    if not is_wanted():
        return "Python: the cache, where the library would be, is off (config.cache)"
    if NATIVE.refused:
        return f"Python: {NATIVE.refused}"
    try:
        return _status_on_disk(build.library())
    except (OSError, NotUsable, RuntimeError) as error:
        return f"Python: {error}"


def _status_on_disk(path: Path) -> str:
    if build.is_built(path):
        return "C++: built; taken up with the first op, or at the next cut"
    if build.is_being_built(path):
        return "Python: building; C++ is taken up at the cut that follows"
    return (
        f"Python: {_why_not(path) or 'not built yet: the first program that records has it built'}"
    )


def open_library(path: Path | str) -> Any:
    """The library at `path` as a module."""
    loader = importlib.machinery.ExtensionFileLoader(_NAME, str(path))
    spec = importlib.util.spec_from_file_location(_NAME, path, loader=loader)
    assert spec is not None, "a loader was given"
    try:
        module = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except ImportError as error:
        raise NativeError(f"the native recorder cannot be loaded: {error}") from None
    return module
