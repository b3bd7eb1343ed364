"""`repeats`: what repeats is found, cut where little is lost, and computes what it did before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torpor.backend.data import BackendData
from torpor.backend.lowering import Computation
from torpor.backends.blocks.program import Piece
from torpor.backends.dynamo import DynamoBackend
from torpor.backends.reference import ReferenceBackend
from torpor.backends.reference.lowering import registers_in
from torpor.compiling.compilation import compile_graph
from torpor.ir.node import Node, items_of
from torpor.passes import repeats
from torpor.passes.lists import SPLIT_LISTS
from torpor.passes.repeats import COSTS, Lost, Repeat, RunCosts, find_repeats
from torpor.text.torch_parser import parse

from .texts import check, graph_of


def found(text: str, lost: dict[int, float] | None = None) -> list[Repeat]:
    values = [(place, place, cost) for place, cost in (lost or {}).items()]
    return find_repeats([ord(c) for c in text], Lost(values, len(text)), COSTS["cpu"])


LAYER = "".join(map(chr, range(1000, 1100)))  # a hundred ops, no two alike


@pytest.fixture
def cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cut pays."""
    monkeypatch.setattr(repeats, "BLOCK", 0.0)
    monkeypatch.setitem(repeats.COSTS, "cpu", RunCosts(1, 0.0, 0.0))
    monkeypatch.setattr(repeats, "SEED", 2)


# -- finding ---------------------------------------------------------------------------------------


def test_layers_between_a_beginning_and_an_end_are_found() -> None:
    (repeat,) = found("first" + 6 * LAYER + "last")
    assert (repeat.start, repeat.length, repeat.count) == (5, 100, 6)


def test_forward_and_backward_layers_are_found() -> None:
    back = LAYER[::-1]
    one, two = found("first" + 6 * LAYER + "loss" + 6 * back + "last")
    assert (one.start, one.length, one.count) == (5, 100, 6)
    assert (two.start, two.length, two.count) == (5 + 600 + 4, 100, 6)


def test_layers_of_two_kinds_in_turn_are_one_repeat() -> None:
    other = "".join(map(chr, range(2000, 2080)))
    (repeat,) = found(4 * (LAYER + other))
    assert (repeat.start, repeat.length, repeat.count) == (0, 180, 4)


def test_stages_of_different_layers_are_found_one_by_one() -> None:
    other = "".join(map(chr, range(2000, 2080)))
    one, two = found(4 * LAYER + "between" + 5 * other)
    assert (one.start, one.length, one.count) == (0, 100, 4)
    assert (two.start, two.length, two.count) == (407, 80, 5)


def test_the_cut_falls_where_nothing_is_lost() -> None:
    text = 6 * LAYER
    lost = {place: 1e-3 for place in range(len(text) + 1) if place % 100 != 30}
    (repeat,) = found(text, lost)
    assert repeat.start == 30
    assert repeat.count == 5  # at the price of a copy


def test_small_copies_are_called_several_at_a_time() -> None:
    (repeat,) = found(400 * "abcdefgh")
    assert repeat.length % 8 == 0
    assert repeat.length >= 80
    assert repeat.length * repeat.count > 2800


@pytest.mark.parametrize(
    "text", ["", "a", LAYER, 2 * LAYER[:40], 8 * "abcdefgh", LAYER + LAYER[::-1]]
)
def test_what_does_not_pay_is_not_cut(text: str) -> None:
    assert found(text) == []


def test_what_is_lost_in_every_run_may_not_pay() -> None:
    text = 6 * LAYER
    assert found(text)
    assert found(text, dict.fromkeys(range(len(text) + 1), 1e-3)) == []


@given(
    st.lists(
        st.tuples(st.text("abcd", min_size=1, max_size=40), st.integers(1, 30)),
        max_size=5,
    )
)
def test_repeats_are_repeats_and_do_not_overlap(blocks: list[tuple[str, int]]) -> None:
    text = "".join(block * times for block, times in blocks)
    repeated = found(text)
    for repeat in repeated:
        copies = {text[a:b] for a, b in itertools.pairwise(repeat.borders)}
        assert len(copies) == 1
        assert repeat.count >= 2
        assert 0 <= repeat.start < repeat.end <= len(text)
    for one, two in itertools.pairwise(repeated):
        assert one.end <= two.start


# -- what a cut costs ------------------------------------------------------------------------------

