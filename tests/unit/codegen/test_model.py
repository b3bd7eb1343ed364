"""The generator's model of an op: text and back, and the same reading as `ops.spec`."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchgen.gen import parse_native_yaml

from torpor.codegen.model import (
    NO_DEFAULT,
    Composite,
    Form,
    LazyIrSchema,
    LazyType,
    SchemaError,
)
from torpor.codegen.torch_schemas import TAGS, schemas, target_of, yaml_file
from torpor.ops.spec import ArgKind, ReturnKind, spec_of

ALL = schemas()


def test_every_overload_of_the_dispatcher_that_has_an_entry_is_there() -> None:
    dispatcher = {n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::")}
    named = {f"aten::{s.qualified}" for s in ALL.values()}
    assert named <= dispatcher
    missing = {name.partition(".")[0] for name in dispatcher - named}  # registered by hand in C++
    by_hand = "quantized_gru quantized_lstm get_gradients shallow_copy_data_"
    assert missing <= {f"aten::{name}" for name in by_hand.split()}
    assert len(ALL) > 2800


def test_every_schema_is_parsed_back_from_its_text() -> None:
    for schema in ALL.values():
        again = LazyIrSchema.parse(str(schema))
        assert again == schema
        assert str(again) == str(schema)
        assert hash(again) == hash(schema)


def test_every_schema_is_read_as_the_running_torch_tells_it() -> None:
    """What `native_functions.yaml` and the registered schema say is one and the same."""
    for schema in ALL.values():
        spec = spec_of(target_of(schema))
        assert [_argument_facts(a) for a in schema.arguments] == [
            _argument_facts(a) for a in spec.arguments
        ], schema.name
        assert (schema.name, schema.returns, schema.mutated, schema.may_fail) == (
            spec.name,
            spec.returns,
            spec.mutated,
            spec.may_fail,
        )
        assert {*schema.tags, "generated"} == {
            *(tag.name for tag in spec.target.tags),
            "generated",
        }, schema.name


def _argument_facts(argument: Any) -> tuple[Any, ...]:
    default = argument.default if argument.has_default else None
    return (
        argument.name, argument.kind, default, type(default), argument.has_default,
        argument.keyword_only, argument.mutated,
    )  # fmt: skip


def test_torchs_own_text_of_a_schema_is_read_too() -> None:
    for schema in ALL.values():
        reported = LazyIrSchema.parse(str(target_of(schema)._schema))
        device_index = any(a.type.base == "DeviceIndex" for a in schema.arguments)
        assert reported.signature == schema.signature or device_index


def test_the_form_is_torchgens() -> None:
    parsed = parse_native_yaml(str(yaml_file()), str(yaml_file(TAGS)))
    for function in parsed.native_functions:
        schema = ALL[LazyIrSchema.parse(f"{function.namespace}::{function.func}").name]
        if function.func.returns:  # torchgen counts `set_data` as functional: it returns nothing
            assert schema.form.value == function.func.kind().name, schema
        assert schema.is_view >= (function.is_view_op and schema.form is Form.FUNCTIONAL), schema


def test_names_are_unique() -> None:
    for names in ([s.identifier for s in ALL.values()], [s.class_name for s in ALL.values()]):
        assert len(set(names)) == len(names)
        assert all(name.isidentifier() for name in names)


def test_facts_of_an_elementwise_op() -> None:
    add = ALL["aten.add.Tensor"]
    assert (add.structured, add.inherits) == ("add.out", "TensorIteratorBase")
    assert add.is_elementwise
    assert add.is_core
    assert [a.name for a in add.tensors] == ["self", "other"]
    assert [a.name for a in add.attributes] == ["alpha"]
    assert str(add.arguments[2]) == "Scalar alpha=1"
    assert ALL["aten.add.out"].arguments[-1].is_out


@pytest.mark.parametrize(
    ("name", "form", "is_view"),
    [
        ("aten.add.Tensor", Form.FUNCTIONAL, False),
        ("aten.add_.Tensor", Form.INPLACE, False),
        ("aten.add.out", Form.OUT, False),
        ("aten.__iand__.Tensor", Form.INPLACE, False),
        ("aten.__and__.Tensor", Form.FUNCTIONAL, False),
        ("aten.view.default", Form.FUNCTIONAL, True),
        ("aten.split.Tensor", Form.FUNCTIONAL, True),
        ("aten._unsafe_view.default", Form.FUNCTIONAL, True),
        ("aten._fused_adam_.default", Form.INPLACE, False),
    ],
)
def test_form(name: str, form: Form, is_view: bool) -> None:
    assert (ALL[name].form, ALL[name].is_view) == (form, is_view)


def test_a_hidden_write_is_known() -> None:
    norm = ALL["aten.native_batch_norm.default"]
    assert [norm.arguments[i].name for i in norm.mutated] == ["running_mean", "running_var"]
    assert norm.returns[0].kind is ReturnKind.FRESH
    assert LazyIrSchema.parse(str(norm)).mutated == norm.mutated


def test_composite_kinds() -> None:
    assert ALL["aten.linear.default"].composite is Composite.IMPLICIT
    assert ALL["aten.ones.default"].composite is Composite.EXPLICIT
    assert ALL["aten.mm.default"].composite is Composite.NO


@pytest.mark.parametrize(
    ("text", "kind", "annotation"),
    [
        ("Tensor", ArgKind.TENSOR, "Value"),
        ("Tensor?[]", ArgKind.TENSORS, "Sequence[Value | None]"),
        ("SymInt[2]?", ArgKind.PLAINS, "Sequence[int] | None"),
        ("Scalar", ArgKind.SCALAR, "Number"),
        ("Scalar[]", ArgKind.SCALARS, "Sequence[Number]"),
        ("float[]?", ArgKind.FLOATS, "Sequence[float] | None"),
        ("ScalarType?", ArgKind.PLAIN, "torch.dtype | None"),
        ("Generator?", ArgKind.OPAQUE, "torch.Generator | None"),
        ("Storage", ArgKind.OPAQUE, "Any"),
    ],
)
def test_types(text: str, kind: ArgKind, annotation: str) -> None:
    type_ = LazyType.parse(text)
    assert (str(type_), type_.kind, type_.annotation) == (text, kind, annotation)


@pytest.mark.parametrize(
    ("argument", "default", "printed"),
    [
        ("int[2] stride=1", (1, 1), "[1, 1]"),
        ("int[] dims=[0, -1]", (0, -1), "[0, -1]"),
        ("int reduction=Mean", 1, "1"),
        ("MemoryFormat memory_format=contiguous_format", 0, "0"),
        ("float eps=1", 1.0, "1.0"),
        ("Scalar alpha=1", 1, "1"),
        ("str mode='a, (b'", "a, (b", '"a, (b"'),
        ("Tensor? bias=None", None, "None"),
    ],
)
def test_defaults(argument: str, default: object, printed: str) -> None:
    schema = LazyIrSchema.parse(f"mine::op(Tensor x, {argument}, *, bool last) -> Tensor")
    found = schema.arguments[1].default
    assert (found, type(found)) == (default, type(default))
    assert f"={printed}, *, bool last) -> Tensor" in str(schema)
    assert schema.arguments[2].default is NO_DEFAULT
    assert LazyIrSchema.parse(str(schema)) == schema


@pytest.mark.parametrize(
    "text",
    [
        "",
        "add",
        "add(Tensor self)",
        "add(Tensor self -> Tensor",
        "add(Tensor) -> Tensor",
        "add(Tensor self, ) Tensor",
        "a b(Tensor self) -> Tensor",
        "add(Tensor self=oops) -> Tensor",
        "add(Tensor self) -> Tensor [colour=red]",
        "add(Tensor self) -> Tensor [composite=maybe]",
    ],
)
def test_what_is_no_schema_is_refused(text: str) -> None:
    with pytest.raises(SchemaError):
        LazyIrSchema.parse(text)
