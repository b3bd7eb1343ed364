"""`views`: blocks compute for themselves the views that they read of others."""

from __future__ import annotations

from torpor.passes.views import VIEWS

from .texts import check

T = "float32[4,4] stride [1,4] @cpu"


def test_a_view_is_copied_into_the_block_that_reads_it() -> None:
    check(
        VIEWS,
        f"""
        compiled 0:
          %1 = aten.t.default(%0) : {T}
          %2 = aten.mm.default(%0, %1)
        compiled 0:
          %3 = aten.mm.default(%2, %1)
          return %3
        """,
        f"""
        compiled 0:
          %1 = aten.t.default(%0) : {T}
          %2 = aten.mm.default(%0, %1)
        compiled 0:
          %3 = aten.t.default(%0) : {T}
          %4 = aten.mm.default(%2, %3)
          return %4
        """,
    )


def test_views_of_views_are_copied_in_order_and_each_block_has_its_own() -> None:
    check(
        VIEWS,
        f"""
        compiled 0:
          %1 = aten.sin.default(%0)
          %2 = aten.t.default(%1) : {T}
          %3 = aten.detach.default(%2) : {T}
        compiled 0:
          %4 = aten.mm.default(%0, %3)
        compiled 0:
          %5 = aten.mm.default(%4, %3)
          return %5
        """,
        f"""
        compiled 0:
          %1 = aten.sin.default(%0)
          %2 = aten.t.default(%1) : {T}
          %3 = aten.detach.default(%2) : {T}
        compiled 0:
          %4 = aten.t.default(%1) : {T}
          %5 = aten.detach.default(%4) : {T}
          %6 = aten.mm.default(%0, %5)
        compiled 0:
          %7 = aten.t.default(%1) : {T}
          %8 = aten.detach.default(%7) : {T}
          %9 = aten.mm.default(%6, %8)
          return %9
        """,
    )


def test_a_block_whose_own_view_is_rewritten_lends_it() -> None:
    """The second block's view is of a view it took over; the third takes over both."""
    check(
        VIEWS,
        f"""
        compiled 0:
          %1 = aten.t.default(%0) : {T}
          %2 = aten.mm.default(%0, %1)
        compiled 0:
          %3 = aten.detach.default(%1) : {T}
          %4 = aten.mm.default(%2, %3)
        compiled 0:
          %5 = aten.mm.default(%4, %3)
          return %5
        """,
        f"""
        compiled 0:
          %1 = aten.t.default(%0) : {T}
          %2 = aten.mm.default(%0, %1)
        compiled 0:
          %3 = aten.t.default(%0) : {T}
          %4 = aten.detach.default(%3) : {T}
          %5 = aten.mm.default(%2, %4)
        compiled 0:
          %6 = aten.t.default(%0) : {T}
          %7 = aten.detach.default(%6) : {T}
          %8 = aten.mm.default(%5, %7)
          return %8
        """,
    )


def test_other_stages_and_eager_nodes_read_the_view_itself() -> None:
    check(
        VIEWS,
        f"""
        compiled 0:
          %1 = aten.t.default(%0) : {T}
        eager 0:
          %2 = aten.tan.default(%1) : {T}
        compiled 1:
          %3 = aten.mm.default(%1, %2)
          return %3
        """,
        None,
    )


def test_a_commit_takes_over_views_of_all_stages() -> None:
    check(
        VIEWS,
        f"""
        compiled 0:
          %1 = aten.t.default(%0) : {T}
          %2 = aten.mm.default(%0, %1)
        commit 0:
          %3 = aten.add_.Tensor(%0, %1)
          return %2, %3 over %0
        """,
        f"""
        compiled 0:
          %1 = aten.t.default(%0) : {T}
          %2 = aten.mm.default(%0, %1)
        commit 0:
          %3 = aten.t.default(%0) : {T}
          %4 = aten.add_.Tensor(%0, %3)
          return %2, %4 over %0
        """,
    )
