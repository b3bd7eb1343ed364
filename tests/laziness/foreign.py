"""What the tests of other parts of torch share: their warnings, and comparison with eager."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils import _pytree as pytree

import torpor
from torpor.errors import TorporWarning
from torpor.observe.site import WARNED


def plain(thing: Any) -> Any:
    """As it is, for eager."""
    return thing


@contextmanager
def warnings_caught() -> Iterator[list[str]]:
    """The warnings of torpor's inside, as in a process that was told of nothing before."""
    WARNED.clear()
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    ours = [w for w in caught if issubclass(w.category, TorporWarning)]
    for warning in ours:
        assert not warning.filename.startswith(torch.__path__[0])  # the line is the user's
        assert "/torpor/" not in warning.filename.replace("\\", "/").rpartition("/src/")[2]
    texts += [str(w.message) for w in ours]


def same(one: Any, other: Any, exact: bool) -> None:
    """Both are made of the same numbers."""
    left, right = pytree.tree_leaves(one), pytree.tree_leaves(other)
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        if not isinstance(a, torch.Tensor):
            assert a == b
            continue
        a, b = (torpor.eager(t.detach()) for t in (a, b))
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        torch.testing.assert_close(a, b, rtol=0 if exact else None, atol=0 if exact else None)
