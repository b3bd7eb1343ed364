"""The intern table: the same key is the same node, and the whole stays bounded."""

import gc
import pickle
import weakref

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from torpor import config
from torpor.ir.graph import Graph
from torpor.ir.node import (
    LEAF,
    SCALAR,
    TABLE,
    InternTable,
    Node,
    OpKind,
    Value,
    intern,
    leaf,
    op_kind,
    scalar,
    values_in,
)
from torpor.ir.types import SCALAR_TYPES, TensorType
from torpor.ops.keys import node_of
from torpor.ops.spec import spec_of

TYPE = TensorType.contiguous((2,), torch.float32, torch.device("cpu"))
OTHER = TYPE.on(torch.device("lazy:0"))
LIMIT = 20


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> InternTable:
    """A table of its own that holds few nodes."""
    monkeypatch.setattr(config, "max_interned_nodes", LIMIT)
    return InternTable()


def meet(table: InternTable, op: OpKind, number: int) -> Node:
    """What a recorder does."""
    return table.intern(op, (number,), lambda: ((number,), (TYPE,)))


# -- identity --------------------------------------------------------------------------------------


def test_the_same_slot_and_type_is_the_same_leaf() -> None:
    assert leaf(0, TYPE) is leaf(0, TYPE)
    assert len({leaf(0, TYPE), leaf(1, TYPE), leaf(0, OTHER)}) == 3


def test_the_same_slot_and_kind_is_the_same_scalar() -> None:
    assert scalar(0, int) is scalar(0, int)
    assert len({scalar(0, int), scalar(1, int), scalar(0, float), scalar(0, bool)}) == 4
    assert scalar(0, complex).type is SCALAR_TYPES[complex]


def test_the_same_op_on_the_same_values_is_the_same_node() -> None:
    add = spec_of(torch.ops.aten.add.Tensor)
    x, y = leaf(0, TYPE), leaf(1, TYPE)
    first = node_of(add, [x, y, 1], (TYPE,))
    assert node_of(add, [x, y, 1], (TYPE,)) is first
    others = [[y, x, 1], [x, x, 1], [x, y, 2], [x, y, 1.0], [x, y, True], [x, 1, 1]]
    assert len({first, *(node_of(add, args, (TYPE,)) for args in others)}) == 7


def test_other_ops_have_other_nodes_under_the_same_key() -> None:
    table = InternTable()
    a, b = table.kind("a"), table.kind("b")
    assert meet(table, a, 1) is not meet(table, b, 1)


def test_the_line_is_no_part_of_a_node() -> None:
    neg = spec_of(torch.ops.aten.neg.default)
    first = node_of(neg, [leaf(0, TYPE)], (TYPE,), site="a.py:1")
    assert node_of(neg, [leaf(0, TYPE)], (TYPE,), site="b.py:2") is first
    assert first.site == "a.py:1"


def test_lists_in_arguments_become_tuples() -> None:
    cat = spec_of(torch.ops.aten.cat.default)
    x = leaf(0, TYPE)
    node = node_of(cat, [[x, x], 0], (TYPE,))
    assert node is node_of(cat, [(x, x), 0], (TYPE,))
    assert node.args == ((x, x), 0)


def test_values_are_found_in_arguments_and_in_lists() -> None:
    x, y = leaf(0, TYPE), leaf(1, TYPE)
    assert list(values_in((x, 1, (y, None, x), "s", (2, 3)))) == [x, y, x]


def test_outputs_know_their_node_and_place() -> None:
    node = intern(TABLE.kind("test.two"), (0,), lambda: ((), (TYPE, OTHER)))
    assert [(v.node, v.index, v.type) for v in node.outputs] == [(node, 0, TYPE), (node, 1, OTHER)]
    assert all(type(value) is Value for value in node.outputs)


def test_an_op_is_one_object_by_name() -> None:
    assert TABLE.kind("torpor.leaf") is LEAF is op_kind("torpor.leaf")
    assert pickle.loads(pickle.dumps(SCALAR)) is SCALAR


# -- bounds ----------------------------------------------------------------------------------------


def test_an_endless_stream_of_new_nodes_stays_bounded(small: InternTable) -> None:
    op = small.kind("op")
    longest = 0
    for number in range(50 * LIMIT):
        meet(small, op, number)
        longest = max(longest, len(small))
    assert LIMIT <= longest <= 2 * LIMIT


def test_a_node_met_every_step_outlives_any_stream(small: InternTable) -> None:
    op = small.kind("op")
    steady = meet(small, op, -1)
    for number in range(20 * LIMIT):
        meet(small, op, number)
        if number % (LIMIT // 2) == 0:
            assert meet(small, op, -1) is steady


def test_a_step_as_large_as_the_table_meets_its_own_nodes_again(small: InternTable) -> None:
    ops = [small.kind(name) for name in "ab"]
    first = [meet(small, ops[i % 2], i) for i in range(LIMIT)]
    for _ in range(5):
        assert [meet(small, ops[i % 2], i) for i in range(LIMIT)] == first


@given(st.lists(st.integers(0, 60), max_size=300))
@settings(deadline=None)
def test_the_table_answers_every_key_with_its_own_node(keys: list[int]) -> None:
    table = InternTable()
    op = table.kind("op")
    before, config.max_interned_nodes = config.max_interned_nodes, LIMIT
    try:
        for key in keys:
            node = meet(table, op, key)
            assert node.key == (key,)
            assert meet(table, op, key) is node
            assert len(table) <= 2 * LIMIT
            assert not op.nodes.keys() & op.old_nodes.keys()
    finally:
        config.max_interned_nodes = before


def test_a_dropped_node_stays_valid_and_gets_a_successor(small: InternTable) -> None:
    op = small.kind("op")
    old = meet(small, op, 0)
    small.clear()
    new = meet(small, op, 0)
    assert new is not old
    assert (old.args, old.outputs[0].type) == (new.args, new.outputs[0].type)
    assert Graph.of([old.outputs[0], new.outputs[0]]).nodes == (old, new)


def test_rotation_keeps_the_dictionary_that_recorders_hold(small: InternTable) -> None:
    op = small.kind("op")
    held = op.nodes
    node = meet(small, op, 0)
    small.rotate()
    assert held is op.nodes
    assert held == {}
    assert meet(small, op, 0) is node
    assert held == {(0,): node}


def test_two_rotations_forget(small: InternTable) -> None:
    op = small.kind("op")
    gone = weakref.ref(meet(small, op, 0))
    small.rotate()
    gc.collect()
    assert gone() is not None
    small.rotate()
    gc.collect()
    assert gone() is None
    assert len(small) == 0


def test_rotations_are_counted(small: InternTable) -> None:
    before = small.generation
    for number in range(LIMIT + 1):
        meet(small, small.kind("op"), number)
    assert small.generation == before + 1
    small.clear()
    assert small.generation == before + 3


def test_a_graph_of_forgotten_nodes_is_still_a_graph() -> None:
    relu = spec_of(torch.ops.aten.relu.default)
    value = leaf(0, TYPE)
    for _ in range(10):
        value = node_of(relu, [value], (TYPE,)).outputs[0]
    TABLE.clear()
    graph = Graph.of([value])
    assert len(graph) == 10
    assert [v.node.op for v in graph.inputs] == [LEAF]
