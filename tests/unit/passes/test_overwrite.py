"""`overwrite`: which donated inputs blocks write their results over, and which they must not."""

from __future__ import annotations

import textwrap

import pytest

from torpor.passes import run_passes
from torpor.passes.outputs import OUTPUTS
from torpor.passes.overwrite import OVERWRITE

from .texts import check, graph_of

T = "float32[4,4] stride [1,4] @cpu"


def test_an_update_is_written_over_its_input() -> None:
    check(
        OVERWRITE,
        """
        commit 0:
          %1 = aten.add_.Tensor(%0, 1)
          leave %1
          return %1 over %0
        """,
        """
        commit 0:
          %1 = aten.add_.Tensor(%0, 1)
          leave %1 over %0
          return %1 over %0
        """,
    )


def test_a_graph_without_donations_is_left() -> None:
    check(OVERWRITE, "commit 0:\n  %1 = aten.add_.Tensor(%0, 1)\n  leave %1\n  return %1", None)


def test_only_what_runs_after_all_that_may_fail_writes() -> None:
    body = """
    compiled 0:
      %1 = aten.add_.Tensor(%0, 1)
      leave %1
      return %1 over %0
    """
    check(OVERWRITE, body, body)


def test_an_input_that_is_read_later_is_not_written() -> None:
    body = """
    commit 0:
      %2 = aten.add_.Tensor(%0, 1)
      leave %2
    commit 0:
      %3 = aten.mul_.Tensor(%1, %0)
      leave %3
      return %2 over %0, %3 over %1
    """
    written = body.replace("leave %3", "leave %3 over %1")
    check(OVERWRITE, body, written, inputs=2)


def overwritten(body: str, results: str, inputs: int = 2) -> set[int]:
    """The inputs that a commit of these lines writes over."""
    lines = textwrap.indent(textwrap.dedent(body).strip(), "  ")
    graph = graph_of(f"commit 0:\n{lines}\n  return {results}", inputs)
    made = run_passes([OUTPUTS, OVERWRITE], graph)
    places = {value: place for place, value in enumerate(graph.inputs)}
    return {places[value] for block in made.blocks for value in block.donated}


def test_elementwise_updates_from_one_another_are_written() -> None:
    body = """
    %2 = aten.mul_.Tensor(%0, 0.5)
    %3 = aten.add_.Tensor(%1, %2)
    """
    assert overwritten(body, "%2 over %0, %3 over %1") == {0, 1}


@pytest.mark.parametrize(
    "body",
    [
        f"%2 = aten.t.default(%0) : {T}\n%3 = aten.copy_.default(%0, %2)",
        "%2 = aten.roll.default(%0, [1])\n%3 = aten.copy_.default(%0, %2)",
        "%2 = aten.sum.dim_IntList(%0, [0]) : float32[4] @cpu\n%3 = aten.div_.Tensor(%0, %2)",
    ],
)
def test_an_input_that_is_read_at_other_places_is_not_written(body: str) -> None:
    assert overwritten(body, "%3 over %0") == set()


def test_a_product_of_matrices_is_there_before_its_operand_is_written() -> None:
    body = "%2 = aten.mm.default(%0, %0)\n%3 = aten.add_.Tensor(%0, %2)"
    assert overwritten(body, "%3 over %0") == {0}


def test_an_input_whose_old_contents_are_kept_is_not_written() -> None:
    body = "%2 = aten.copy_.default(%1, %0)\n%3 = aten.add_.Tensor(%0, 1)"
    assert overwritten(body, "%2 over %1, %3 over %0") == set()
    assert overwritten("%3 = aten.add_.Tensor(%0, 1)", "%3 over %0") == {0}
    as_a_result = "%2 = aten.clone.default(%0)\n%3 = aten.add_.Tensor(%0, 1)"
    assert overwritten(as_a_result, "%2, %3 over %0") == set()


def test_inputs_that_one_op_on_lists_computes_from_one_another_are_not_written() -> None:
    body = "%2, %3 = aten._foreach_add_.List([%0, %1], [{}])"
    assert overwritten(body.format("%1, %0"), "%2 over %0, %3 over %1") == set()
    assert overwritten(body.format("%0, %1"), "%2 over %0, %3 over %1") == {0, 1}


def test_an_input_of_which_a_part_is_written_for_something_else_is_not_written() -> None:
    fill = "%5 = aten.fill_.Scalar(%0, 2)"
    assert overwritten(fill, "%5 over %0") == {0}
    body = f"""
    %3 = aten.select.int(%2, 0, 0) : float32[4] @cpu
    %4 = aten.select_scatter.default(%0, %3, 0, 1)
    {fill}
    """
    assert overwritten(body, "%4 over %1, %5 over %0", inputs=3) == {1}


def test_an_input_that_gets_the_result_for_another_of_an_op_on_lists_is_not_written() -> None:
    body = """
    %2, %3 = aten._foreach_add_.Scalar([%0, %1], 1)
    %4 = aten.copy_.default(%0, {})
    """
    assert overwritten(body.format("%2"), "%4 over %0") == {0}
    assert overwritten(body.format("%3"), "%4 over %0") == set()
