"""What a program records, to be compared: nodes by identity, tensors in all they are, counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import torpor
from torpor import _torch, metrics
from torpor.trace.tensor import InThisTrace, LazyTensor
from torpor.trace.values import value_of

Program = Callable[..., Any]


def counters() -> dict[Any, int]:
    return {name: cell[0] for name, cell in metrics._cells.items()}


def facts(tensor: Any) -> Any:
    """What a lazy tensor is; its values by identity."""
    if not isinstance(tensor, LazyTensor):
        is_tensor = isinstance(tensor, torch.Tensor)
        return (tensor.shape, tensor.dtype) if is_tensor else tensor
    storage, view = tensor._lazy_storage, tensor._lazy_view
    return (
        value_of(tensor), storage.value, storage.type, storage.listed, storage.data is None,
        view and (view.node, view.index, view.value, _base(view.base), view.parent is None),
        tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype, tensor.device,
        tensor.requires_grad, tensor.is_leaf, tensor.is_inference(), tensor.is_conj(),
        _torch.dispatch_keys(tensor), sorted(vars(tensor)), tensor._version
        if not tensor.is_inference() else None,
    )  # fmt: skip


def _base(base: Any) -> Any:
    """What a view was made of; the step in which it was is another each time."""
    return ("in this trace", base.root) if type(base) is InThisTrace else base


def run(program: Program, arguments: list[Any]) -> tuple[Any, ...]:
    """What a program records, counts and computes; the error it raises."""
    torpor.sync(wait=True)
    before = counters()
    error = None
    results: list[Any] = []
    try:
        results = _torch.tree_leaves((program(*arguments), arguments))
    except Exception as raised:
        error = (type(raised), str(raised))
    recorded = [facts(result) for result in results]
    after = counters()
    counted = {name: after[name] - before.get(name, 0) for name in after}
    numbers = [torpor.eager(r) if isinstance(r, LazyTensor) else r for r in results]
    return recorded, {name: n for name, n in counted.items() if n}, numbers, error


def assert_same(expected: tuple[Any, ...], found: tuple[Any, ...]) -> None:
    """Two runs of a program have recorded, counted and computed the same."""
    for one, other in zip(expected[0], found[0], strict=True):
        assert one == other
    assert expected[1] == found[1]
    for one, other in zip(expected[2], found[2], strict=True):
        if isinstance(one, torch.Tensor):
            torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
        else:
            assert one == other
    assert expected[3] == found[3]
