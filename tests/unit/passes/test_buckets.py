"""`buckets`: collectives that follow each other become one."""

from __future__ import annotations

from torpor.passes.buckets import buckets

from .texts import check

BYTES = 4 * 4 * 4  # of a tensor in these texts


def test_collectives_that_follow_each_other_become_one() -> None:
    check(
        buckets(2 * BYTES),
        """
        %1 = torpor.all_reduce.default([%0], None, "0", "sum")
        %2 = torpor.wait.default(%1)
        %3 = aten.exp.default(%2)
        %4 = aten.sin.default(%0)
        %5 = torpor.all_reduce.default([%4], %1, "0", "sum")
        %6 = torpor.wait.default(%5)
        return %3, %6
        """,
        """
        %1 = aten.sin.default(%0)
        %2, %3 = torpor.all_reduce.default([%0, %1], None, "0", "sum")
        %4 = torpor.wait.default(%2)
        %5 = aten.exp.default(%4)
        %6 = torpor.wait.default(%3)
        return %5, %6
        """,
    )


def test_one_that_needs_the_result_of_another_stays() -> None:
    check(
        buckets(2 * BYTES),
        """
        %1 = torpor.all_reduce.default([%0], None, "0", "sum")
        %2 = torpor.wait.default(%1)
        %3 = torpor.all_reduce.default([%2], %1, "0", "sum")
        return %3
        """,
        None,
    )


def test_those_of_other_groups_and_kinds_and_too_many_bytes_stay() -> None:
    check(
        buckets(2 * BYTES - 1),
        """
        %1 = torpor.all_reduce.default([%0], None, "0", "sum")
        %2 = torpor.all_reduce.default([%0], %1, "1", "sum")
        %3 = torpor.all_reduce.default([%0], %2, "1", "max")
        %4 = torpor.all_reduce.default([%0], %3, "1", "max")
        return %1, %2, %3, %4
        """,
        None,
    )
