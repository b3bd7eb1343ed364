"""When two tensors are the same: within the tolerance of their dtype, or bit for bit."""

from __future__ import annotations

from typing import Any

import torch

from torpor.backends.equality import TOLERANCES, same_bits

WIDER = {
    torch.float16: torch.float64,
    torch.bfloat16: torch.float64,
    torch.float32: torch.float64,
    torch.complex32: torch.complex128,
    torch.complex64: torch.complex128,
}
"""The wider dtype in which a result is computed to judge its precision."""

_FURTHER = 2.0  # how many times eager's own error is allowed
_SAME_THING = 1e-2  # beyond this relative error of eager's, precision is no excuse


def difference(got: Any, expected: Any, exact: bool = False) -> str | None:
    """A description of how `got` differs from eager's result; None if it does not."""
    if not isinstance(expected, torch.Tensor):
        return _number_difference(got, expected, exact)
    if not isinstance(got, torch.Tensor):
        return f"{type(got).__name__} in the place of a tensor"
    for name in ("dtype", "shape", "layout"):
        one, other = getattr(got, name), getattr(expected, name)
        if one != other:
            return f"{name} {one} in the place of {other}"
    return _value_difference(got, expected, exact)


def _number_difference(got: Any, expected: Any, exact: bool) -> str | None:
    if type(got) is not type(expected):
        return f"{type(got).__name__} in the place of {type(expected).__name__}"
    if isinstance(expected, float | complex):
        kind = torch.complex128 if isinstance(expected, complex) else torch.float64
        one, other = (torch.tensor(number, dtype=kind) for number in (got, expected))
        return _value_difference(one, other, exact)
    return None if got == expected else f"{got!r} in the place of {expected!r}"


def type_difference(got: torch.Tensor, expected: torch.Tensor) -> str | None:
    """How the type of `got` differs from eager's, strides included; None if it does not."""
    for name in ("dtype", "shape", "layout", "requires_grad"):
        one, other = getattr(got, name), getattr(expected, name)
        if one != other:
            return f"{name} {one} in the place of {other}"
    strided = expected.layout is torch.strided and expected.numel() > 0
    if strided and got.stride() != expected.stride():
        return f"strides {got.stride()} in the place of {expected.stride()}"
    return None


def _value_difference(got: torch.Tensor, expected: torch.Tensor, exact: bool) -> str | None:
    got, expected = _dense(got), _dense(expected)
    if exact or expected.dtype not in TOLERANCES:
        return None if same_bits(got, expected) else _describe(got, expected)
    if expected.numel() == 0:
        return None
    rtol, atol = TOLERANCES[expected.dtype]
    wide = torch.complex128 if expected.is_complex() else torch.float64
    one, other = got.to(wide), expected.to(wide)
    finite = other.abs().nan_to_num(0.0, 0.0, 0.0).max().item()
    close = torch.isclose(one, other, rtol, atol * max(1.0, finite), equal_nan=True)
    return None if bool(close.all()) else _describe(got, expected)


def no_further(got: Any, expected: torch.Tensor, judged: Any) -> bool:
    """Whether `got` is hardly further from `judged`, computed in a wider dtype, than `expected`.

    A gradient that is zero except for rounding errors has no digits on which kernels could agree.
    """
    if any(getattr(tensor, "shape", None) != expected.shape for tensor in (got, judged)):
        return False
    if got.dtype != expected.dtype or not expected.numel():
        return False
    wide = torch.complex128 if judged.is_complex() else torch.float64
    one, other, best = (_dense(tensor).to(wide) for tensor in (got, expected, judged))
    scale = max(1.0, best.abs().nan_to_num(0.0, 0.0, 0.0).max().item())
    error, eagers = ((tensor - best).abs().max().item() for tensor in (one, other))
    return error <= _FURTHER * eagers <= _FURTHER * _SAME_THING * scale


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    dense = tensor.detach().cpu().resolve_conj().resolve_neg()
    return dense if dense.layout is torch.strided else dense.to_dense()


def _describe(got: torch.Tensor, expected: torch.Tensor) -> str:
    if got.dtype.is_complex or got.dtype.is_floating_point:
        wide = torch.complex128 if got.dtype.is_complex else torch.float64
        gap = (got.to(wide) - expected.to(wide)).abs().nan_to_num(nan=float("inf")).max().item()
        return f"values differ by up to {gap:.3g}: {_short(got)} in the place of {_short(expected)}"
    return f"values differ: {_short(got)} in the place of {_short(expected)}"


def _short(tensor: torch.Tensor) -> str:
    numbers = tensor.flatten()[:6].tolist()
    more = ", ..." if tensor.numel() > 6 else ""
    return f"[{', '.join(f'{n:.6g}' if isinstance(n, float) else str(n) for n in numbers)}{more}]"
