"""Node classes with typed arguments."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from torpor.errors import GraphError
from torpor.ir.node import Node, Value, scalar
from torpor.ops import nodes
from torpor.ops.typed_node import TypedNode, class_finder
from torpor.trace.values import value_of


def value(*shape: int) -> Value:
    return value_of(torpor.lazy(torch.ones(shape)))


def test_create_gives_the_node_that_recording_gives() -> None:
    x, y = (torpor.lazy(torch.ones(2, 3)) for _ in range(2))
    recorded = value_of(torch.add(x, y, alpha=2))
    made = nodes.AddTensor.create(value_of(x), value_of(y), alpha=2)
    assert made.node is recorded.node
    assert made.outputs == (recorded,)


def test_create_makes_a_node_with_inferred_types() -> None:
    x = value(2, 3)
    made = nodes.Sigmoid.create(x)
    assert made.outputs[0].type is x.type
    assert nodes.Sigmoid.create(self=x).node is made.node
    assert nodes.Sigmoid.infer(x) == (x.type,)


def test_arguments_are_attributes() -> None:
    x, y = value(2, 3), value(2, 3)
    made = nodes.Cat.create([x, y], dim=1)
    assert (made.tensors, made.dim) == ((x, y), 1)
    assert made.outputs[0].type.shape == (2, 6)
    clamped = nodes.Clamp.create(x, max=1.5)
    assert (clamped.self, clamped.min, clamped.max) == (x, None, 1.5)


def test_an_argument_named_like_a_method_has_an_underscore() -> None:
    x = value(2)
    made = nodes.RreluWithNoiseBackward.create(x, x, x, 0.1, 0.3, False, False)
    assert (made.lower_, made.upper) == (0.1, 0.3)


def test_numbers_of_other_types_are_other_nodes() -> None:
    x = value(2)
    one, real, true = (nodes.AddScalar.create(x, n) for n in (1, 1.0, True))
    assert len({one.node, real.node, true.node}) == 3
    assert nodes.AddScalar.can_be_reused(one.node, x, 1)
    assert not nodes.AddScalar.can_be_reused(one.node, x, 1.0)
    assert not nodes.SubScalar.can_be_reused(one.node, x, 1)


def test_arguments_get_the_types_of_the_schema() -> None:
    x = value(2, 3)
    pairs = [
        (nodes.Cat.create([x, x], dim=True), nodes.Cat.create((x, x), dim=1)),
        (nodes.SumDimIntList.create(x, 1), nodes.SumDimIntList.create(x, [True])),
        (
            nodes.NativeLayerNorm.create(x, [3], None, None, 1),
            nodes.NativeLayerNorm.create(x, (3,), None, None, 1.0),
        ),
    ]
    for made, same in pairs:
        assert made.node is same.node
    assert type(pairs[0][0].node.args[1]) is int
    assert [type(dim) for dim in pairs[1][0].node.args[1]] == [int]
    assert type(pairs[2][0].node.args[4]) is float


@pytest.mark.parametrize(
    ("make", "reported"),
    [
        (lambda n, x: n.Relu.create(torch.ones(2)), "'self' is a Value .* not a Tensor; .*graph"),
        (lambda n, x: n.Relu.create(torpor.lazy(torch.ones(2))), "'self' is .* not a LazyTensor"),
        (lambda n, x: n.Cat.create([x, torch.ones(2)]), "'tensors' is a Value .* not a Tensor"),
        (lambda n, x: n.Clamp.create(x, max=torch.ones(())), "'max' is a number"),
        (lambda n, x: n.Permute.create(x, (1.0, 0)), "'dims' is an int, not a float"),
        (lambda n, x: n.Permute.create(x, 1), "'dims' is a list, not a int"),
        (lambda n, x: n.SumDimIntList.create(x, [0], keepdim=1), "'keepdim' is a bool"),
        (lambda n, x: n.SumDimIntList.create(x, [0], dtype="float"), "'dtype' is a torch.dtype"),
    ],
)
def test_arguments_of_other_types_are_refused(make: Any, reported: str) -> None:
    with pytest.raises(TypeError, match=f"^aten.*: argument {reported}"):
        make(nodes, value(2, 3))


def test_run_time_scalars_are_arguments() -> None:
    x, number = value(2), scalar(0, float)
    made = nodes.MulScalar.create(x, number)
    assert made.other is number
    assert made.outputs[0].type is x.type


def test_written_arguments_are_outputs() -> None:
    x, y = value(2), value(2)
    made = nodes.AddTensor_.create(x, y)
    assert [v.type for v in made.outputs] == [x.type]


def test_lower_hands_the_node_to_the_context() -> None:
    seen: list[Node] = []

    class Context:
        def lower(self, node: Node) -> None:
            seen.append(node)

    made = nodes.Relu.create(value(2))
    made.lower(Context())
    assert seen == [made.node]


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(TypeError, match="missing a required argument: 'other'"):
        nodes.AddTensor.create(value(2))
    with pytest.raises(TypeError, match="colour"):
        nodes.Relu.create(value(2), colour=1)
    with pytest.raises(GraphError, match=r"not a node of aten\.relu\.default"):
        nodes.Relu(nodes.Sigmoid.create(value(2)).node)


def test_unknown_classes_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchNode'"):
        nodes.NoSuchNode  # noqa: B018  # to look it up is the test
    with pytest.raises(ImportError, match="cannot import name 'NoSuchNode'"):
        exec("from torpor.ops.nodes import NoSuchNode")


@pytest.mark.parametrize("name", ["RandomFrom", "Resize_", "_LocalScalarDense", "Item"])
def test_ops_that_are_never_nodes_have_no_class(name: str) -> None:
    with pytest.raises(AttributeError, match=rf"no '{name}': aten\.\w+\.\w+ is never a node"):
        getattr(nodes, name)
    assert name not in nodes.OPS


def test_a_backends_class_for_an_op_of_another_torch_is_an_attribute_error() -> None:
    find = class_finder("acme.nodes", {"Future": "aten.of_another_torch.default"})
    with pytest.raises(AttributeError, match="torch has no op"):
        find("Future")


@pytest.mark.parametrize(
    ("name", "op"),
    [
        ("AddTensor", "aten.add.Tensor"),
        ("AddTensor_", "aten.add_.Tensor"),
        ("Any", "aten.any.default"),
        ("NativeLayerNorm", "aten.native_layer_norm.default"),
        ("SumDimIntList", "aten.sum.dim_IntList"),
        ("_ForeachAddList", "aten._foreach_add.List"),
        ("__AndScalar_", "aten.__and__.Scalar"),
        ("__LshiftTensorOut_", "aten.__lshift__.Tensor_out"),
    ],
)
def test_a_class_is_named_after_its_op(name: str, op: str) -> None:
    assert getattr(nodes, name).op.name == op


def test_every_class_can_be_made() -> None:
    assert len(nodes.OPS) > 2500
    for name, op in nodes.OPS.items():
        made = getattr(nodes, name)
        assert issubclass(made, TypedNode)
        assert (made.__name__, made.op.name) == (name, op)
        assert len(made.signature.parameters) == len(made.op.arguments)
        assert getattr(nodes, name) is made


def test_every_class_is_listed_for_completion() -> None:
    assert {"AddTensor", "OPS"} | set(nodes.OPS) <= set(dir(nodes))


FIRST_USE = """\
import torpor, sys
from torpor.ir.node import TABLE
assert "torpor.ops.nodes" not in sys.modules
before = len(TABLE.kinds)
from torpor.ops.nodes import AddTensor, NativeLayerNorm
print(len(TABLE.kinds) - before)
"""


def test_one_class_is_made_without_the_others() -> None:
    source = str(Path(torpor.__file__).resolve().parents[1])
    done = subprocess.run(
        [sys.executable, "-c", FIRST_USE], capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": source}, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 2
