"""torch's operator table: every entry's first samples, forward and backward, against eager."""

from __future__ import annotations

import json
import re
from collections.abc import Callable

import pytest
import torch

import torpor
from torpor.testing.kit import Kit


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """One test per entry that `--ops` and `--part` select; without a table, a skipped test."""
    if "entry_name" not in metafunc.fixturenames:
        return
    try:
        from torpor.testing.operators import entries

        names = list(entries())
    except ImportError as error:
        reason = f"torch's operator table needs {error.name}"
        skipped = pytest.param("", marks=pytest.mark.skip(reason=reason), id="none")
        metafunc.parametrize("entry_name", [skipped])
        return
    pattern = re.compile(metafunc.config.getoption("--ops"))
    number, count = metafunc.config.getoption("--part")
    chosen = [name for name in names if pattern.search(name)][number - 1 :: count]
    metafunc.parametrize("entry_name", chosen)


def test_operator(
    kit: Kit,
    entry_name: str,
    request: pytest.FixtureRequest,
    record_property: Callable[[str, object], None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from torpor.testing.operators import check_entry, entries

    monkeypatch.setattr(torpor.config, "strict", False)  # a compile error is a fallback here
    option = request.config.getoption
    dtypes = [getattr(torch, name) for name in option("--dtypes").split(",")]
    result = check_entry(kit, entries()[entry_name], dtypes, option("--samples"))
    record_property("torpor_op", json.dumps(vars(result)))
    assert result.status != "wrong", result.detail
    if result.status == "skipped":
        pytest.skip(result.detail)
