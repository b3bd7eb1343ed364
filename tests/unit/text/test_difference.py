"""What makes two graphs two: the first difference, found without its consequences."""

from __future__ import annotations

import pytest
import torch

from torpor.ir.graph import Graph
from torpor.ir.node import Node, Value, leaf, scalar
from torpor.ir.types import TensorType
from torpor.ops.spec import spec_of
from torpor.text import difference as kinds
from torpor.text.difference import Difference, difference

aten = torch.ops.aten
CPU = torch.device("cpu")


def typed(*shape: int, dtype: torch.dtype = torch.float32) -> TensorType:
    return TensorType.contiguous(shape, dtype, CPU)


def call(target: object, *args: object, type_: TensorType | None = None, line: str = "") -> Value:
    """The one result of an op, made apart from the intern table."""
    operands = [a for arg in args for a in (arg if isinstance(arg, tuple) else (arg,))]
    type_ = type_ or next(a.type for a in operands if isinstance(a, Value))
    kind = spec_of(target).kind  # type: ignore[arg-type]  # an op
    return Node(kind, args, args, (type_,), line or None).outputs[0]


def compare(before: Value, after: Value, replaced: tuple[int, ...] = ()) -> Difference:
    return difference(Graph.of([before]), Graph.of([after]), replaced)


def mul(x: Value, number: object, line: str = "a.py:1") -> Value:
    return call(aten.mul.Tensor, x, number, line=line)


def exp(x: Value, line: str = "a.py:2") -> Value:
    return call(aten.exp.default, x, line=line)


def test_equal_graphs_are_the_same() -> None:
    x = leaf(0, typed(3))
    assert compare(exp(mul(x, 2)), exp(mul(x, 2))).kind == kinds.SAME


def test_a_leaf_of_another_shape_is_the_cause_of_all_that_follows() -> None:
    def graph(length: int) -> Value:
        x = leaf(0, typed(2, length))
        return call(
            aten.view.default, exp(x), (2 * length,), type_=typed(2 * length), line="b.py:9"
        )

    found = compare(graph(3), graph(4))
    assert (found.kind, found.slot, found.dim) == (kinds.SHAPE, 0, 1)
    assert (found.before, found.after) == ("[2, 3]", "[2, 4]")
    assert (found.op, found.argument, found.line) == ("aten.exp.default", "self", "a.py:2")
    assert found.then is None


@pytest.mark.parametrize(
    ("other", "kind"),
    [
        (typed(2, 3, dtype=torch.float64), kinds.DTYPE),
        (TensorType.of((2, 3), (1, 2), torch.float32, CPU), kinds.LAYOUT),
        (typed(6), kinds.SHAPE),
    ],
)
def test_leaves_differ_in_several_ways(other: TensorType, kind: str) -> None:
    found = compare(exp(leaf(0, typed(2, 3))), exp(leaf(0, other)))
    assert (found.kind, found.dim) == (kind, None)


def test_a_leaf_that_was_always_the_same_tensor_is_another_module() -> None:
    small, large = leaf(1, typed(2)), leaf(1, typed(4))
    assert compare(exp(small), exp(large), (1,)).kind == kinds.MODULE
    assert compare(exp(small), exp(large), (0,)).kind == kinds.SHAPE


def test_a_dtype_is_told_before_a_module() -> None:
    one, other = leaf(1, typed(2)), leaf(1, typed(2, dtype=torch.float16))
    assert compare(exp(one), exp(other), (1,)).kind == kinds.DTYPE


@pytest.mark.parametrize(
    ("before", "after"), [(2, 3), (1, 1.0), (1, True), (0.0, -0.0), (2.0, float("nan"))]
)
def test_a_constant_that_changed(before: float, after: float) -> None:
    x = leaf(0, typed(3))
    found = compare(exp(mul(x, before)), exp(mul(x, after)))
    assert (found.kind, found.argument) == (kinds.CONSTANT, "other")
    assert (found.before, found.after) == (str(before), str(after))


def test_nan_is_itself() -> None:
    x = leaf(0, typed(3))
    assert compare(mul(x, float("nan")), mul(x, float("nan"))).kind == kinds.SAME


def test_a_constant_on_another_line_is_another_branch() -> None:
    x = leaf(0, typed(3))
    found = compare(mul(x, 2, "a.py:1"), mul(x, 3, "a.py:5"))
    assert (found.kind, found.line, found.line_before) == (kinds.BRANCH, "a.py:5", "a.py:1")


def test_a_promoted_number() -> None:
    x = leaf(0, typed(3))
    found = compare(mul(x, 0.5), mul(x, scalar(0, float)))
    assert (found.kind, found.before, found.after) == (kinds.PROMOTED, "0.5", "a run-time input")


def test_another_branch_is_told_with_both_lines() -> None:
    x = leaf(0, typed(3))
    sqrt = call(aten.sqrt.default, mul(x, 2), line="a.py:4")
    found = compare(exp(sqrt), exp(exp(mul(x, 2), "a.py:3")))
    assert found.kind == kinds.BRANCH
    assert (found.before, found.after) == ("aten.sqrt.default", "aten.exp.default")
    assert (found.line, found.line_before) == ("a.py:3", "a.py:4")


