"""Every entry of `op_db`, on the virtual device and concrete-lazy, equal to eager bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest

from tests.ops.exclusions import EXCLUSIONS, LIMIT
from tests.ops.known import KNOWN
from tests.ops.sweep import check_entry, entries

SHOWN = 30
"""Failures printed per entry; the rest is counted."""


@pytest.mark.parametrize("mode", ["lazy", "concrete"])
@pytest.mark.parametrize("entry", entries())
def test_entry_equals_eager(
    entry: str, mode: str, record_property: Callable[[str, object], None]
) -> None:
    result = check_entry(entries()[entry], mode)
    failures, result.failures = result.failures, result.failures[:SHOWN]
    record_property("op_db", json.dumps(result.to_json()))
    if entry in KNOWN and mode in KNOWN[entry][0]:
        assert failures, f"{entry} equals eager now: take it off tests/ops/known.py"
        pytest.xfail(KNOWN[entry][1])
    if failures:
        more = f"\n... and {len(failures) - SHOWN} more" if len(failures) > SHOWN else ""
        pytest.fail("\n".join(map(str, failures[:SHOWN])) + more, pytrace=False)


def test_exclusions_are_few() -> None:
    assert len(EXCLUSIONS) <= LIMIT


def test_exclusions_name_entries_and_give_one_line_of_reason() -> None:
    assert set(EXCLUSIONS) <= set(entries())
    assert all(reason and "\n" not in reason for reason in EXCLUSIONS.values())
