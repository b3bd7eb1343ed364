"""Products of matrices, factorisations and Fourier transforms."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.lax import linalg as lax_linalg
from jax.scipy import linalg as scipy_linalg

from torpor.backends.xla.lowerings.table import (
    NotLowered,
    cast,
    dims_of,
    dtype_of,
    lowers,
    lowers_all,
    shape_of,
)
from torpor.ir.node import Node


def _sum_of(x: Any, product: Any, beta: Any, alpha: Any) -> Any:
    """`beta * x + alpha * product`; a `beta` of 0 hides what is in `x`."""
    product = product if _is(alpha, 1) else product * cast(alpha, product.dtype)
    if _is(beta, 0):
        return product
    return product + (x if _is(beta, 1) else x * cast(beta, product.dtype))


def _is(number: Any, wanted: int) -> bool:
    return isinstance(number, (int, float)) and number == wanted


lowers_all(
    {
        "mm bmm mv matmul": jnp.matmul,
        "dot": jnp.dot,
        "vdot": lambda x, y: jnp.dot(jnp.conj(x), y),
        "linear": lambda x, w, b=None: jnp.matmul(x, w.T) + (0 if b is None else b),
        "addmm baddbmm addmv": lambda x, a, b, beta=1, alpha=1: _sum_of(
            x, jnp.matmul(a, b), beta, alpha
        ),
        "addbmm": lambda x, a, b, beta=1, alpha=1: _sum_of(x, jnp.matmul(a, b).sum(0), beta, alpha),
        "addr": lambda x, a, b, beta=1, alpha=1: _sum_of(x, jnp.outer(a, b), beta, alpha),
    },
    lambda function: lambda node, *args: function(*args),
)


@lowers("_grouped_mm.default")
def _grouped(
    node: Node, a: Any, b: Any, ends: Any = None, bias: Any = None, dtype: Any = None
) -> Any:
    """One product for each group of rows, of columns, or of what is summed over; `ends` says up to
    where each goes."""
    if bias is not None:
        raise NotLowered("grouped products with a bias")
    if ends is None:
        return jnp.matmul(a, b)
    counts = jnp.diff(ends, prepend=0)
    if a.ndim == 2 and b.ndim == 3:
        return jax.lax.ragged_dot(a, b, counts)
    if a.ndim == 3:
        return jax.lax.ragged_dot(b.T, a.mT, counts).T
    place = jnp.arange(b.shape[0])
    members = (place >= (ends - counts)[:, None]) & (place < ends[:, None])
    return jnp.matmul(jnp.where(members[:, None, :], a, 0), b)


@lowers("linalg_cross.default")
def _cross(node: Node, x: Any, y: Any, dim: int = -1) -> Any:
    x, y = jnp.broadcast_arrays(x, y)
    return jnp.cross(x, y, axis=dim)


@lowers("_trilinear.default")
def _trilinear(
    node: Node, a: Any, b: Any, c: Any, expand_a: Any, expand_b: Any, expand_c: Any, summed: Any,
    unroll: int = 1,
) -> Any:  # fmt: skip
    for dim in sorted(expand_a):
        a = jnp.expand_dims(a, dim)
    for dim in sorted(expand_b):
        b = jnp.expand_dims(b, dim)
    for dim in sorted(expand_c):
        c = jnp.expand_dims(c, dim)
    return jnp.sum(a * b * c, axis=tuple(summed))


@lowers("block_diag.default")
def _block_diag(node: Node, tensors: Any) -> Any:
    parts = [jnp.atleast_2d(cast(t, dtype_of(node))) for t in tensors]
    return scipy_linalg.block_diag(*parts)


# -- factorisations --------------------------------------------------------------------------------


def _turned(x: Any) -> Any:
    return jnp.conj(jnp.swapaxes(x, -1, -2))


def _no_error(node: Node, output: int) -> Any:
    return jnp.zeros(shape_of(node, output), jnp.int32)


@lowers("cholesky.default")
def _cholesky(node: Node, x: Any, upper: bool = False) -> Any:
    factor = jnp.linalg.cholesky(x, upper=upper, symmetrize_input=False)
    return factor


@lowers("linalg_cholesky_ex.default")
def _cholesky_ex(node: Node, x: Any, upper: bool = False, check: bool = False) -> Any:
    factor = jnp.linalg.cholesky(x, upper=upper, symmetrize_input=False)
    failed = jnp.any(jnp.isnan(factor), axis=(-1, -2))
    return factor, cast(failed, jnp.int32)


@lowers("cholesky_inverse.default")
def _cholesky_inverse(node: Node, x: Any, upper: bool = False) -> Any:
    eye = jnp.broadcast_to(jnp.eye(x.shape[-1], dtype=x.dtype), x.shape)
    return scipy_linalg.cho_solve((x, not upper), eye) if x.ndim == 2 else _cho_solve(x, eye, upper)


@lowers("cholesky_solve.default")
def _cholesky_solve(node: Node, b: Any, factor: Any, upper: bool = False) -> Any:
    batch = jnp.broadcast_shapes(b.shape[:-2], factor.shape[:-2])
    b = jnp.broadcast_to(b, (*batch, *b.shape[-2:]))
    return _cho_solve(jnp.broadcast_to(factor, (*batch, *factor.shape[-2:])), b, upper)


def _cho_solve(factor: Any, b: Any, upper: bool) -> Any:
    lower = not upper
    first = _triangular(factor, b, lower=lower, transpose=upper)
    return _triangular(factor, first, lower=lower, transpose=lower)


def _triangular(
    a: Any, b: Any, *, lower: bool, transpose: bool = False, left: bool = True, unit: bool = False
) -> Any:
    """The solution of `op(a) x = b`, or of `x op(a) = b`."""
    return lax_linalg.triangular_solve(
        a, b, left_side=left, lower=lower, transpose_a=transpose, conjugate_a=transpose,
        unit_diagonal=unit,
    )  # fmt: skip


def _batched(a: Any, b: Any) -> tuple[Any, Any]:
    batch = jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    return (
        jnp.broadcast_to(a, (*batch, *a.shape[-2:])),
        jnp.broadcast_to(b, (*batch, *b.shape[-2:])),
    )


@lowers("linalg_solve_triangular.default")
def _solve_triangular(
    node: Node, a: Any, b: Any, upper: bool, left: bool = True, unitriangular: bool = False
) -> Any:
    a, b = _batched(a, b)
    return _triangular(a, b, lower=not upper, left=left, unit=unitriangular)


@lowers("triangular_solve.default")
def _old_triangular_solve(
    node: Node, b: Any, a: Any, upper: bool = True, transpose: bool = False, unit: bool = False
) -> Any:
    a, b = _batched(a, b)
    solved = lax_linalg.triangular_solve(
        a, b, left_side=True, lower=not upper, transpose_a=transpose, unit_diagonal=unit
    )
    return solved, a


@lowers("linalg_qr.default")
def _qr(node: Node, x: Any, mode: str = "reduced") -> Any:
    if mode == "r":
        return jnp.zeros(shape_of(node), x.dtype), jnp.linalg.qr(x, mode="r")
    return tuple(jnp.linalg.qr(x, mode=mode))


@lowers("_linalg_svd.default")
def _svd(
    node: Node, x: Any, full: bool = False, compute_uv: bool = True, driver: Any = None
) -> Any:
    if compute_uv and x.shape[-2] < x.shape[-1]:
        raise NotLowered("signs of singular vectors, of which eager's LAPACK chooses others")
    if compute_uv:
        return tuple(jnp.linalg.svd(x, full_matrices=full))
    return (
        jnp.zeros(shape_of(node, 0), x.dtype),
        jnp.linalg.svd(x, compute_uv=False),
        jnp.zeros(shape_of(node, 2), x.dtype),
    )


@lowers("_linalg_eigh.default")
def _eigh(node: Node, x: Any, uplo: str = "L", vectors: bool = True) -> Any:
    if vectors:
        raise NotLowered("signs of eigenvectors, of which eager's LAPACK chooses others")
    values = jnp.linalg.eigvalsh(x, UPLO=uplo.upper(), symmetrize_input=False)
    return values, jnp.zeros(shape_of(node, 1), x.dtype)


def _lu(x: Any) -> tuple[Any, Any, Any]:
    """The packed factors, torch's pivots, which count from 1, and the permutation."""
    factors, pivots, permutation = lax_linalg.lu(x)
    return factors, pivots + 1, permutation