def test_the_earliest_of_several_differences_is_told() -> None:
    x, y = leaf(0, typed(3)), leaf(1, typed(3))

    def graph(first: int, second: int) -> Value:
        late = mul(y, second, "late.py:1")
        return call(aten.add.Tensor, late, mul(x, first, "early.py:1"), 1)

    assert compare(graph(1, 2), graph(3, 4)).line == "early.py:1"


def test_an_op_left_out_and_an_op_put_in() -> None:
    x = leaf(0, typed(3))
    longer, shorter = exp(exp(x), "a.py:3"), exp(x)
    assert (compare(shorter, longer).before, compare(shorter, longer).after) == (
        "",
        "aten.exp.default",
    )
    assert compare(longer, shorter).after == ""
    assert compare(longer, shorter).line == "a.py:3"


def test_what_is_missing_early_is_told_before_what_moves_up_for_it() -> None:
    x, y, z, new = (leaf(slot, typed(3)) for slot in range(4))
    state = call(aten.zeros_like.default, x, line="optimizer.py:1")
    before = Graph.of([call(aten.add.Tensor, exp(z), mul(y, 2), 1), state])
    after = Graph.of([call(aten.add.Tensor, exp(new), mul(y, 2), 1)])
    found = difference(before, after)
    assert (found.before, found.after) == ("aten.zeros_like.default", "")
    assert found.line == "optimizer.py:1"


def test_long_constants_are_cut_short() -> None:
    x = leaf(0, typed(3))
    found = compare(mul(x, (1.0,) * 100), mul(x, (2.0,) * 100))
    assert len(found.before) < 100
    assert found.before.endswith("...")


def test_a_loop_over_a_size_is_a_shape_and_then_a_branch() -> None:
    def graph(length: int) -> Value:
        x = leaf(0, typed(length, 2))
        state = call(aten.select.int, x, 0, 0, type_=typed(2), line="a.py:1")
        for _ in range(length):
            state = exp(state, "a.py:7")
        return state

    found = compare(graph(2), graph(3))
    assert found.kind == kinds.SHAPE
    assert found.then is not None
    assert (found.then.kind, found.then.line) == (kinds.BRANCH, "a.py:7")
    assert "a.py:7" in str(found)


def test_a_list_that_grew() -> None:
    def graph(number: int) -> Value:
        values = tuple(leaf(n, typed(3)) for n in range(number))
        return call(aten.stack.default, values, 0, type_=typed(number, 3), line="a.py:8")

    found = compare(graph(2), graph(3))
    assert (found.kind, found.before, found.after) == (kinds.LIST, "2", "3")
    assert found.line == "a.py:8"


def test_a_cast_that_comes_and_goes_is_a_dtype() -> None:
    x = leaf(0, typed(3))
    half = typed(3, dtype=torch.float16)
    cast = call(
        aten._to_copy.default, x, torch.float16, None, None, None, False, None, type_=half,
        line="a.py:6",
    )  # fmt: skip
    there, back = compare(exp(x), exp(cast)), compare(exp(cast), exp(x))
    assert (there.kind, there.before, there.after) == (kinds.DTYPE, "float32", "float16")
    assert (back.kind, back.before, back.after) == (kinds.DTYPE, "float16", "float32")


def test_leaves_in_another_order_are_recognised() -> None:
    def graph(first: int, second: int) -> Value:
        weight, x = leaf(first, typed(2)), leaf(second, typed(2))
        return call(aten.add.Tensor, exp(weight), mul(x, 2), 1)

    assert compare(graph(0, 1), graph(1, 0)).kind == kinds.ORDER


def test_a_shape_is_found_though_leaves_have_another_order() -> None:
    def graph(first: int, second: int, size: int) -> Value:
        weight, x = leaf(first, typed(1)), leaf(second, typed(size))
        added = call(aten.add.Tensor, exp(weight), mul(x, 2), 1, type_=typed(size))
        return exp(added)

    found = compare(graph(0, 1, 3), graph(1, 0, 4))
    assert (found.kind, found.before, found.after) == (kinds.SHAPE, "[3]", "[4]")


def test_another_result_of_the_same_nodes() -> None:
    x = leaf(0, typed(3))
    inner = mul(x, 2, "a.py:3")
    outer = exp(inner)
    found = difference(Graph.of([outer]), Graph.of([outer, inner]))
    assert (found.kind, found.line) == (kinds.RESULTS, "a.py:3")
    assert (found.before, found.after) == ("1", "2")


def test_a_value_that_was_read_before() -> None:
    x = leaf(0, typed(3))
    inner = mul(x, 2, "a.py:3")
    outer = exp(inner)
    found = difference(Graph.of([outer]), Graph.of([outer], {inner}))
    assert (found.kind, found.line) == (kinds.READ, "a.py:3")


def test_every_kind_has_words() -> None:
    names = [name for name in vars(kinds) if name.isupper() and not name.startswith("_")]
    texts = [kind for name in names if type(kind := getattr(kinds, name)) is str]
    assert len(texts) > 10
    for kind in texts:
        text = str(Difference(kind, "aten.exp.default", "self", "1", "2", 0, 0, "a.py:1"))
        assert "a.py:1" in text


def test_deep_graphs_are_compared_without_recursion() -> None:
    def graph(last: int) -> Value:
        value = leaf(0, typed(3))
        for _ in range(20_000):
            value = exp(value)
        return mul(value, last, "last.py:1")

    assert compare(graph(2), graph(3)).line == "last.py:1"
