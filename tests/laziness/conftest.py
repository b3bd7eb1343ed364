"""Fixtures shared by the behaviour tests."""

from collections.abc import Iterator

import pytest

import torpor
from tests import instrumented_ops
from tests.comparison import concrete, on_the_reference_backend, put, virtual

__all__ = ["concrete", "on_the_reference_backend", "put", "virtual"]


@pytest.fixture(autouse=True)
def fresh_counts() -> Iterator[None]:
    instrumented_ops.reset()
    yield
    instrumented_ops.open_gate()


@pytest.fixture
def fixed_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sizes are parts of graphs, whatever comes."""
    monkeypatch.setattr(torpor.config, "dynamic", "off")
