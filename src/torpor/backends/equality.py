"""When two tensors agree: within the tolerance of their dtype, or bit for bit."""

from __future__ import annotations

from typing import Final

import torch

TOLERANCES: Final[dict[torch.dtype, tuple[float, float]]] = {
    torch.float64: (1e-9, 1e-10),
    torch.complex128: (1e-9, 1e-10),
    torch.float32: (1e-4, 1e-5),
    torch.complex64: (1e-4, 1e-5),
    torch.float16: (4e-3, 1e-3),
    torch.bfloat16: (3e-2, 1e-2),
    torch.complex32: (4e-3, 1e-3),
}
"""Relative and absolute tolerance; other dtypes must be equal.

The absolute one is scaled by the tensor's largest magnitude, if that is above 1: reordering a sum
changes it in proportion to its terms.
"""

_BITS: Final = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    """Equal bit for bit, including the sign of zero; any NaN equals any NaN."""
    left, right = (t.detach().cpu().resolve_conj().resolve_neg() for t in (left, right))
    if left.shape != right.shape or left.dtype != right.dtype:
        return False
    if left.is_complex():
        left, right = torch.view_as_real(left), torch.view_as_real(right)
    left, right = left.contiguous(), right.contiguous()
    if not left.is_floating_point():
        return torch.equal(left, right)
    bits = _BITS[left.element_size()]
    both_nan = left.isnan() & right.isnan()
    return bool(((left.view(bits) == right.view(bits)) | both_nan).all())
