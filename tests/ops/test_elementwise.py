"""Types that `inference.elementwise` tells are those that torch tells, for every op of op_db."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

import torpor
from tests.ops.sweep import check_entry, entries
from torpor.inference import infer
from torpor.inference._generated.elementwise import RESULT_OF
from torpor.inference.elementwise import elementwise_types
from torpor.ir.types import TensorType
from torpor.ops.spec import OpSpec
from torpor.trace.values import forget_types, physical

SLICE = 17
"""One entry of so many is looked at in every run; all of them in the slow one."""


class Comparison:
    """Asks torch as well, wherever the direct rule has an answer."""

    def __init__(self) -> None:
        self.compared: Counter[str] = Counter()
        self.differences: list[str] = []

    def types(self, spec: OpSpec, bound: list[Any]) -> tuple[TensorType | None, ...] | None:
        direct = elementwise_types(spec, bound)
        if direct is not None:
            device = infer.common_device(spec, bound)
            try:
                asked: Any = infer._ask_torch(spec, bound, _numbers(bound), physical, device)
            except Exception as error:
                asked = error
            self.compared[spec.name] += 1
            if asked != direct:
                self.differences.append(f"{spec.name}: {direct}, and torch says {asked}")
        return direct


def _numbers(bound: list[Any]) -> dict[Any, Any]:
    """A number for every run-time scalar."""
    flat = [v for arg in bound for v in (arg if isinstance(arg, tuple) else (arg,))]
    return {v: v.type.kind(1) for v in flat if hasattr(getattr(v, "type", None), "kind")}


@pytest.fixture
def comparison(monkeypatch: pytest.MonkeyPatch) -> Comparison:
    found = Comparison()
    monkeypatch.setattr(infer, "elementwise_types", found.types)
    torpor.sync(wait=True)
    forget_types()  # what was met before is not asked for again
    return found


@pytest.mark.parametrize("entry", list(entries())[::SLICE])
def test_direct_types_are_torchs(entry: str, comparison: Comparison) -> None:
    check_entry(entries()[entry], "lazy")
    assert comparison.differences == []


@pytest.mark.slow
def test_direct_types_are_torchs_for_all_of_op_db(comparison: Comparison) -> None:
    for entry in entries().values():
        check_entry(entry, "lazy")
    assert comparison.differences == []
    singles = [name for name, result in RESULT_OF.items() if result != "items"]
    assert len(comparison.compared) > 0.5 * len(singles)  # op_db calls no `_foreach_` op
