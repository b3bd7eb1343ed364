"""When a lazy run of a program found what the eager one found.

On a backend with eager's kernels: bit for bit. On one with kernels of its own: within what the
dtype can hold (`torpor.backends.equality`), times `GROWTH`, since a rounding error in the first
step is a larger one after twenty. What is no float is equal everywhere: tokens, counts, states of
generators.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy
import torch

from torpor.backends.equality import TOLERANCES, same_bits

GROWTH = 10.0


def differences(expected: Any, got: Any, exact: bool, where: str = "result") -> list[str]:
    """All that differs, in words; an empty list: the runs agree."""
    if type(expected) is not type(got):
        return [f"{where}: {type(got).__name__} in the place of {type(expected).__name__}"]
    if isinstance(expected, torch.Tensor):
        return _tensor(expected, got, exact, where)
    if isinstance(expected, numpy.ndarray):
        return _tensor(torch.tensor(expected), torch.tensor(got), exact, where)
    if isinstance(expected, Mapping):
        return _mapping(expected, got, exact, where)
    if isinstance(expected, (list, tuple)):
        return _sequence(expected, got, exact, where)
    if isinstance(expected, float):
        return _number(expected, got, exact, where)
    return [] if expected == got else [f"{where}: {got!r} in the place of {expected!r}"]


def _mapping(expected: Mapping[Any, Any], got: Any, exact: bool, where: str) -> list[str]:
    if list(expected) != list(got):
        return [f"{where}: names {list(got)} in the place of {list(expected)}"]
    return [
        line
        for name in expected
        for line in differences(expected[name], got[name], exact, f"{where}[{name!r}]")
    ]


def _sequence(expected: Any, got: Any, exact: bool, where: str) -> list[str]:
    if len(expected) != len(got):
        return [f"{where}: {len(got)} entries in the place of {len(expected)}"]
    return [
        line
        for place, (one, other) in enumerate(zip(expected, got, strict=True))
        for line in differences(one, other, exact, f"{where}[{place}]")
    ]


def _number(expected: float, got: float, exact: bool, where: str) -> list[str]:
    relative, absolute = (GROWTH * each for each in TOLERANCES[torch.float32])
    same = math.isnan(expected) and math.isnan(got)
    if exact:
        same |= expected.hex() == got.hex()
    else:
        same |= math.isclose(expected, got, rel_tol=relative, abs_tol=absolute)
    return [] if same else [f"{where}: {got!r} in the place of {expected!r}"]


def _tensor(expected: torch.Tensor, got: torch.Tensor, exact: bool, where: str) -> list[str]:
    for name in ("shape", "dtype", "requires_grad"):
        one, other = getattr(expected, name), getattr(got, name)
        if one != other:
            return [f"{where}: {name} {other} in the place of {one}"]
    if expected.numel() and expected.stride() != got.stride():
        return [f"{where}: strides {got.stride()} in the place of {expected.stride()}"]
    if exact or expected.dtype not in TOLERANCES:
        return [] if same_bits(expected, got) else [_gap(expected, got, where)]
    return [] if _close(expected.detach(), got.detach()) else [_gap(expected, got, where)]


def _close(expected: torch.Tensor, got: torch.Tensor) -> bool:
    relative, absolute = (GROWTH * each for each in TOLERANCES[expected.dtype])
    wide = torch.complex128 if expected.is_complex() else torch.float64
    largest = (
        expected.abs().double().nan_to_num(0.0, 0.0, 0.0).max().item() if expected.numel() else 0
    )
    return torch.allclose(
        got.to(wide), expected.to(wide), relative, absolute * max(1.0, largest), equal_nan=True
    )


def _gap(expected: torch.Tensor, got: torch.Tensor, where: str) -> str:
    gap = (expected.detach().double() - got.detach().double()).abs()
    return (
        f"{where}: {int((gap != 0).sum())} of {gap.numel()} differ, by up to {gap.max():.3g}: "
        f"{got.flatten()[:4].tolist()} in the place of {expected.flatten()[:4].tolist()}"
    )
