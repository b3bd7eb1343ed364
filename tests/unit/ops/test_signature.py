"""Signatures: what is derived of a schema, and how a key follows from it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from torpor.execute.storage import TRACE
from torpor.native.attach import can_be_native
from torpor.ops.signature import Extra, Make, Result, signature_of
from torpor.ops.spec import spec_of
from torpor.trace.recorder import key_of_call, recording_of
from torpor.trace.values import value_of

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
        (Extra(), ()),
        (Extra(grad_mode=True, requires_grad=(0, 1)), ((True, False, True),)),
        (Extra(requires_grad=(1,)), ((True,),)),
        (Extra(requires_grad=(1,), draw=True), ((True,), 7)),
    ],
)
def test_what_ends_a_key(
    extra: Extra, last: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.ones(2, 2).to("lazy")
    weight = torch.ones(2, 2).to("lazy").requires_grad_()
    monkeypatch.setattr(type(TRACE), "draw", lambda trace: 7)
    key = key_of_call(recording_of(spec_of(aten.linear.default), extra=extra), [x, weight, None])
    assert key == (value_of(x), value_of(weight), None, *last)