@lowers("linalg_lu_factor_ex.default")
def _lu_factor(node: Node, x: Any, pivot: bool = True, check: bool = False) -> Any:
    factors, pivots, _ = _lu(x)
    zero = jnp.diagonal(factors, axis1=-2, axis2=-1) == 0
    place = jnp.argmax(zero, axis=-1) + 1 if zero.shape[-1] else jnp.zeros(zero.shape[:-1])
    return factors, pivots, cast(jnp.where(zero.any(-1), place, 0), jnp.int32)


@lowers("linalg_lu.default")
def _lu_parts(node: Node, x: Any, pivot: bool = True) -> Any:
    factors, _, permutation = _lu(x)
    return _unpacked(factors, permutation)


def _unpacked(factors: Any, permutation: Any) -> tuple[Any, Any, Any]:
    rows, columns = factors.shape[-2:]
    k = min(rows, columns)
    lower = jnp.tril(factors[..., :, :k], -1) + jnp.eye(rows, k, dtype=factors.dtype)
    order = jax.nn.one_hot(permutation, rows, dtype=factors.dtype)
    return jnp.swapaxes(order, -1, -2), lower, jnp.triu(factors[..., :k, :])


@lowers("lu_unpack.default")
def _lu_unpack(
    node: Node, factors: Any, pivots: Any, unpack_data: bool = True, unpack_pivots: bool = True
) -> Any:
    permutation = lax_linalg.lu_pivots_to_permutation(
        cast(pivots - 1, jnp.int32), factors.shape[-2]
    )
    parts = _unpacked(factors, permutation)
    wanted = (unpack_pivots, unpack_data, unpack_data)
    return [
        part if want else jnp.zeros(shape_of(node, i), factors.dtype)
        for i, (part, want) in enumerate(zip(parts, wanted, strict=True))
    ]


