"""Ops that make running visible: one counts its runs, one fails. Only running graphs call them."""

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
    """A copy of `x`; every run of it is counted."""
    return torch.ops.torpor_kit.counted(x)  # type: ignore[no-any-return]  # an op


def failing(x: torch.Tensor) -> torch.Tensor:
    """Raises ArithmeticError when it runs."""
    return torch.ops.torpor_kit.failing(x)  # type: ignore[no-any-return]  # an op


def runs() -> int:
    """How often `counted` ran since `need_custom_ops`."""
    return len(_runs)


def need_custom_ops(kit: Kit) -> None:
    """Skip the test on a backend that compiles no ops but torch's own; forget earlier runs."""
    try:
        kit.compiled(counted(kit.put(torch.ones(1))))
    except CompileError:
        pytest.skip("the backend runs no custom ops, which make this visible")
    kit.settle()
    _runs.clear()


def user_program(source: str, **names: Any) -> tuple[dict[str, Any], str]:
    """Run `source` as a program of a user's: its names afterwards, and its file name.

    The kit's own lines are torpor's, and are never shown as the user's.
    """
    file = f"program{next(_programs)}.py"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    exec(compile(source, file, "exec"), names)
    return names, file
