"""Every test starts on the reference backend with nothing recorded, and leaves nothing running."""

import pytest

from tests.comparison import on_the_reference_backend
from torpor.trace.values import forget_types

__all__ = ["on_the_reference_backend"]


@pytest.fixture(autouse=True)
def nothing_met_before(on_the_reference_backend: None) -> None:
    """Nodes keep the line that recorded them first, and places the numbers met there."""
    forget_types()
