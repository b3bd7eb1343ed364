"""Symbols, expressions of them, and what stands in a table while a condition holds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from torpor.ir.types import SymbolicType, TensorType
from torpor.symbols import expressions
from torpor.symbols.expressions import Expr, condition, exactly, present, symbol, valid_while
from torpor.symbols.solve import solve_size

LIKE = TensorType.contiguous((1,), torch.float32, torch.device("cpu"))
A, B = symbol(100), symbol(101)


def bind(a: int, b: int) -> None:
    A.bind(a, 0)
    B.bind(b, 0)


def test_an_expression_is_what_its_symbols_make_it() -> None:
    area = Expr.of(((1, (A, B)),))
    bind(3, 4)
    assert area.value == 12
    bind(5, 4)
    assert area.value == 20
    assert area.at({A: 2, B: 7}) == 14
    assert Expr.of(((1, (A, B)),)) is area


def test_expressions_are_told_apart_in_text() -> None:
    assert repr(Expr.of(((1, (A,)), (-1, ())))) == "(s100 - 1)"
    assert repr(Expr.of(((2, (A,)),))) == "2*s100"
    assert repr(Expr.of(((1, (A,)), (1, ())), 2)) == "(s100 + 1)//2"


def test_arguments_show_the_numbers_of_this_trace() -> None:
    bind(6, 2)
    assert present((A.expr, 3)) == (6, 3)
    assert present(A.expr) == 6
    plain = (1, 2)
    assert present(plain) is plain


def test_a_type_with_symbols_follows_them() -> None:
    rows = SymbolicType.with_sizes((A.expr, 8), (8, 1), 0, LIKE)
    bind(3, 2)
    assert rows.shape == (3, 8)
    assert rows.concrete is TensorType.contiguous((3, 8), torch.float32, torch.device("cpu"))
    bind(5, 2)
    assert (rows.shape, rows.numel, rows.wrapper[0]) == ((5, 8), 40, (5, 8))
    assert SymbolicType.with_sizes((A.expr, 8), (8, 1), 0, LIKE) is rows
    assert repr(rows) == "float32[s100,8] @cpu"


def test_a_type_without_symbols_is_an_ordinary_one() -> None:
    assert SymbolicType.with_sizes((2, 3), (3, 1), 0, LIKE) is TensorType.contiguous(
        (2, 3), torch.float32, torch.device("cpu")
    )


@given(
    samples=st.lists(
        st.tuples(st.integers(2, 200), st.integers(2, 200)), min_size=4, max_size=6, unique=True
    ),
    slope=st.integers(1, 9),
    start=st.integers(-3, 9),
)
def test_what_is_fitted_gives_the_numbers(
    samples: list[tuple[int, int]], slope: int, start: int
) -> None:
    known = {A: [a for a, _ in samples], B: [b for _, b in samples]}
    for numbers in (
        [a for a, _ in samples],
        [a * b for a, b in samples],
        [slope * a + start for a, _ in samples],
        [slope * a * b for a, b in samples],
        [(a + 1) // 2 for a, _ in samples],
    ):
        size = solve_size(numbers, known)
        assert size is not None
        for (a, b), number in zip(samples, numbers, strict=True):
            assert (size.at({A: a, B: b}) if isinstance(size, Expr) else size) == number


def test_numbers_that_follow_no_rule_fit_nothing() -> None:
    assert solve_size([3, 7, 4], {A: [37, 53, 101]}) is None


def test_a_constant_is_a_constant_even_where_a_symbol_fits() -> None:
    assert solve_size([8, 8], {A: [8, 8], B: [3, 5]}) == 8


def test_an_entry_stands_while_its_conditions_hold() -> None:
    table: dict[str, str] = {"key": "item"}
    bind(60, 2)
    valid_while([condition("s100 >= 50"), condition("s101 < 9")], table, "key", "item")
    bind(40, 2)
    assert not table
    bind(70, 2)
    assert table == {"key": "item"}
    bind(70, 9)
    assert not table
    bind(70, 3)
    assert table == {"key": "item"}


def test_two_entries_share_a_key_in_turn() -> None:
    table: dict[str, str] = {"key": "many"}
    bind(60, 2)
    valid_while([condition("s100 >= 51")], table, "key", "many")
    bind(40, 2)
    table["key"] = "few"
    valid_while([condition("s100 < 51")], table, "key", "few")
    for size, item in ((60, "many"), (40, "few"), (51, "many"), (50, "few")):
        bind(size, 2)
        assert table["key"] == item


def test_exactly_this_size() -> None:
    table: dict[str, int] = {"key": 1}
    bind(33, 2)
    valid_while([exactly(A)], table, "key", 1)
    bind(34, 2)
    assert not table
    bind(33, 5)
    assert table == {"key": 1}


def test_few_conditions_are_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(expressions, "MAX_CONDITIONS", 4)
    table: dict[int, int] = {}
    for size in range(20, 40):
        bind(size, 2)
        table[size] = size
        valid_while([exactly(A)], table, size, size)
        assert len(A.exact) <= 4
    bind(20, 2)
    assert 20 not in table  # forgotten, not wrong
    bind(39, 2)
    assert table == {39: 39}
