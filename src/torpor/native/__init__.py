"""The optional native recorder: C++ in front of the Python recorders, built where it is used.

`build` makes the library, `load` brings it into the process; `trace.native` puts it to work.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
from pathlib import Path
from typing import Any, Final

from torpor import config
from torpor.errors import NativeError
from torpor.execute.persistent import NotUsable, tell_once
from torpor.native import build

_NAME: Final = "torpor_native"


def find() -> Path | None:
    """The library to use, as `config.native` says; built now, or for the next process, if need be.

    None if there is none. What went wrong is an error if the setting is "on".
    """
    if config.native == "off" or (config.native != "on" and not config.cache):
        return None
    if config.native == "on":
        path = build.library()
        return build.used(path) if build.is_built(path) else build.build()
    try:
        path = build.library()
        if build.is_built(path):
            return build.used(path)
        in_vain = build.compiler() is None or build.failure(path) is not None
        if config.native == "auto" and not in_vain and not build.is_being_built(path):
            build.start()
    except (OSError, NotUsable, RuntimeError) as error:
        tell_once(f"the native recorder is not used: {error}")
    return None


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
