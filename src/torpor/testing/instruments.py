"""Ops that make execution observable: one counts its runs, one fails. Only running calls them."""

from __future__ import annotations

import itertools
import linecache
from typing import Any

import pytest
import torch

from torpor.errors import CompileError
from torpor.testing.kit import Kit

_runs: list[torch.Size] = []
_programs = itertools.count(1)


@torch.library.custom_op("torpor_kit::counted", mutates_args=())
def _counted(x: torch.Tensor) -> torch.Tensor:
    _runs.append(x.shape)
    return x.clone()


@torch.library.custom_op("torpor_kit::failing", mutates_args=())
def _failing(x: torch.Tensor) -> torch.Tensor:
    raise ArithmeticError("the kernel failed")


for _op in (_counted, _failing):
    _op.register_fake(lambda x: torch.empty_like(x))


def counted(x: torch.Tensor) -> torch.Tensor:
    """A copy of `x`; each run is counted."""
    return torch.ops.torpor_kit.counted(x)  # type: ignore[no-any-return]  # an op


def failing(x: torch.Tensor) -> torch.Tensor:
    """Raises ArithmeticError when run."""
    return torch.ops.torpor_kit.failing(x)  # type: ignore[no-any-return]  # an op


def runs() -> int:
    """How often `counted` has run since `need_custom_ops`."""
    return len(_runs)


def need_custom_ops(kit: Kit) -> None:
    """Skip the test if the backend compiles only torch's own ops; reset the count of runs."""
    try:
        kit.compiled(counted(kit.put(torch.ones(1))))
    except CompileError:
        pytest.skip("the backend runs no custom ops, which make this visible")
    kit.settle()
    _runs.clear()


def user_program(source: str, **names: Any) -> tuple[dict[str, Any], str]:
    """Execute `source` as a user's program; returns its globals and its file name.

    Needed because lines of the kit count as torpor's, which are never reported as the user's.
    """
    file = f"program{next(_programs)}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return names, file