def _lu_solve(factors: Any, pivots: Any, b: Any, left: bool, adjoint: bool) -> Any:
    if not left:
        return _turned(_lu_solve(factors, pivots, _turned(b), True, not adjoint))
    factors, b = _batched(factors, b)
    permutation = lax_linalg.lu_pivots_to_permutation(cast(pivots - 1, jnp.int32), b.shape[-2])
    permutation = jnp.broadcast_to(permutation, b.shape[:-1])[..., None]
    if not adjoint:
        b = jnp.take_along_axis(b, permutation, -2)
        b = _triangular(factors, b, lower=True, unit=True)
        return _triangular(factors, b, lower=False)
    b = _triangular(factors, b, lower=False, transpose=True)
    b = _triangular(factors, b, lower=True, transpose=True, unit=True)
    return jnp.take_along_axis(b, jnp.argsort(permutation, axis=-2), -2)


@lowers("linalg_lu_solve.default")
def _solve_with_lu(
    node: Node, factors: Any, pivots: Any, b: Any, left: bool = True, adjoint: bool = False
) -> Any:
    return _lu_solve(factors, pivots, b, left, adjoint)


@lowers("_linalg_solve_ex.default")
def _solve(node: Node, a: Any, b: Any, left: bool = True, check: bool = False) -> Any:
    factors, pivots, _ = _lu(a)
    vector = b.ndim == 1 or (b.ndim == a.ndim - 1 and b.shape == a.shape[:-1])
    columns = b[..., None] if vector else b
    solved = _lu_solve(factors, pivots, columns, left, False)
    return solved[..., 0] if vector else solved, factors, pivots, _no_error(node, 3)


@lowers("linalg_inv_ex.default")
def _inverse(node: Node, x: Any, check: bool = False) -> Any:
    return jnp.linalg.inv(x), _no_error(node, 1)


def _parity(pivots: Any) -> Any:
    """1 for an even permutation, -1 for an odd one."""
    moved = pivots != jnp.arange(1, pivots.shape[-1] + 1)
    return 1 - 2 * (jnp.sum(moved, axis=-1) % 2)


