"""Ops that write, ops on lists, and ops with a decomposition: a graph in, a graph out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from torpor import metrics
from torpor.backends import decompositions
from torpor.ir.graph import Graph
from torpor.passes.expand import Vocabulary, expanded
from torpor.passes.functionalize import single_of, twin_of
from torpor.text.printer import print_graph
from torpor.text.torch_parser import parse
from torpor.text.verify import verify

aten = torch.ops.aten
HEAD = "graph(%0 = leaf 0 : float32[4] @cpu, %1 = leaf 1 : float32[4] @cpu) {\n"


def after(body: str, table: dict[str, Callable[..., Any]] | None = None) -> Graph:
    graph = parse(f"{HEAD}{body}\n}}")
    made = expanded(graph, Vocabulary("acme", lambda device: device, table or {}, True))
    verify(made)
    assert [v.type for v in made.outputs] == [v.type for v in graph.outputs]
    return made


def ops_of(graph: Graph) -> list[str]:
    return [node.op.name for node in graph.nodes]


def test_an_op_that_writes_becomes_its_functional_twin() -> None:
    made = after("  %2 = aten.mul_.Tensor(%0, %1) : float32[4] @cpu\n  return %2")
    assert ops_of(made) == ["aten.mul.Tensor"]


def test_a_copy_does_not_need_what_was_there() -> None:
    made = after("  %2 = aten.copy_.default(%0, %1, False) : float32[4] @cpu\n  return %2")
    assert ops_of(made) == ["aten.clone.default"]
    assert made.nodes[0].operands == (made.inputs[1],)


def test_what_is_written_keeps_its_dtype() -> None:
    graph = parse(
        "graph(%0 = leaf 0 : float32[4] @cpu, %1 = leaf 1 : float64[4] @cpu) {\n"
        "  %2 = aten.add_.Tensor(%0, %1, 1) : float32[4] @cpu\n  return %2\n}"
    )
    made = expanded(graph, Vocabulary("acme", lambda device: device, {}, True))
    assert ops_of(made) == ["aten.add.Tensor", "aten._to_copy.default"]
    assert made.outputs[0].type.dtype is torch.float32


def test_an_op_on_lists_becomes_one_op_for_each_tensor() -> None:
    made = after(
        "  %2, %3 = aten._foreach_addcdiv_.ScalarList([%0, %1], [%1, %0], [%0, %1], [0.5, 2.0])"
        " : float32[4] @cpu, float32[4] @cpu\n  return %2, %3"
    )
    assert ops_of(made) == ["aten.addcdiv.default"] * 2
    assert [node.args[3] for node in made.nodes] == [0.5, 2.0]


@pytest.mark.parametrize(
    ("op", "single"),
    [
        (aten._foreach_add.List, aten.add.Tensor),
        (aten._foreach_add_.Scalar, aten.add.Scalar),
        (aten._foreach_mul.ScalarList, aten.mul.Scalar),
        (aten._foreach_norm.Scalar, aten.linalg_vector_norm.default),
        (aten._foreach_maximum_.Scalar, aten.clamp_min.default),
        (aten._foreach_pow.ScalarAndTensor, aten.pow.Scalar),
        (aten._foreach_copy_.default, aten.copy.default),
        (aten._foreach_lerp_.Scalar, aten.lerp.Scalar),
    ],
    ids=str,
)
def test_the_op_on_one_tensor_is_found(op: Any, single: Any) -> None:
    found = single_of(op)
    assert found is not None
    assert found[0] is single


def test_an_op_without_a_twin_has_none() -> None:
    assert twin_of(aten.native_batch_norm.default) is None
    assert twin_of(aten.add_.Tensor) is aten.add.Tensor
    assert twin_of(aten.sin.out) is aten.sin.default


BODY = "  %2 = aten.gelu.default(%0) : float32[4] @cpu\n  return %2"


def test_a_decomposition_takes_an_op_apart_and_is_counted() -> None:
    metrics.reset()
    table = {"aten.gelu.default": lambda x, approximate="none": x * torch.sigmoid(x)}
    assert ops_of(after(BODY, table)) == ["aten.sigmoid.default", "aten.mul.Tensor"]
    assert metrics.counters()["decomposed::aten.gelu.default"] == 1


@pytest.mark.parametrize(
    "refusing",
    [
        lambda x, approximate="none": NotImplemented,
        lambda x, approximate="none": x.double(),
        lambda x, approximate="none": x * x.sum().item(),
        lambda x, approximate="none": torch.ops.aten.gelu.default(x),
    ],
    ids=["not implemented", "another type", "asks for numbers", "leads back to itself"],
)
def test_an_op_stays_whole_where_its_decomposition_is_refused(refusing: Any) -> None:
    metrics.reset()
    made = after(BODY, {"aten.gelu.default": refusing})
    assert ops_of(made) == ["aten.gelu.default"]
    assert metrics.counters()["decomposition_refused::aten.gelu.default"] >= 1
    assert "aten.gelu" in print_graph(made)


def test_a_decomposition_may_make_what_was_recorded_too() -> None:
    body = (
        "  %2 = aten.sigmoid.default(%0) : float32[4] @cpu\n"
        "  %3 = aten.gelu.default(%0) : float32[4] @cpu\n  return %2, %3"
    )
    table = {"aten.gelu.default": lambda x, approximate="none": torch.sigmoid(x)}
    assert ops_of(after(body, table)) == ["aten.sigmoid.default"] * 2


def test_what_is_lowered_is_not_in_the_table() -> None:
    table = decompositions.core(["aten.silu.default"])
    assert "aten.silu.default" not in table
    assert "aten.hardswish.default" in table
    assert "aten.mul.Tensor" not in table  # a core op


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_fused_attention_is_what_its_kernel_is(
    dtype: torch.dtype, is_causal: bool, masked: bool
) -> None:
    if is_causal and masked:
        return  # the kernel refuses both
    torch.manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 5, 8, dtype=dtype) for _ in range(4))
    mask = torch.randn(5, 5, dtype=dtype) if masked else None
    table = decompositions.core()
    name = "_scaled_dot_product_flash_attention_for_cpu"
    forward, backward = (getattr(aten, f"{name}{part}").default for part in ("", "_backward"))
    expected = forward(q, k, v, 0.0, is_causal, attn_mask=mask)
    got = table[str(forward)](q, k, v, 0.0, is_causal, attn_mask=mask)
    limit = 1e-5 if dtype is torch.float32 else 0.05
    limits = {"rtol": limit, "atol": limit}
    for one, other in zip(got, expected, strict=True):
        torch.testing.assert_close(one, other, **limits)
    saved = (grad, q, k, v, *expected, 0.0, is_causal)
    for one, other in zip(
        table[str(backward)](*saved, attn_mask=mask),
        backward(*saved, attn_mask=mask),
        strict=True,
    ):
        torch.testing.assert_close(one, other, **limits)