THERE_AND_BACK = """
graph(%0 = leaf 0 : float32[8,8] @cpu) {
  %1 = aten.sin.default(%0) : float32[8,8] @cpu
  %2 = aten.pow.Tensor_Scalar(%1, 3) : float32[8,8] @cpu
  %3 = aten.mm.default(%2, %0) : float32[8,8] @cpu
  %4 = aten.cos.default(%3) : float32[8,8] @cpu
  %5 = aten.pow.Tensor_Scalar(%1, 2) : float32[8,8] @cpu
  %6 = aten.mul.Tensor(%4, %5) : float32[8,8] @cpu
  return %6
}
"""


def test_a_value_that_waits_for_backward_is_no_loss() -> None:
    lost = repeats._lost(parse(THERE_AND_BACK).nodes, 1 / 256)
    # sin and pow; nothing beside the product of matrices; cos and what is computed for backward
    assert lost.at(0) == [0, 1, 0, 0, 1, 2, 0]


@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(0, 30), st.integers(1, 5)), max_size=8),
    st.integers(0, 20),
    st.integers(1, 10),
    st.integers(1, 4),
)
def test_a_value_that_is_cut_several_times_costs_once(
    values: list[tuple[int, int, int]], start: int, length: int, count: int
) -> None:
    spans = [(first, min(40, first + more), float(cost)) for first, more, cost in values]
    borders = range(start, min(40, start + length * count) + 1, length)
    once = sum(cost for first, last, cost in spans if any(first <= b <= last for b in borders))
    assert Lost(spans, 40).by(borders) == once


MASKS_FIRST = """
graph(%0 = leaf 0 : float32[8,8] @cpu, %1 = leaf 1 : float32[8,8] @cpu,
      %2 = leaf 2 : float32[8,8] @cpu) {
  %3 = aten.neg.default(%1) : float32[8,8] @cpu
  %4 = aten.neg.default(%2) : float32[8,8] @cpu
  %5 = aten.exp.default(%4) : float32[8,8] @cpu
  %6 = aten.exp.default(%1) : float32[8,8] @cpu
  %7 = aten.mm.default(%0, %0) : float32[8,8] @cpu
  %8 = aten.mul.Tensor(%7, %3) : float32[8,8] @cpu
  %9 = aten.mm.default(%8, %0) : float32[8,8] @cpu
  %10 = aten.mul.Tensor(%9, %5) : float32[8,8] @cpu
  return %6, %10
}
"""


def names(nodes: Sequence[Node]) -> list[str]:
    return [node.op.target._opname for node in nodes]


def test_what_needs_inputs_alone_stands_where_it_is_read() -> None:
    graph = parse(MASKS_FIRST)
    nodes = repeats.waiting(graph.nodes)
    assert names(nodes) == ["mm", "neg", "mul", "mm", "neg", "exp", "mul", "exp"]
    assert set(nodes) == set(graph.nodes)
    made = set(graph.inputs)
    for node in nodes:
        assert made.issuperset(node.operands)
        made.update(node.outputs)


# -- items of lists --------------------------------------------------------------------------------

UPDATES = """
commit 0:
  %4, %5 = aten._foreach_mul_.Scalar([%0, %1], 0.5)
  %6, %7 = aten._foreach_sqrt.default([%2, %3])
  %8, %9 = aten._foreach_add_.List([%4, %5], [%6, %7])
"""


def items_together(body: str) -> list[Node]:
    return repeats.items_together(SPLIT_LISTS.run(graph_of(body, inputs=4)).nodes)


def positions(nodes: Sequence[Node]) -> list[int | None]:
    return [items.positions[0] if (items := items_of(node)) else None for node in nodes]


def test_what_happens_to_one_item_stands_together() -> None:
    nodes = items_together(UPDATES + "return %8, %9")
    assert positions(nodes) == [0, 0, 0, 1, 1, 1]
    assert names(nodes[:3]) == ["_foreach_mul_", "_foreach_sqrt", "_foreach_add_"]


def test_items_wait_no_longer_than_somebody_reads_one() -> None:
    more = """  %10 = aten.sin.default(%8)
  %11, %12 = aten._foreach_exp.default([%9, %10])
  return %11, %12"""
    assert positions(items_together(UPDATES + more)) == [0, 0, 0, 1, 1, 1, None, 0, 1]


# -- text in, text out -----------------------------------------------------------------------------

CPU = torch.device("cpu")


