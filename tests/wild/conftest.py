"""Here torpor is what people install: its default backend, cache on, two threads."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import pytest
import torch

import torpor
from tests.comparison import forget_pending_work
from torpor.backend.registry import default_name
from torpor.cache.store import NotUsable
from torpor.native import build


@pytest.fixture(autouse=True)
def compiled_at_once() -> None:
    """Not here: graphs are compiled when the backend says so."""


@pytest.fixture(scope="session")
def cache_of_the_session(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An empty cache, but for the native library if the user has built it."""
    folder = tmp_path_factory.mktemp("cache")
    with contextlib.suppress(NotUsable, OSError):  # the user's directory is of no use
        built = build.library()
        if build.is_built(built):
            (folder / "native").symlink_to(built.parent)
    return str(folder)


@pytest.fixture(autouse=True)
def as_installed(monkeypatch: pytest.MonkeyPatch, cache_of_the_session: str) -> Iterator[None]:
    """The default configuration, for processes that a test starts too."""
    for name, value in {"TORPOR_CACHE": "1", "TORPOR_CACHE_DIR": cache_of_the_session}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("TORPOR_BACKEND", raising=False)
    monkeypatch.setattr(torpor.config, "cache", True)
    monkeypatch.setattr(torpor.config, "cache_dir", cache_of_the_session)
    threads = torch.get_num_threads()
    torch.set_num_threads(2)
    torpor.use(default_name())
    torch.manual_seed(0)
    yield
    torpor.disable()
    torch.set_default_device(None)
    forget_pending_work()
    torpor.use("reference")
    torch.set_num_threads(threads)


@pytest.fixture(params=["default", "reference"])
def backend(request: pytest.FixtureRequest, as_installed: None) -> str:
    """The backend that is there by default, and the judge."""
    if request.param != "default":
        torpor.use(request.param)
    return str(request.param)
