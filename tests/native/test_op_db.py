"""Every entry of torch's operator table: what is recorded natively is what Python records."""

from __future__ import annotations

import warnings
from itertools import islice
from typing import Any

import pytest
import torch

import torpor
from tests.native.recording import assert_same, run
from torpor import _torch
from torpor.testing.operators import UNINITIALISED, entries

RANDOM = frozenset(
    {"nn.functional.scaled_dot_product_attention", "nn.functional.multi_head_attention_forward"}
)
SAMPLES = 2


def lazily(tree: Any) -> Any:
    """`tree` with lazy tensors; one that needs a gradient is a leaf again."""

    def lazy(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or leaf.layout is not torch.strided:
            return leaf
        made = torpor.lazy(leaf.detach())
        return made.requires_grad_(leaf.requires_grad)

    torpor.sync(wait=True)  # a view of a leaf is a node: of the same leaf in every run
    return _torch.tree_map(lazy, tree)


def dtype_of(entry: Any) -> torch.dtype:
    supported = entry.supported_dtypes("cpu")
    return torch.float32 if torch.float32 in supported else sorted(supported, key=str)[0]


def samples_of(entry: Any) -> list[Any]:
    dtype = dtype_of(entry)
    grad = entry.supports_autograd and dtype.is_floating_point
    torch.manual_seed(0)
    return list(islice(entry.sample_inputs("cpu", dtype, requires_grad=grad), SAMPLES))


def forward_and_backward(entry: Any, sample: Any) -> Any:
    """The entry on a sample and, where it has one, its gradient."""

    def program(first: Any, args: Any, kwargs: Any) -> Any:
        torch.manual_seed(0)
        results = entry(first, *args, **kwargs)
        leaves = _torch.tree_leaves(results)
        wanted = [t for t in leaves if isinstance(t, torch.Tensor) and t.requires_grad]
        total = sum((t.abs().sum() for t in wanted), torch.zeros(()))
        if wanted:
            total.backward()
        inputs = _torch.tree_leaves((first, args, kwargs))
        grads = [t.grad for t in inputs if isinstance(t, torch.Tensor) and t.is_leaf]
        return results, grads

    return program


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(entries()))
def test_the_same_is_recorded(name: str, library: Any) -> None:
    entry = entries()[name]
    if not entry.supported_dtypes("cpu"):
        pytest.skip("it is not for the CPU")
    if entry.name in RANDOM or entry.name in UNINITIALISED:
        pytest.skip("its results are not the same twice")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for sample in samples_of(entry):
            program = forward_and_backward(entry, sample)
            arguments = sample.input, sample.args, sample.kwargs
            library.switch(False)
            for _ in range(2):
                expected = run(program, lazily(arguments))
            library.switch(True)
            assert_same(expected, run(program, lazily(arguments)))
