"""Fixtures shared by the tests of captured regions."""

from collections.abc import Iterator

import pytest
import torch

import torpor
from tests.comparison import concrete, on_the_reference_backend, put, virtual

__all__ = ["concrete", "on_the_reference_backend", "put", "virtual"]


@pytest.fixture(autouse=True)
def captured(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules are captured; nothing was before."""
    monkeypatch.setattr(torpor.config, "capture", "on")
    torch.compiler.reset()
    torpor.metrics.reset()
    yield
    torpor.sync(wait=True)
