"""Text that a compiled language model generates on lazy tensors is eager's."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import torpor
from tests.comparison import loads_jit_decompositions

transformers = pytest.importorskip("transformers")

pytestmark = loads_jit_decompositions

Put = Callable[[Any], Any]


def tiny() -> Any:
    torch.manual_seed(0)
    config = transformers.GPT2Config(vocab_size=40, n_positions=32, n_embd=8, n_layer=1, n_head=2)
    return transformers.GPT2LMHeadModel(config).eval()


def generated(model: Any, prompt: Tensor, **options: Any) -> Any:
    torch.manual_seed(1)
    return model.generate(
        prompt, max_new_tokens=3, pad_token_id=0, output_logits=True,
        return_dict_in_generate=True, **options,
    )  # fmt: skip


@pytest.mark.parametrize("sample", [False, True], ids=["greedy", "sampled"])
def test_what_a_compiled_model_generates_is_that_of_eager(sample: bool, put: Put) -> None:
    plain, prompt = tiny(), torch.arange(1, 9).view(2, 4)
    model = put(plain)
    model.forward = torch.compile(model.forward, backend="eager")
    for _ in range(2):
        result = generated(model, put(prompt), do_sample=sample)
        expected = generated(plain, prompt, do_sample=sample)
        assert torch.equal(torpor.eager(result.sequences).cpu(), expected.sequences)
        for one, other in zip(result.logits, expected.logits, strict=True):
            assert torch.equal(torpor.eager(one).cpu(), other)
    assert torpor.metrics.counters().get("CapturedRegions", 0)


@pytest.mark.parametrize(
    "options", [{"attn_mask": True}, {"enable_gqa": True}, {"is_causal": True}]
)
def test_compiled_attention_is_that_of_eager(options: dict[str, Any], put: Put) -> None:
    def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
        given = options | ({"attn_mask": mask} if "attn_mask" in options else {})
        return torch.nn.functional.scaled_dot_product_attention(query, key, value, **given)

    torch.manual_seed(0)
    plain = [*(torch.randn(2, 2, n, 4) for n in (3, 5, 5)), torch.rand(3, 5) > 0.3]
    result = torch.compile(attend, backend="eager")(*map(put, plain))
    assert torch.equal(torpor.eager(result).cpu(), attend(*plain))