def test_what_does_not_pay_is_left() -> None:
    body = "%1 = aten.sin.default(%0)\n%2 = aten.cos.default(%1)\nreturn %2"
    check(repeats.repeats(CPU), f"compiled 0:\n{body}", None)


@pytest.mark.usefixtures("cheap")
def test_each_copy_is_a_block() -> None:
    check(
        repeats.repeats(CPU),
        """
        compiled 0:
          %1 = aten.mm.default(%0, %0)
          %2 = aten.sin.default(%1)
          %3 = aten.mm.default(%2, %2)
          %4 = aten.sin.default(%3)
          %5 = aten.mm.default(%4, %4)
          %6 = aten.sin.default(%5)
          %7 = aten.neg.default(%6)
          return %7
        """,
        """
        compiled 0 repeat 0:
          %1 = aten.mm.default(%0, %0)
          %2 = aten.sin.default(%1)
        compiled 0 repeat 0:
          %3 = aten.mm.default(%2, %2)
          %4 = aten.sin.default(%3)
        compiled 0 repeat 0:
          %5 = aten.mm.default(%4, %4)
          %6 = aten.sin.default(%5)
        compiled 0:
          %7 = aten.neg.default(%6)
          return %7
        """,
    )


@pytest.mark.usefixtures("cheap")
def test_copies_differ_in_no_attribute() -> None:
    """The factor is another one in the second copy: nothing repeats."""
    body = """
    compiled 0:
      %1 = aten.mm.default(%0, %0)
      %2 = aten.mul.Tensor(%1, 0.5)
      %3 = aten.mm.default(%2, %2)
      %4 = aten.mul.Tensor(%3, 0.25)
      return %4
    """
    check(repeats.repeats(CPU), body, None)
    cut = repeats.repeats(CPU).run(graph_of(body.replace("0.25", "0.5")))
    assert [block.repeat for block in cut.blocks] == [0, 0]


@pytest.mark.usefixtures("cheap")
def test_the_work_on_each_item_of_a_list_is_a_copy() -> None:
    check(
        repeats.repeats(CPU),
        """
        commit 0:
          %4 = aten._foreach_mul_.Scalar([%0], 0.5) items [0] of 2 op 0
          %5 = aten._foreach_mul_.Scalar([%1], 0.5) items [1] of 2 op 0
          %6 = aten._foreach_add_.List([%4], [%2]) items [0] of 2 op 1
          %7 = aten._foreach_add_.List([%5], [%3]) items [1] of 2 op 1
          return %6, %7
        """,
        """
        commit 0 repeat 0:
          %4 = aten._foreach_mul_.Scalar([%0], 0.5) items [0] of 2 op 0
          %5 = aten._foreach_add_.List([%4], [%2]) items [0] of 2 op 1
        commit 0 repeat 0:
          %6 = aten._foreach_mul_.Scalar([%1], 0.5) items [1] of 2 op 0
          %7 = aten._foreach_add_.List([%6], [%3]) items [1] of 2 op 1
          return %5, %7
        """,
        inputs=4,
    )


# -- the rewritten program -------------------------------------------------------------------------


def compiled(text: str, aliases: dict[int, int] | None = None, **options: Any) -> Computation:
    backend = DynamoBackend("eager", **options)
    device = backend.backend_device(torch.device("cpu"))
    return compile_graph(parse(text), "graph", backend, device, aliases or {})


@pytest.mark.usefixtures("cheap")
def test_views_are_computed_where_they_are_read() -> None:
    layer = """
  %{a} = aten.t.default(%0) : float32[4,4] stride [1,4] @cpu
  %{b} = aten.mm.default(%{x}, %{a}) : float32[4,4] @cpu
  %{c} = aten.sin.default(%{b}) : float32[4,4] @cpu
"""
    forward = [layer.format(a=3 * i + 1, b=3 * i + 2, c=3 * i + 3, x=3 * i) for i in range(4)]
    body = "".join(forward) + "  %13 = aten.mm.default(%12, %1) : float32[4,4] @cpu\n"
    text = f"graph(%0 = leaf 0 : float32[4,4] @cpu) {{{body}  return %13\n}}"
    steps = compiled(text, equal_subgraphs=True).program.steps
    assert len(steps) > 2
    for step in steps:
        piece = step
        views = {
            r for i in piece.instructions if i.spec.name == "aten.t.default" for r in i.outputs
        }
        assert views
        assert not views & {*piece.inputs, *piece.outputs}


