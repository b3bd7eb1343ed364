"""Node classes with typed arguments."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import torpor
from torpor.errors import GraphError
from torpor.ir.node import Node, Value, scalar
from torpor.ops._generated import nodes
from torpor.ops.typed_node import TypedNode
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
        (nodes.SumDimIntList.create(x, 1), nodes.SumDimIntList.create(x, [True])),  # type: ignore[arg-type]  # as torch takes it
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
    ("make", "told"),
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
def test_arguments_of_other_types_are_refused(make: Any, told: str) -> None:
    with pytest.raises(TypeError, match=f"^aten.*: argument {told}"):
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
        nodes.AddTensor.create(value(2))  # type: ignore[call-arg]  # the mistake
    with pytest.raises(TypeError, match="colour"):
        nodes.Relu.create(value(2), colour=1)  # type: ignore[call-arg]  # the mistake
    with pytest.raises(GraphError, match=r"not a node of aten\.relu\.default"):
        nodes.Relu(nodes.Sigmoid.create(value(2)).node)


def test_unknown_classes_are_attribute_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(AttributeError, match="has no attribute 'NoSuchNode'"):
        getattr(nodes, "NoSuchNode")  # noqa: B009  # mypy knows that it is not there
    monkeypatch.setitem(nodes.OPS, "Future", "aten.of_another_torch.default")
    with pytest.raises(AttributeError, match="torch has no op"):
        getattr(nodes, "Future")  # noqa: B009  # mypy knows that it is not there


def test_every_class_can_be_made() -> None:
    present = {name: op for name, op in nodes.OPS.items() if hasattr(nodes, name)}
    assert len(present) > 2500  # another torch may lack some
    for name, op in present.items():
        made = getattr(nodes, name)
        assert issubclass(made, TypedNode)
        assert made.op.name == op
        assert len(made.signature.parameters) == len(made.op.arguments)


def test_type_checkers_know_the_arguments(tmp_path: Path) -> None:
    api = pytest.importorskip("mypy.api", reason="mypy is not installed")
    program = tmp_path / "program.py"
    program.write_text(
        "from torpor.ir.node import Value\n"
        "from torpor.ops._generated.nodes import AddTensor, Cat\n"
        "def good(x: Value) -> object:\n"
        "    return Cat.create([AddTensor.create(x, x, alpha=2).outputs[0]], dim=1).dim + 1\n"
        "def bad(x: Value) -> object:\n"
        "    return AddTensor.create(x, x, alpha='two')\n",
        encoding="utf-8",
    )
    root = Path(__file__).resolve().parents[2]
    settings = ["--config-file", str(root / "pyproject.toml")]
    told, _, _ = api.run([*settings, str(program)])
    errors = [line for line in told.splitlines() if "error" in line and "program.py" in line]
    assert len(errors) == 1, told
    assert 'program.py:6: error: Argument "alpha"' in errors[0]
