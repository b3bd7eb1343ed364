"""Every test here makes nodes of its own, some with types no recorder would give them."""

from collections.abc import Iterator

import pytest

from torpor.ir.node import TABLE


@pytest.fixture(autouse=True)
def fresh_table() -> Iterator[None]:
    """Forgets all nodes before and after, so that no other test meets them."""
    TABLE.clear()
    yield
    TABLE.clear()
