"""The native recorder, built once for a test run and at work in these tests only."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import torpor
from torpor import native
from torpor.cache.store import NotUsable
from torpor.native import build
from torpor.native.attach import NATIVE_RECORDER
from torpor.trace import dispatch


@pytest.fixture(scope="session")
def library_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A library of this source: one that is there, or one built now."""
    if build.compiler() is None:
        pytest.skip("there is no C++ compiler")
    with contextlib.suppress(NotUsable, OSError):  # or else the user's directory is of no use
        path = build.library()
        if build.is_built(path):
            return path
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torpor.config, "cache_dir", str(tmp_path_factory.mktemp("cache")))
        return build.build()


@pytest.fixture(scope="package")
def library(library_path: Path) -> Iterator[Any]:
    """The native recorder, in front of every recorder there is."""
    before = NATIVE_RECORDER.library
    if before is None:
        NATIVE_RECORDER.asked = True
        NATIVE_RECORDER.use(native.open_library(library_path))
    yield NATIVE_RECORDER.library
    if before is None:
        NATIVE_RECORDER.library.switch(False)
        NATIVE_RECORDER.library = None
        dispatch.set_dispatch_entry(dispatch.dispatch, lambda on: None)


@pytest.fixture(autouse=True)
def switched_on(request: pytest.FixtureRequest) -> Iterator[None]:
    """Whatever a test does to it, the next one finds the native recorder at work."""
    yield
    if NATIVE_RECORDER.library is not None:
        NATIVE_RECORDER.library.switch(True)