def _lu_of_either(node: Node, x: Any) -> tuple[Any, Any]:
    """The factors that eager saves: of the transpose of a row-major matrix, if it is real."""
    type_ = node.args[0].type
    rows = torch.empty_strided(type_.shape, type_.stride, device="meta").is_contiguous()
    turn = rows and not type_.dtype.is_complex
    return _lu(jnp.swapaxes(x, -1, -2) if turn else x)[:2]


@lowers("_linalg_det.default")
def _det(node: Node, x: Any) -> Any:
    factors, pivots = _lu_of_either(node, x)
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    return jnp.prod(diagonal, axis=-1) * cast(_parity(pivots), x.dtype), factors, pivots


@lowers("_linalg_slogdet.default")
def _slogdet(node: Node, x: Any) -> Any:
    factors, pivots = _lu_of_either(node, x)
    diagonal = jnp.diagonal(factors, axis1=-2, axis2=-1)
    sign = jnp.prod(jnp.sign(diagonal), axis=-1) * cast(_parity(pivots), x.dtype)
    return sign, jnp.sum(jnp.log(jnp.abs(diagonal)), axis=-1), factors, pivots


@lowers("linalg_householder_product.default")
def _householder(node: Node, x: Any, tau: Any) -> Any:
    return lax_linalg.householder_product(x, tau)


@lowers("linalg_matrix_exp.default")
def _matrix_exp(node: Node, x: Any) -> Any:
    return (
        scipy_linalg.expm(x)
        if x.ndim == 2
        else jax.vmap(scipy_linalg.expm)(x.reshape(-1, *x.shape[-2:])).reshape(x.shape)
    )


@lowers("linalg_pinv.atol_rtol_tensor")
def _pinv(node: Node, x: Any, atol: Any = None, rtol: Any = None, hermitian: bool = False) -> Any:
    if hermitian:
        raise NotLowered("the pseudo-inverse of one triangle")
    u, s, vh = jnp.linalg.svd(x, full_matrices=False)
    largest = jnp.max(s, axis=-1, initial=0)
    default = max(x.shape[-2:]) * jnp.finfo(x.dtype).eps
    absolute = jnp.zeros(()) if atol is None else atol
    if rtol is None:
        rtol = default if atol is None else jnp.where(absolute > 0, 0.0, default)
    limit = jnp.maximum(absolute, rtol * largest)
    inverse = jnp.where(s > jnp.expand_dims(limit, -1), 1 / s, 0)
    return jnp.matmul(_turned(vh) * cast(inverse, x.dtype)[..., None, :], _turned(u))


# -- Fourier transforms ----------------------------------------------------------------------------


def _scale(x: Any, shape: Any, dims: Any, normalization: int) -> Any:
    """`x`, unscaled, in torch's normalization: none, by the root of the size, by the size."""
    count = math.prod(shape[dim] for dim in dims)
    return x if normalization == 0 else x / (math.sqrt(count) if normalization == 1 else count)


@lowers("_fft_c2c.default")
def _fft(node: Node, x: Any, dims: Any, normalization: int, forward: bool) -> Any:
    if not dims:
        return x
    norm = "backward" if forward else "forward"
    made = (jnp.fft.fftn if forward else jnp.fft.ifftn)(x, axes=tuple(dims), norm=norm)
    return _scale(made, x.shape, dims, normalization)


@lowers("_fft_r2c.default")
def _fft_of_real(node: Node, x: Any, dims: Any, normalization: int, onesided: bool) -> Any:
    made = jnp.fft.rfftn(x, axes=tuple(dims)) if onesided else jnp.fft.fftn(x, axes=tuple(dims))
    return _scale(made, x.shape, dims, normalization)


@lowers("_fft_c2r.default")
def _fft_to_real(node: Node, x: Any, dims: Any, normalization: int, last: int) -> Any:
    dims = dims_of(dims, x.ndim)
    sizes = [x.shape[dim] for dim in dims[:-1]] + [last]
    made = jnp.fft.irfftn(x, s=sizes, axes=dims, norm="forward")
    return _scale(made, shape_of(node), dims, normalization)
