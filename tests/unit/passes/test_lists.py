"""`split-lists` and `join-lists`: ops on lists, item by item, and whole again."""

from __future__ import annotations

from torpor.passes import run_passes
from torpor.passes.lists import JOIN_LISTS, SPLIT_LISTS

from .texts import body_of, check, graph_of

WHOLE = """
compiled 0:
  %2, %3 = aten._foreach_mul.Scalar([%0, %1], 0.5)
  %4 = aten.sin.default(%3)
  %5, %6 = aten._foreach_add.List([%2, %4], [%3, %3])
  return %5, %6
"""

ITEMS = """
compiled 0:
  %2 = aten._foreach_mul.Scalar([%0], 0.5) items [0] of 2 op 0
  %3 = aten._foreach_mul.Scalar([%1], 0.5) items [1] of 2 op 0
  %4 = aten.sin.default(%3)
  %5 = aten._foreach_add.List([%2], [%3]) items [0] of 2 op 1
  %6 = aten._foreach_add.List([%4], [%3]) items [1] of 2 op 1
  return %5, %6
"""


def test_a_node_for_each_item() -> None:
    check(SPLIT_LISTS, WHOLE, ITEMS, inputs=2)


def test_items_that_stand_together_are_one_node() -> None:
    check(JOIN_LISTS, ITEMS, WHOLE, inputs=2)


def test_split_and_joined_a_graph_is_of_the_very_same_nodes() -> None:
    graph = graph_of(WHOLE, inputs=2)
    again = run_passes([SPLIT_LISTS, JOIN_LISTS], graph)
    assert again.nodes == graph.nodes
    assert again.outputs == graph.outputs


def test_lists_of_one_item_lists_of_other_lengths_and_eager_nodes_are_left() -> None:
    body = """
    compiled 0:
      %2 = aten._foreach_exp.default([%0])
    eager 0:
      %3, %4 = aten._foreach_exp.default([%2, %1])
      return %3, %4
    """
    check(SPLIT_LISTS, body, None, inputs=2)


def test_eager_nodes_read_items() -> None:
    check(
        SPLIT_LISTS,
        """
        compiled 0:
          %2, %3 = aten._foreach_exp.default([%0, %1])
        eager 0:
          %4 = aten.mm.default(%2, %3)
          return %4, %3 over %0
        """,
        """
        compiled 0:
          %2 = aten._foreach_exp.default([%0]) items [0] of 2 op 0
          %3 = aten._foreach_exp.default([%1]) items [1] of 2 op 0
        eager 0:
          %4 = aten.mm.default(%2, %3)
          return %4, %3 over %0
        """,
        inputs=2,
    )


def test_some_items_are_an_op_on_shorter_lists() -> None:
    """The block was cut through both ops: in each part their items are joined, the ops in order."""
    check(
        JOIN_LISTS,
        """
        compiled 0:
          %3 = aten._foreach_exp.default([%0]) items [0] of 3 op 0
          %4 = aten._foreach_mul.Scalar([%3], 0.5) items [0] of 3 op 1
          %5 = aten._foreach_exp.default([%1]) items [1] of 3 op 0
          %6 = aten._foreach_mul.Scalar([%5], 0.5) items [1] of 3 op 1
        compiled 0:
          %7 = aten._foreach_exp.default([%2]) items [2] of 3 op 0
          %8 = aten._foreach_mul.Scalar([%7], 0.5) items [2] of 3 op 1
          return %4, %6, %8
        """,
        """
        compiled 0:
          %3, %4 = aten._foreach_exp.default([%0, %1]) items [0, 1] of 3 op 0
          %5, %6 = aten._foreach_mul.Scalar([%3, %4], 0.5) items [0, 1] of 3 op 1
        compiled 0:
          %7 = aten._foreach_exp.default([%2]) items [2] of 3 op 0
          %8 = aten._foreach_mul.Scalar([%7], 0.5) items [2] of 3 op 1
          return %5, %6, %8
        """,
        inputs=3,
    )


def test_items_are_not_joined_across_another_node() -> None:
    """The second item needs what is computed from the first."""
    body = """
    compiled 0:
      %2 = aten._foreach_exp.default([%0]) items [0] of 2 op 0
      %3 = aten.sin.default(%2)
      %4 = aten._foreach_exp.default([%3]) items [1] of 2 op 0
      return %4
    """
    made = run_passes([JOIN_LISTS], graph_of(body))
    assert body_of(made) == body_of(graph_of(body))
