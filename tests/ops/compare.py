"""What two runs of one op may not differ in."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests import backend_under_test
from tests.ops.subjects import Subject, carried
from torpor.testing.comparison import difference


@dataclass(frozen=True)
class Difference:
    where: str
    kind: str
    detail: str


def leaf_difference(
    where: str, expected: Any, actual: Any, subject: Subject, *, values: bool = True
) -> Difference | None:
    """The first difference between a leaf of eager's result and the subject's, or None."""
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        return _tensor_difference(where, expected, actual, subject, values)
    if type(expected) is not type(actual):
        return Difference(where, "type", f"{type(expected)} became {type(actual)}")
    if values and expected != actual and not _same_number(expected, actual):
        return Difference(where, "value", f"{expected!r} became {actual!r}")
    return None


def _same_number(expected: Any, actual: Any) -> bool:
    if not isinstance(expected, (float, complex)):
        return False
    if not backend_under_test.BIT_EXACT:
        return difference(actual, expected) is None
    return expected != expected and actual != actual


def _tensor_difference(
    where: str, expected: Tensor, actual: Tensor, subject: Subject, values: bool
) -> Difference | None:
    kind = _metadata_difference(expected, actual, subject)
    if kind is not None:
        return Difference(where, kind, f"{_describe(expected)} became {_describe(actual)}")
    if not values and expected.layout == torch.strided:
        return None
    plain = subject.plain(actual)
    if (plain.shape, plain.dtype, plain.layout) != (
        expected.shape,
        expected.dtype,
        expected.layout,
    ):
        return Difference(
            where, "materialised", f"{_describe(expected)} read as {_describe(plain)}"
        )
    if equal(expected.detach(), plain) or _close_enough(expected, plain):
        return None
    return Difference(where, "values", _describe_values(expected.detach(), plain))


def _close_enough(expected: Tensor, actual: Tensor) -> bool:
    return not backend_under_test.BIT_EXACT and difference(actual, expected) is None


def _metadata_difference(expected: Tensor, actual: Tensor, subject: Subject) -> str | None:
    if expected.dtype != actual.dtype:
        return "dtype"
    if expected.shape != actual.shape:
        return "shape"
    if expected.layout != actual.layout:
        return "layout"
    device = subject.device(expected.device) if carried(expected) else expected.device
    if torch.device(device).type != actual.device.type:
        return "device"
    if expected.requires_grad != actual.requires_grad:
        return "requires_grad"
    if expected.layout == torch.strided:
        if expected.stride() != actual.stride():
            return _stride_kind(expected, actual)
        if expected.storage_offset() != actual.storage_offset():
            return "storage_offset"
        if (expected.is_conj(), expected.is_neg()) != (actual.is_conj(), actual.is_neg()):
            return "conj or neg bit"
    return None if subject.owns(actual) else "not lazy"


def _stride_kind(expected: Tensor, actual: Tensor) -> str:
    significant = any(
        size > 1 and a != b
        for size, a, b in zip(expected.shape, expected.stride(), actual.stride(), strict=True)
    )
    return "strides" if significant else "strides of a dimension of size 1"


def equal(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, NaN equal to NaN (and, as `torch.equal` has it, 0.0 to -0.0)."""
    a, b = _dense(a), _dense(b)
    if torch.equal(a, b):
        return True
    if a.dtype.is_complex:
        a, b = torch.view_as_real(a), torch.view_as_real(b)
    if not a.dtype.is_floating_point or a.shape != b.shape:
        return False
    return bool(((a == b) | (a.isnan() & b.isnan())).all())


def distance(a: Tensor, b: Tensor) -> float:
    """The largest difference between two tensors; infinite where only one of them is NaN."""
    a, b = _dense(a), _dense(b)
    if a.shape != b.shape or a.dtype != b.dtype:
        return math.inf
    if equal(a, b):
        return 0.0
    wide = torch.complex128 if a.dtype.is_complex else torch.float64
    gap = (a.to(wide) - b.to(wide)).abs()
    same = (a == b) | (a.isnan() & b.isnan())
    return float(torch.where(same, 0.0, gap).nan_to_num(nan=math.inf, posinf=math.inf).max())


def _dense(tensor: Tensor) -> Tensor:
    dense = tensor.resolve_conj().resolve_neg()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    # torch.equal knows neither of these.
    if dense.dtype == torch.complex32:
        return torch.view_as_real(dense)
    return dense.view(torch.uint8) if "float8" in str(dense.dtype) else dense


def _describe(t: Tensor) -> str:
    if t.layout != torch.strided:
        return f"{t.dtype}{list(t.shape)} {t.layout} on {t.device}"
    text = f"{t.dtype}{list(t.shape)} strides {list(t.stride())} offset {t.storage_offset()}"
    grad = " requires_grad" if t.requires_grad else ""
    bits = "".join(name for name, on in ((" conj", t.is_conj()), (" neg", t.is_neg())) if on)
    return f"{text} on {t.device} {type(t).__name__}{grad}{bits}"


def _describe_values(expected: Tensor, actual: Tensor) -> str:
    a, b = _dense(expected).flatten(), _dense(actual).flatten()
    wrong = ~((a == b) | (a.isnan() & b.isnan()))
    first = int(wrong.nonzero()[0])
    return (
        f"{int(wrong.sum())} of {a.numel()} {a.dtype} elements, first at {first}: "
        f"{a[first].item()} became {b[first].item()}; largest difference {distance(a, b):.3g}"
    )
