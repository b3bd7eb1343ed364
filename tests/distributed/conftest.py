"""One set of two ranks and one of four for all tests that leave them as they are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.distributed.programs import warm_up
from tests.distributed.ranks import Ranks, ranks


@pytest.fixture(scope="session")
def two() -> Iterator[Ranks]:
    with ranks(2) as made:
        yield made


@pytest.fixture(scope="session")
def four() -> Iterator[Ranks]:
    with ranks(4) as made:
        made.run(warm_up)
        yield made
