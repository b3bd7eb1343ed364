"""`limit`: no block is longer than a compiler is given at a time."""

from __future__ import annotations

import pytest

from torpor.passes.limit import limit

from .texts import check, graph_of

CHAIN = """
compiled 0 repeat 1:
  %1 = aten.sin.default(%0)
  %2 = aten.cos.default(%1)
  %3 = aten.exp.default(%2)
  %4 = aten.neg.default(%3)
  %5 = aten.abs.default(%4)
eager 0:
  %6 = aten.tan.default(%5)
  %7 = aten.tan.default(%6)
  %8 = aten.tan.default(%7)
  %9 = aten.tan.default(%8)
  return %9
"""


def test_a_short_block_is_left() -> None:
    check(limit(5), CHAIN, None)


def test_a_long_block_is_cut_into_equal_parts_that_are_copies_of_nothing() -> None:
    check(
        limit(3),
        CHAIN,
        """
        compiled 0:
          %1 = aten.sin.default(%0)
          %2 = aten.cos.default(%1)
          %3 = aten.exp.default(%2)
        compiled 0:
          %4 = aten.neg.default(%3)
          %5 = aten.abs.default(%4)
        eager 0:
          %6 = aten.tan.default(%5)
          %7 = aten.tan.default(%6)
          %8 = aten.tan.default(%7)
          %9 = aten.tan.default(%8)
          return %9
        """,
    )


@pytest.mark.parametrize(("most", "lengths"), [(4, [3, 2]), (2, [2, 2, 1]), (1, [1] * 5)])
def test_parts_have_nearly_the_same_length(most: int, lengths: list[int]) -> None:
    blocks = limit(most).run(graph_of(CHAIN)).blocks
    assert [len(block.nodes) for block in blocks[:-1]] == lengths