OPS = ("sin", "add", "mul", "t", "mm", "foreach", "add_")


@st.composite
def programs(draw: st.DrawFn) -> tuple[str, dict[int, int]]:
    """A body of random ops, several times in a row, each on what the one before made."""
    body = draw(st.lists(st.tuples(st.sampled_from(OPS), *[st.integers(0, 9)] * 2), min_size=2,
                         max_size=6))  # fmt: skip
    lines: list[str] = []
    registers = [0, 1, 2]
    for _ in range(draw(st.integers(1, 6))):
        for op, one, two in body:
            x, y = registers[-1 - one % len(registers)], registers[-1 - two % len(registers)]
            registers += _line(lines, op, x, y, registers[-1] + 1)
    wanted = draw(st.sets(st.sampled_from(registers[3:]), min_size=1))
    results = ", ".join(f"%{r}" for r in sorted(wanted))
    head = ", ".join(f"%{i} = leaf {i} : float32[3,3] @cpu" for i in range(3))
    aliases = {0: draw(st.integers(0, len(wanted) - 1))} if draw(st.booleans()) else {}
    return f"graph({head}) {{\n" + "\n".join(lines) + f"\n  return {results}\n}}", aliases


def _line(lines: list[str], op: str, x: int, y: int, made: int) -> list[int]:
    plain = "float32[3,3] @cpu"
    if op == "foreach":
        head = f"%{made}, %{made + 1} = aten._foreach_add.List([%{x}, %{y}], [%{y}, %{x}])"
        lines.append(f"  {head} : {plain}, {plain}")
        return [made, made + 1]
    if op == "t":  # and a copy, so that all have the same strides
        lines.append(f"  %{made} = aten.t.default(%{x}) : float32[3,3] stride [1,3] @cpu")
        lines.append(f"  %{made + 1} = aten.mm.default(%{made}, %{y}) : {plain}")
        return [made + 1]
    call = {
        "sin": f"aten.sin.default(%{x})",
        "add": f"aten.add.Tensor(%{x}, %{y})",
        "mul": f"aten.mul.Tensor(%{x}, 0.5)",
        "mm": f"aten.mm.default(%{x}, %{y})",
        "add_": f"aten.add_.Tensor(%{x}, %{y})",
    }[op]
    lines.append(f"  %{made} = {call} : {plain}")
    return [made]


def execute(backend: Any, computation: Computation, arguments: list[Tensor]) -> list[Tensor]:
    data = [
        BackendData(computation.device, type_, given)
        for given, type_ in zip(arguments, computation.parameter_types, strict=True)
    ]
    results = [r.wait().tensor for r in backend.execute(computation, data, computation.device)]
    assert all(tensor is not None for tensor in results)
    return results


@pytest.mark.usefixtures("cheap")
@settings(max_examples=40, deadline=None)
@given(programs())
def test_cut_or_not_a_program_computes_the_same(program: tuple[str, dict[int, int]]) -> None:
    text, aliases = program
    straight = ReferenceBackend()
    device = straight.backend_device(torch.device("cpu"))
    expected = compile_graph(parse(text), "graph", straight, device, {})
    rewritten = compiled(text, aliases, equal_subgraphs=True)
    torch.manual_seed(0)
    count = len(expected.parameter_types)
    arguments = [torch.randn(3, 3) / 3 for _ in range(count)]
    wanted = execute(straight, expected, [a.clone() for a in arguments])
    got = execute(DynamoBackend("eager"), rewritten, arguments)
    for one, two in zip(got, wanted, strict=True):
        torch.testing.assert_close(one, two, equal_nan=True)


@pytest.mark.usefixtures("cheap")
def test_equal_pieces_are_compiled_once() -> None:
    lines: list[str] = []
    made = 1
    for _ in range(8):
        for op in ("mm", "sin", "add"):
            (made,) = _line(lines, op, made - 1, 0, made)
            made += 1
    text = "graph(%0 = leaf 0 : float32[3,3] @cpu) {\n" + "\n".join(lines)
    steps = compiled(f"{text}\n  return %{made - 1}\n}}", equal_subgraphs=True).program.steps
    assert len(steps) > 2
    assert all(isinstance(step, Piece) for step in steps)
    assert len({id(step.run) for step in steps}) < len(steps)
    read = [r for step in steps for i in step.instructions for r in registers_in(i.args)]
    assert len(read) >= 8 * 5
