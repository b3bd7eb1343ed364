"""The text that identifies a graph: the same in every process, another for every other graph."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch

from torpor.ir.graph import Graph
from torpor.ir.node import LEAF, Node, leaf, scalar
from torpor.ir.types import SymbolicType, TensorType
from torpor.ops.spec import spec_of
from torpor.symbols.expressions import Expr, Symbol, symbol
from torpor.text.canonical import NotCanonical, canonical_text
from torpor.text.torch_parser import parse

LAZY = torch.device("lazy", 0)
ONES = TensorType.contiguous((2, 3), torch.float32, LAZY)
ADD = spec_of(torch.ops.aten.add.Tensor).kind
VIEW = spec_of(torch.ops.aten.view.default).kind
A, B = symbol(0), symbol(1)


def graph_of(body: str, inputs: str = "%0 = leaf 0 : float32[2,3] @lazy:0") -> Graph:
    return parse(f"graph({inputs}) {{\n{body}\n}}")


def text_of(body: str, inputs: str = "%0 = leaf 0 : float32[2,3] @lazy:0") -> str:
    return canonical_text(graph_of(body, inputs))


def added(argument: object, position: int = 1, type_: TensorType = ONES) -> str:
    """The text of a graph that adds a constant, which no intern table is asked about."""
    x = leaf(0, ONES)
    args = [x, 1, 1]
    args[position] = argument  # type: ignore[call-overload]  # anything
    node = Node(ADD, (), tuple(args), (type_,))
    return canonical_text(Graph([x], [node], [node.outputs[0]]))


def test_a_graph_is_told_in_full() -> None:
    body = """
  %2 = aten.mul.Tensor(%0, %1) : float32[2,3] @lazy:0    # train.py:1  y = x * s
  %3 = aten.sum.dim_IntList(%2, [0]) : float32[3] @lazy:0
  return %3, %2"""
    inputs = "%0 = leaf 7 : float32[2,3] @lazy:0, %1 = scalar 3 : float"
    assert text_of(body, inputs).splitlines() == [
        "torpor.leaf float32[2,3] @lazy:0",
        "torpor.scalar scalar float",
        "aten.mul.Tensor i0 i1 -> float32[2,3] @lazy:0",
        "aten.sum.dim_IntList n0.0 (int:0) bool:False None -> float32[3] @lazy:0",
        "return n1.0 n0.0",
    ]


def test_slots_and_lines_are_not_part_of_it() -> None:
    body = "  %1 = aten.relu.default(%0) : float32[2,3] @lazy:0    # {line}\n  return %1"
    one = text_of(body.format(line="a.py:1"), "%0 = leaf 0 : float32[2,3] @lazy:0")
    other = text_of(body.format(line="b.py:9"), "%0 = leaf 5 : float32[2,3] @lazy:0")
    assert one == other


def test_a_value_that_was_computed_before_is_like_a_leaf() -> None:
    x = leaf(0, ONES)
    before = Node(ADD, (), (x, 1, 1), (ONES,)).outputs[0]
    texts = set()
    for given in (x, before):
        node = Node(ADD, (), (given, 2, 1), (ONES,))
        texts.add(canonical_text(Graph([given], [node], [node.outputs[0]])))
    assert len(texts) == 1


@pytest.mark.parametrize(
    "numbers",
    [
        (1, 1.0, True, "1", None, 1 + 0j, (1,), ((1,),)),
        (0.0, -0.0, float("nan"), float("inf"), float("-inf"), 5e-324, False, 0),
        (0.1, 0.1 + 1e-17 + 1e-16, 0.30000000000000004, 0.3),
        (complex(0.0, 1.0), complex(-0.0, 1.0), complex(0.0, -0.0), complex(-0.0, -0.0), 0j),
        (torch.float32, torch.float64, torch.strided, torch.contiguous_format, "torch.float32"),
        (torch.device("cpu"), torch.device("lazy", 0), torch.device("lazy"), "cpu"),
        (("a", "b"), ("a b",), ("a' 'b",), "('a' 'b')", "a", ()),
        ((1, (2, 3)), (1, 2, 3), ((1, 2), 3), (1, (2,), 3)),
    ],
    ids=str,
)
def test_constants_are_told_apart(numbers: tuple[object, ...]) -> None:
    distinct = {repr((type(number), number)) for number in numbers}
    assert len({added(number) for number in numbers}) == len(distinct)


def test_nan_is_itself() -> None:
    assert added(float("nan")) == added(-float("nan"))


@pytest.mark.parametrize(
    "type_",
    [
        TensorType.contiguous((3, 2), torch.float32, LAZY),
        TensorType.contiguous((2, 3), torch.float64, LAZY),
        TensorType.contiguous((2, 3), torch.float32, torch.device("cpu")),
        TensorType.contiguous((2, 3), torch.float32, torch.device("lazy", 1)),
        TensorType.of((2, 3), (1, 2), torch.float32, LAZY),
        TensorType.of((2, 3), (3, 1), torch.float32, LAZY, offset=1),
        TensorType.of((2, 3), (3, 1), torch.float32, LAZY, conj=True),
        TensorType.of((2, 3), (3, 1), torch.float32, LAZY, neg=True),
    ],
    ids=repr,
)
def test_types_are_told_apart(type_: TensorType) -> None:
    assert added(1) != added(1, type_=type_)
    x, other = leaf(0, ONES), leaf(0, type_)
    assert canonical_text(Graph([x], [], [x])) != canonical_text(Graph([other], [], [other]))


def test_a_number_is_no_leaf_and_kinds_of_numbers_differ() -> None:
    values = [scalar(0, kind) for kind in (bool, int, float, complex)]
    values.append(leaf(0, TensorType.contiguous((), torch.float32, LAZY)))
    assert len({canonical_text(Graph([value], [], [])) for value in values}) == 5


def test_who_is_used_where_is_told() -> None:
    inputs = "%0 = leaf 0 : float32[2] @lazy:0, %1 = leaf 1 : float32[2] @lazy:0"
    bodies = [
        "  %2 = aten.sub.Tensor(%0, %1) : float32[2] @lazy:0\n  return %2",
        "  %2 = aten.sub.Tensor(%1, %0) : float32[2] @lazy:0\n  return %2",
        "  %2 = aten.sub.Tensor(%0, %0) : float32[2] @lazy:0\n  return %2",
        "  %2 = aten.sub.Tensor(%0, %1) : float32[2] @lazy:0\n  return %2, %1",
        "  %2 = aten.add.Tensor(%0, %1) : float32[2] @lazy:0\n  return %2",
    ]
    assert len({text_of(body, inputs) for body in bodies}) == len(bodies)


def test_the_order_of_results_is_told() -> None:
    body = "  %1 = aten.relu.default(%0) : float32[2,3] @lazy:0\n"
    body += "  %2 = aten.neg.default(%0) : float32[2,3] @lazy:0\n"
    assert text_of(f"{body}  return %1, %2") != text_of(f"{body}  return %2, %1")


@pytest.mark.parametrize("thing", [object(), torch.Generator(), {1: 2}, torch.ones(2)], ids=type)
def test_what_has_no_text_is_refused(thing: object) -> None:
    with pytest.raises(NotCanonical, match="among the arguments"):
        added(thing)


def test_a_graph_that_uses_what_it_does_not_compute_is_refused() -> None:
    x, y = leaf(0, ONES), leaf(1, ONES)
    node = Node(ADD, (), (x, y, 1), (ONES,))
    with pytest.raises(NotCanonical, match="computed nowhere"):
        canonical_text(Graph([x], [node], [node.outputs[0]]))
    assert y.node.op is LEAF


PROGRAM = """
import torch, torpor
from torpor.execute.sync import PLANS
from torpor.text.canonical import canonical_text
torpor.use("reference")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.LayerNorm(4), torch.nn.Linear(4, 2))
model.to("lazy")
optimizer = torch.optim.AdamW(model.parameters())
x = torch.randn(3, 4).to("lazy")
for _ in range(3):
    optimizer.zero_grad()
    model(x).square().mean().backward()
    optimizer.step()
    torpor.sync(wait=True)
