"""Sizes and conditions as data: what is read back, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torpor.symbols.expressions import Expr, Size, symbol
from torpor.symbols.serialize import (
    LONGEST_CONDITION,
    NotSizes,
    assumption,
    common_names,
    condition_text,
    deserialize_size,
    own_names,
    serialize_size,
)
from torpor.symbols.solve import size_of

A, B = symbol(107), symbol(103)
GRAPH = (A, B)  # the order of a graph, which is not that of numbers
COMMON = common_names(GRAPH)


@pytest.mark.parametrize(
    ("text", "holds"),
    [
        ("s0 < 8", lambda a, b: a < 8),
        ("s0*s1 <= 40", lambda a, b: a * b <= 40),
        ("s0 % 4 == 0 and not (s1 != 3)", lambda a, b: a % 4 == 0 and b == 3),
        ("-1 + s0 > s1 // 2 or s1**2 == 9", lambda a, b: a - 1 > b // 2 or b**2 == 9),
        ("Max(s0, s1, 4) == max(4, 4)", lambda a, b: max(a, b) <= 4),
        ("Min(s0, s1) < min(5, s0)", lambda a, b: min(a, b) < min(5, a)),
        ("2 < s0 < 9", lambda a, b: 2 < a < 9),
        ("s0 / s1 >= 2", lambda a, b: a / b >= 2),
        ("True", lambda a, b: True),
    ],
)
def test_a_condition_is_read(text: str, holds: Any) -> None:
    read = assumption(text, COMMON)
    for a in range(1, 12):
        for b in range(1, 5):
            assert read.at({A: a, B: b}) is holds(a, b)


def test_names_of_a_process_become_names_of_all_and_others_again() -> None:
    own = assumption("s107*s103 + 1 < 2*s107", own_names(GRAPH))
    assert own.text == "s107 * s103 + 1 < 2 * s107"
    reported = condition_text(own, GRAPH)
    assert reported == "s0 * s1 + 1 < 2 * s0"
    other, another = symbol(1), symbol(0)
    again = assumption(reported, common_names((other, another)))
    assert again.text == "s1 * s0 + 1 < 2 * s1"
    assert again.at({other: 9, another: 1}) is own.at({A: 9, B: 1}) is True
    assert again.at({other: 1, another: 9}) is own.at({A: 1, B: 9}) is False


def test_a_division_by_nothing_does_not_hold() -> None:
    assert assumption("4 // (s0 - 3) < 9", COMMON).at({A: 3, B: 1}) is False


def test_a_condition_that_was_read_is_in_no_table() -> None:
    assumption("s0 < 5", COMMON)
    assert not A.conditions


@pytest.mark.parametrize(
    "text",
    [
        "", "s0 <", "s0; s1", "s2 > 1", "x > 1", "S0 > 1", "s0.real > 1", "s0[0] > 1",
        "__import__('os').getcwd()", "print(s0, s1)", "max", "max(s0)", "max(*(s0, s1), 2)",
        "max(s0, s1, key=abs)", "max(s0, s1)(1, 2)", "s0(1, 2)", "(lambda: 1)()", "[s0]",
        "(s0, s1)", "{s0}", "s0 if s1 else 2", "(s0 := 3) > 1", "'s0'", "b'1'", "1.5 < s0", "1j",
        "None", "...",
        "f'{s0}'", "[x for x in (1, 2)]", "s0 is s1", "s0 in (1, 2)", "s0 @ s1", "s0 << 40",
        "s0 & 1", "~s0", "s0 ** s1 > 1", "s0 ** 99 > 1", "s0 ** -1 > 1", "(s0 ** 9) ** 9 > 1",
        "2 ** 3 ** 4 > 1", "s0 > 1 and await_", "await s0", "yield s0",
        "-" * 9000 + "s0", "(" * 400 + "s0" + ")" * 400, "9" * 6000,
        "s0 > 1 " + " " * LONGEST_CONDITION, None, 3, ["s0 > 1"], {"s0": 1},
    ],
    ids=lambda text: str(text)[:30],
)  # fmt: skip
def test_anything_else_is_refused(text: Any) -> None:
    with pytest.raises(NotSizes):
        assumption(text, COMMON)


FORMULAS = st.recursive(
    st.sampled_from(["s107", "s103"]),
    lambda inner: st.tuples(
        st.lists(
            st.tuples(
                st.integers(-9, 9).filter(bool), st.lists(inner, min_size=1, max_size=3).map(tuple)
            ),
            min_size=1, max_size=3,
        ).map(tuple),
        st.integers(1, 8),
    ),
    max_leaves=6,
)  # fmt: skip


@given(FORMULAS, st.integers(2, 99), st.integers(2, 99))
def test_a_size_is_read_back(formula: Any, a: int, b: int) -> None:
    size: Size | None = size_of(formula) if type(formula) is tuple else A.expr
    assert size is not None
    reported = json.loads(json.dumps(serialize_size(size, GRAPH)))
    again = deserialize_size(reported, COMMON)
    here, there = (one.at({A: a, B: b}) if type(one) is Expr else one for one in (size, again))
    assert here == there


def test_a_size_of_another_process_is_one_of_this() -> None:
    size = Expr.of(((2, (B, A)), (1, ())), 4)
    reported = serialize_size(size, GRAPH)
    assert reported == [[[2, ["s1", "s0"]], [1, []]], 4]
    assert deserialize_size(reported, COMMON) is size
    assert deserialize_size(serialize_size(A.expr, GRAPH), COMMON) is A.expr
    assert deserialize_size(serialize_size(7, GRAPH), COMMON) == 7


@pytest.mark.parametrize(
    "reported",
    [
        None, "s0", True, 1.0, {}, [], [1], [[], 0], [[[1, ["s9"]]], 1], [[[1, ["s0"]]], 0],
        [[[1, ["s0"]]], -2], [[[1, ["s0"]]], 1.5], [[[True, ["s0"]]], 1], [[[1.0, ["s0"]]], 1],
        [[[1, [3]]], 1], [[[1, [None]]], 1], [[["s0", 1]], 1], [[[1, ["s0"], 2]], 1], "ab",
        [[[1, [[[[3, []]], 2]]]], 1],
    ],
    ids=str,
)  # fmt: skip
def test_what_is_no_size_is_refused(reported: Any) -> None:
    with pytest.raises(NotSizes):
        deserialize_size(reported, COMMON)


def test_a_size_within_a_size_without_end_is_refused() -> None:
    reported: Any = "s0"
    for _ in range(5000):
        reported = [[[1, [reported]]], 2]
    with pytest.raises(NotSizes):
        deserialize_size(reported, COMMON)
