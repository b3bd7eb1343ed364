"""Signatures: what is derived of a schema, and the code that is specialised from it."""

from __future__ import annotations

import ast
from typing import Any

import pytest
import torch

from torpor.codegen import own_ops
from torpor.codegen.torch_schemas import target_of
from torpor.native.recorder import can_be_native
from torpor.ops.signature import Extra, Make, Result, signature_of
from torpor.ops.spec import spec_of
from torpor.specialize.recorders import SPECIALISE_AFTER, make_recorder, specialised
from torpor.specialize.source import recorder_code, source
from torpor.trace.recorder import recording_of

aten = torch.ops.aten
FRESH, VIEW, SELF = (Result(make, False, 0) for make in (Make.FRESH, Make.VIEW, Make.ARGUMENT))


@pytest.mark.parametrize(
    ("op", "results", "written"),
    [
        (aten.add.Tensor, [FRESH], []),
        (aten.max.dim, [FRESH, FRESH], []),
        (aten._foreach_add.Scalar, [Result(Make.FRESH, True, 0)], []),
        (aten.view.default, [VIEW], []),
        (aten.detach.default, [Result(Make.ALIAS, False, 0)], []),
        (aten.split.Tensor, [Result(Make.VIEW, True, 0)], []),
        (aten.add_.Tensor, [SELF], [(0, False, False, True)]),
        (aten.index_add_.default, [SELF], [(0, False, False, False)]),
        (aten._foreach_add_.Scalar, [], [(0, True, False, True)]),
        (aten.add.out, [Result(Make.ARGUMENT, False, 3)], [(3, False, True, False)]),
        (aten.native_batch_norm.default, [FRESH] * 3,
         [(3, False, False, True), (4, False, False, True)]),
    ],
)  # fmt: skip
def test_what_becomes_of_outputs(op: Any, results: list[Result], written: list[Any]) -> None:
    signature = signature_of(spec_of(op))
    assert list(signature.results) == results
    found = [(w.argument, w.is_list, w.is_out, w.may_repeat) for w in signature.written]
    assert found == written


@pytest.mark.parametrize(
    ("op", "overlaps", "apart"),
    [
        (aten.add.Tensor, (), ()),
        (aten.add_.Tensor, ((0, 1),), ()),
        (aten.copy_.default, (), ()),
        (aten.cat.out, ((2, 0),), ()),
        (aten.max.dim_max, ((3, 0), (3, 4), (4, 0)), ()),
        (aten._foreach_add_.List, (), ((0, 1),)),
    ],
)
def test_what_must_not_share_memory(op: Any, overlaps: Any, apart: Any) -> None:
    signature = signature_of(spec_of(op))
    assert (signature.overlaps, signature.apart) == (overlaps, apart)


def test_lengths_among_the_results() -> None:
    spec = spec_of(aten._scaled_dot_product_flash_attention.default)
    results = signature_of(spec, lengths=(0, 1)).results
    assert results[4:6] == (Result(Make.LENGTH, False, 0), Result(Make.LENGTH, False, 1))
    assert {result.make for result in results} == {Make.FRESH, Make.LENGTH}
    assert can_be_native(recording_of(spec, lengths=(0, 1)))
    assert not can_be_native(recording_of(spec))  # whose lengths they are is not known


def test_a_signature_is_data() -> None:
    spec = spec_of(aten.linear.default)
    extra = Extra(grad_mode=True, requires_grad=(0, 1))
    assert signature_of(spec, extra) == signature_of(spec, extra)
    assert signature_of(spec) != signature_of(spec, extra)
    assert not Extra()
    assert not can_be_native(recording_of(spec, extra=Extra(draw=True)))


@pytest.mark.parametrize(
    ("extra", "last"),
    [
        (Extra(), "k2"),
        (Extra(draw=True), "draw()"),
        (Extra(grad_mode=True, requires_grad=(0, 1)),
         "(grad_mode(), a0.requires_grad, a1.requires_grad)"),
        (Extra(requires_grad=(2,)), "(a2.requires_grad,)"),
    ],
)  # fmt: skip
def test_what_ends_a_key(extra: Extra, last: str) -> None:
    text = source(signature_of(spec_of(aten.linear.default), extra))
    (key,) = [line.strip() for line in text.splitlines() if line.startswith("        key = ")]
    assert key.endswith(f", {last})")


def test_keyword_arguments_are_not_named_like_what_recorders_use() -> None:
    for schema in own_ops.recorded():
        (function,) = ast.parse(source(signature_of(spec_of(target_of(schema))))).body
        assert isinstance(function, ast.FunctionDef)
        keywords = {argument.arg for argument in function.args.kwonlyargs}
        names = [node for node in ast.walk(function) if isinstance(node, ast.Name)]
        stored = {name.id for name in names if isinstance(name.ctx, ast.Store)}
        assert keywords & stored <= {"device"}, schema.name  # which gets its number


def test_ops_of_one_shape_have_code_and_defaults_of_their_own() -> None:
    add, sub = (specialised(spec_of(op)) for op in (aten.add.Tensor, aten.sub.Tensor))
    assert add.__code__.co_code == sub.__code__.co_code
    assert add.__code__ is not sub.__code__
    assert add.__kwdefaults__ == {"alpha": 1}
    norm = specialised(spec_of(aten.native_layer_norm.default))
    softmax = specialised(spec_of(aten.linalg_vector_norm.default))
    assert norm.__defaults__ == ()
    assert softmax.__defaults__ == (2, None, False)


def test_code_names_its_op() -> None:
    code = recorder_code(signature_of(spec_of(aten.add.Tensor)))
    assert code.co_qualname == "record aten.add.Tensor"
    assert code.co_filename == "<torpor recorder>"  # no line of the user's: observe.site


def test_an_op_that_is_called_often_gets_code_of_its_own() -> None:
    recorder = make_recorder(spec_of(aten.add.Tensor), nodes={}, calls=[0])
    first = recorder.__code__
    x = torch.ones(3, device="lazy")
    results = [recorder(x, x, alpha=2) for _ in range(SPECIALISE_AFTER - 1)]
    assert recorder.__code__ is first
    results += [recorder(x, x, alpha=2) for _ in range(3)]
    assert recorder.__code__.co_qualname == "record aten.add.Tensor"
    assert recorder.recording.calls == [SPECIALISE_AFTER + 2]  # type: ignore[attr-defined]  # set there
    assert all(result.tolist() == [3.0] * 3 for result in results)
