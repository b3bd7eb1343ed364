"""Every test here leaves the reference backend active and nothing pending."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import torpor
from tests.comparison import forget_pending_work


@pytest.fixture(autouse=True)
def back_to_the_reference() -> Iterator[None]:
    torpor.use("reference")
    yield
    forget_pending_work()
    torpor.use("reference")