for plan in PLANS.plans.values():
    print(canonical_text(plan.graph), end="\\n\\n")
"""


def test_another_process_writes_the_same_text() -> None:
    texts = set()
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        texts.add(done.stdout)
    (text,) = texts
    assert text.count("aten.native_layer_norm") >= 2


# -- sizes that change -----------------------------------------------------------------------------


def rows(one: Symbol, other: Symbol, transposed: bool = False) -> Graph:
    """A graph on a leaf of size [one, other], which it flattens."""
    area = Expr.of(((1, tuple(sorted((one, other)))),))
    steps = (1, one.expr) if transposed else (other.expr, 1)
    x = leaf(0, SymbolicType.with_sizes((one.expr, other.expr), steps, 0, ONES))
    flat = SymbolicType.with_sizes((area,), (1,), 0, ONES)
    node = Node(VIEW, (), (x, (area,)), (flat,))
    return Graph([x], [node], [node.outputs[0]]).with_sizes()


def test_symbols_are_numbered_as_they_are_met() -> None:
    texts = {canonical_text(rows(symbol(a), symbol(b))) for a, b in ((0, 1), (1, 0), (207, 5))}
    (text,) = texts
    assert text.splitlines() == [
        "torpor.leaf float32[s0,s1] stride [s1,1] offset 0 @lazy:0",
        "torpor.size s0",
        "torpor.size s1",
        "aten.view.default i0 (size:s0*s1) -> float32[s0*s1] stride [1] offset 0 @lazy:0",
        "return n0.0",
    ]


def test_strides_are_told_whatever_the_sizes_are_now() -> None:
    one, other = symbol(0), symbol(1)
    texts = set()
    for value in (1, 4):
        one.bind(value, 0)
        other.bind(value, 0)
        texts |= {canonical_text(rows(one, other, transposed)) for transposed in (False, True)}
    assert len(texts) == 2


@pytest.mark.parametrize(
    "sizes",
    [
        [(((1, (A,)),), 1), (((1, (B,)),), 1), (((2, (A,)),), 1), (((1, (A, A)),), 1)],
        [(((1, (A,)),), 2), (((1, (A,)),), 3), (((1, (A,)), (1, ())), 2)],
        [(((1, (A,)), (1, ())), 1), (((1, (A,)), (-1, ())), 1), (((1, (A,)), (1, (B,))), 1)],
        [(((3, (Expr.of(((1, (A,)),), 2),)),), 1), (((3, (A,)),), 2), (((1, (A,)),), 2)],
    ],
    ids=["products", "divided", "sums", "inside"],
)
def test_sizes_are_told_apart(sizes: list[tuple[Any, int]]) -> None:
    def reported(size: Expr) -> str:
        x = leaf(0, SymbolicType.with_sizes((A.expr, B.expr), (B.expr, 1), 0, ONES))
        node = Node(VIEW, (), (x, (size,)), (x.type,))
        return canonical_text(Graph([x], [node], [node.outputs[0]]).with_sizes())

    assert len({reported(Expr.of(*size)) for size in sizes}) == len(sizes)


def test_the_order_of_terms_does_not_matter() -> None:
    def reported(terms: Any) -> str:
        x = leaf(0, SymbolicType.with_sizes((A.expr, B.expr), (B.expr, 1), 0, ONES))
        node = Node(VIEW, (), (x, (Expr.of(terms),)), (x.type,))
        return canonical_text(Graph([x], [node], [node.outputs[0]]).with_sizes())

    assert reported(((1, (A,)), (2, (B, A)))) == reported(((2, (A, B)), (1, (A,))))


def test_a_size_is_no_number() -> None:
    x = leaf(0, SymbolicType.with_sizes((A.expr,), (1,), 0, ONES))
    reported = [
        canonical_text(Graph([x], [node], [node.outputs[0]]).with_sizes())
        for node in (Node(VIEW, (), (x, (size,)), (x.type,)) for size in (A.expr, 4, "s0"))
    ]
    assert len(set(reported)) == 3


def test_a_symbol_that_is_no_input_is_refused() -> None:
    x = leaf(0, SymbolicType.with_sizes((A.expr,), (1,), 0, ONES))
    with pytest.raises(NotCanonical, match="is no input"):
        canonical_text(Graph([x], [], [x]))


def test_symbols_that_are_sizes_come_before_those_that_are_parts() -> None:
    one, other, third = symbol(2), symbol(0), symbol(1)
    area = Expr.of(((1, (other, one)),))
    x = leaf(0, SymbolicType.with_sizes((area,), (1,), 0, ONES))
    y = leaf(1, SymbolicType.with_sizes((one.expr,), (1,), 0, ONES))
    z = leaf(2, SymbolicType.with_sizes((other.expr, 2, third.expr), (1, 1, 1), 0, ONES))
    assert Graph([x, y, z], [], [x]).with_sizes().symbols == (one, other, third)
    assert Graph([x, z], [], [x]).with_sizes().symbols == (other, third, one)
