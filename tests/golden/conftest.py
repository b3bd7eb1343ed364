"""Golden files: what a generator writes, kept in the repository.

`pytest tests/golden --update-golden` rewrites those that differ; read the diff before committing.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "expected"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--update-golden", action="store_true", help="rewrite golden files that differ"
    )


@pytest.fixture
def golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """Compares a text with the golden file of that name, or rewrites it."""

    def compare(name: str, text: str) -> None:
        file = FOLDER / name
        if request.config.getoption("--update-golden", default=False):
            file.parent.mkdir(exist_ok=True)
            file.write_text(text, encoding="utf-8")
        assert file.exists(), f"{name} is missing: pytest tests/golden --update-golden"
        assert text == file.read_text(encoding="utf-8"), (
            f"{name} differs: pytest tests/golden --update-golden, and read the diff"
        )

    return compare
