"""`outputs`: what each block leaves behind."""

from __future__ import annotations

from torpor.passes.outputs import OUTPUTS

from .texts import check, graph_of


def test_what_later_blocks_and_results_need_is_left() -> None:
    check(
        OUTPUTS,
        """
        compiled 0:
          %1 = aten.sin.default(%0)
          %2 = aten.cos.default(%1)
          %3 = aten.exp.default(%2)
        eager 0:
          %4 = aten.tan.default(%2)
        compiled 1:
          %5 = aten.add.Tensor(%4, %3)
          return %1, %5
        """,
        """
        compiled 0:
          %1 = aten.sin.default(%0)
          %2 = aten.cos.default(%1)
          %3 = aten.exp.default(%2)
          leave %1, %2, %3
        eager 0:
          %4 = aten.tan.default(%2)
        compiled 1:
          %5 = aten.add.Tensor(%4, %3)
          leave %5
          return %1, %5
        """,
    )


COPIES = """
compiled 0 repeat 0:
  %1 = aten.sin.default(%0)
  %2 = aten.exp.default(%1)
compiled 0 repeat 0:
  %3 = aten.sin.default(%2)
  %4 = aten.exp.default(%3)
compiled 0 repeat 0:
  %5 = aten.sin.default(%4)
  %6 = aten.exp.default(%5)
compiled 0:
  %7 = aten.cos.default(%6)
  return {results}
"""


def left(results: str) -> str:
    """What is left by each block, by number."""
    made = OUTPUTS.run(graph_of(COPIES.format(results=results)))
    values = [value for node in made.nodes for value in node.outputs]
    places = {value: str(place + 1) for place, value in enumerate(values)}
    return " | ".join(" ".join(places[v] for v in block.outputs or ()) for block in made.blocks)


def test_copies_leave_what_most_of_them_do() -> None:
    """Two of three leave the sine too: so does the third, which is compiled once with them."""
    assert left("%1, %3, %7") == "1 2 | 3 4 | 5 6 | 7"


def test_what_one_copy_alone_leaves_it_leaves_alone() -> None:
    assert left("%1, %7") == "1 2 | 4 | 6 | 7"
