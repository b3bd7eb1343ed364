"""`schedule`: what is compiled, what eager's kernels run, and what is updated last."""

from __future__ import annotations

import pytest

from torpor.backends.fx.guards import may_refuse
from torpor.distributed.ops import ORDERED
from torpor.ir.node import Node
from torpor.ops.spec import spec_of
from torpor.passes.schedule import schedule, split

from .texts import check


def runs_eagerly(node: Node) -> bool:
    return node.op.name in ("aten.tan.default", "aten.bernoulli.p")


PASS = schedule(runs_eagerly, may_refuse)


def test_what_is_compiled_is_one_block() -> None:
    check(
        PASS,
        """
        %1 = aten.sin.default(%0)
        %2 = aten.cos.default(%1)
        return %2
        """,
        """
        compiled 0:
          %1 = aten.sin.default(%0)
          %2 = aten.cos.default(%1)
          return %2
        """,
    )


def test_all_that_can_be_computed_before_a_node_that_cannot_be_compiled_is_one_block() -> None:
    check(
        PASS,
        """
        %1 = aten.sin.default(%0)
        %2 = aten.tan.default(%1)
        %3 = aten.exp.default(%2)
        %4 = aten.cos.default(%1)
        %5 = aten.tan.default(%0)
        return %3, %4, %5
        """,
        """
        compiled 0:
          %1 = aten.sin.default(%0)
          %2 = aten.cos.default(%1)
        eager 0:
          %3 = aten.tan.default(%1)
          %4 = aten.tan.default(%0)
        compiled 1:
          %5 = aten.exp.default(%3)
          return %5, %2, %4
        """,
    )


def test_random_numbers_are_drawn_in_the_order_of_the_program() -> None:
    """The second draw needs nothing, and waits for the first one all the same."""
    made = check(
        PASS,
        """
        %1 = aten.tan.default(%0)
        %2 = aten.sin.default(%1)
        %3 = aten.bernoulli.p(%2, 0.5)
        %4 = aten.bernoulli.p(%0, 0.25)
        return %3, %4
        """,
        """
        eager 0:
          %1 = aten.tan.default(%0)
        compiled 1:
          %2 = aten.sin.default(%1)
        eager 1:
          %3 = aten.bernoulli.p(%2, 0.5)
          %4 = aten.bernoulli.p(%0, 0.25)
          return %3, %4
        """,
    )
    assert all(spec_of(node.op.target).draws(node.args) for node in made.blocks[-1].nodes)


def test_updates_of_donated_inputs_come_last() -> None:
    check(
        PASS,
        """
        %2 = aten.mul.Tensor(%1, 0.5)
        %3 = aten.add_.Tensor(%0, %2)
        %4 = aten.mm.default(%1, %1)
        return %3 over %0, %4
        """,
        """
        compiled 0:
          %2 = aten.mm.default(%1, %1)
        commit 0:
          %3 = aten.mul.Tensor(%1, 0.5)
          %4 = aten.add_.Tensor(%0, %3)
          return %4 over %0, %2
        """,
        inputs=2,
    )


def test_what_a_result_needs_is_computed_before_anything_is_written() -> None:
    check(
        PASS,
        """
        %2 = aten.mul.Tensor(%1, 0.5)
        %3 = aten.add_.Tensor(%0, %2)
        return %2, %3 over %0
        """,
        """
        compiled 0:
          %2 = aten.mul.Tensor(%1, 0.5)
        commit 0:
          %3 = aten.add_.Tensor(%0, %2)
          return %2, %3 over %0
        """,
        inputs=2,
    )


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        ("aten.remainder_.Tensor(%0, %1)", "compiled"),  # it may be by zero
        ("aten.mm.default(%0, %1)", "compiled"),  # it needs memory
        ("aten.tan.default(%0)", "eager"),
        ("aten.mul_.Tensor(%0, %1)", "commit"),
    ],
)
def test_an_update_that_may_fail_or_takes_memory_is_not_committed(call: str, kind: str) -> None:
    body = f"%2 = {call}\nreturn %2 over %0"
    check(PASS, body, f"{kind} 0:\n  %2 = {call}\n  return %2 over %0", inputs=2)


def test_a_collective_starts_before_what_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torpor.passes.schedule.MIN_OVERLAP", 1)
    check(
        schedule(lambda node: node.op.target in ORDERED, may_refuse),
        """
        %1 = aten.sin.default(%0)
        %2 = torpor.all_reduce.default([%1], None, "0", "sum")
        %3 = aten.cos.default(%1)
        %4 = torpor.all_reduce.default([%3], %2, "0", "sum")
        %5 = torpor.wait.default(%2)
        %6 = torpor.wait.default(%4)
        %7 = aten.exp.default(%3)
        return %5, %6, %7
        """,
        """
        compiled 0:
          %1 = aten.sin.default(%0)
        eager 0:
          %2 = torpor.all_reduce.default([%1], None, "0", "sum")
        compiled 1:
          %3 = aten.cos.default(%1)
        eager 1:
          %4 = torpor.all_reduce.default([%3], %2, "0", "sum")
        compiled 2:
          %5 = aten.exp.default(%3)
        eager 2:
          %6 = torpor.wait.default(%2)
          %7 = torpor.wait.default(%4)
          return %6, %7, %5
        """,
    )


def test_a_collective_is_waited_for_when_what_comes_before_is_computed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torpor.passes.schedule.MIN_OVERLAP", 1)
    check(
        schedule(lambda node: node.op.target in ORDERED, may_refuse),
        """
        %1 = torpor.all_reduce.default([%0], None, "0", "sum")
        %2 = torpor.all_reduce.default([%0], %1, "0", "sum")
        %3 = torpor.wait.default(%1)
        %4 = aten.exp.default(%3)
        %5 = torpor.wait.default(%2)
        %6 = aten.mul.Tensor(%4, %5)
        return %6
        """,
        """
        eager 0:
          %1 = torpor.all_reduce.default([%0], None, "0", "sum")
          %2 = torpor.all_reduce.default([%0], %1, "0", "sum")
          %3 = torpor.wait.default(%1)
        compiled 1:
          %4 = aten.exp.default(%3)
        eager 1:
          %5 = torpor.wait.default(%2)
        compiled 2:
          %6 = aten.mul.Tensor(%4, %5)
          return %6
        """,
    )


# -- without reordering ----------------------------------------------------------------------------


def test_split_keeps_the_recorded_order() -> None:
    check(
        split(runs_eagerly),
        """
        %1 = aten.sin.default(%0)
        %2 = aten.tan.default(%1)
        %3 = aten.tan.default(%0)
        %4 = aten.cos.default(%0)
        return %2, %3, %4
        """,
        """
        compiled 0:
          %1 = aten.sin.default(%0)
        eager 1:
          %2 = aten.tan.default(%1)
          %3 = aten.tan.default(%0)
        compiled 2:
          %4 = aten.cos.default(%0)
          return %2, %3, %4
        """,
    )
