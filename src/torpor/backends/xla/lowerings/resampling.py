"""Gradients of upsampling and padding, antialiased resampling, pools with windows by the sizes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from torpor.backends.xla.lowerings.table import (
    NotLowered,
    backward_of,
    cast,
    lowers,
    opmath,
    shape_of,
)
from torpor.ir.node import Node

Matrix = np.ndarray[Any, Any]


# -- upsampling ------------------------------------------------------------------------------------


def _sources(size: int, out: int, align: bool, factor: Any, half: bool) -> Matrix:
    """Where in an input of `size` each of `out` places looks; `half`: centres of pixels."""
    if align:
        return np.arange(out) * ((size - 1) / (out - 1) if out > 1 else 0.0)
    scale = np.float32(1 / factor if factor else size / out)
    places = np.arange(out, dtype=np.float32)
    return (places + np.float32(0.5)) * scale - np.float32(0.5) if half else places * scale


def _nearest(size: int, out: int, factor: Any, exact: bool) -> Matrix:
    """Which input each output is: a matrix of inputs by outputs."""
    sources = _sources(size, out, False, factor, half=exact) + (0.5 if exact else 0)
    return _taps(size, [(np.floor(sources), np.ones(out))])


def _linear(size: int, out: int, align: bool, factor: Any) -> Matrix:
    sources = np.maximum(_sources(size, out, align, factor, half=True), 0)
    first = np.floor(sources)
    rest = sources - first
    return _taps(size, [(first, 1 - rest), (first + 1, rest)])


def _cubic(size: int, out: int, align: bool, factor: Any) -> Matrix:
    sources = _sources(size, out, align, factor, half=True)
    first = np.floor(sources)
    t, a = sources - first, -0.75

    def near(x: Matrix) -> Matrix:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Matrix) -> Matrix:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    weights = (far(t + 1), near(t), near(1 - t), far(2 - t))
    return _taps(size, [(first + i - 1, weight) for i, weight in enumerate(weights)])


def _taps(size: int, taps: Sequence[tuple[Matrix, Matrix]]) -> Matrix:
    """A matrix of inputs by outputs; each tap is an input for each output, and its weight."""
    out = len(taps[0][0])
    matrix = np.zeros((size, out))
    for places, weights in taps:
        inside = np.clip(places, 0, size - 1).astype(np.int64)
        np.add.at(matrix, (inside, np.arange(out)), weights)
    return matrix


def _antialiased(size: int, out: int, factor: Any, cubic: bool) -> Matrix:
    """A window as wide as what one output stands for, with weights that add up to 1."""
    scale = 1 / factor if factor else size / out
    width = max(scale, 1.0)
    support = width * (2 if cubic else 1)
    centres = scale * (np.arange(out) + 0.5)
    first = np.maximum((centres - support + 0.5).astype(np.int64), 0)
    last = np.minimum((centres + support + 0.5).astype(np.int64), size)
    places = np.arange(size)[:, None]
    weights = (_keys if cubic else _triangle)((places - centres + 0.5) / width)
    weights = np.where((places >= first) & (places < last), weights, 0)
    return weights / weights.sum(0)  # type: ignore[no-any-return]  # an array


def _triangle(x: Matrix) -> Matrix:
    return np.maximum(1 - np.abs(x), 0)  # type: ignore[no-any-return]  # an array


def _keys(x: Matrix) -> Matrix:
    x, a = np.abs(x), -0.5
    near = ((a + 2) * x - (a + 3)) * x * x + 1
    far = (((x - 5) * x + 8) * x - 4) * a
    return np.where(x < 1, near, np.where(x < 2, far, 0))


def _resampled(x: Any, matrices: Sequence[Matrix]) -> Any:
    """A product with a matrix along each of the last dimensions."""
    return _resample_backward(x, [matrix.T for matrix in matrices])


@lowers("_upsample_bilinear2d_aa.default", "_upsample_bicubic2d_aa.default")
def _antialias(node: Node, x: Any, out: Any, align: bool, *factors: Any) -> Any:
    sizes = x.shape[2:]
    return _resampled(x, _antialias_matrices(node, sizes, out, align, factors))


@lowers("_upsample_bilinear2d_aa_backward.default", "_upsample_bicubic2d_aa_backward.default")
def _antialias_backward(
    node: Node, grad: Any, out: Any, sizes: Any, align: bool, *factors: Any
) -> Any:
    matrices = _antialias_matrices(node, sizes[2:], out, align, factors)
    return _resample_backward(grad, matrices)


def _antialias_matrices(node: Node, sizes: Any, out: Any, align: bool, factors: Any) -> Any:
    if align:
        raise NotLowered("antialiased, with corners aligned")
    cubic = "bicubic" in node.op.name
    given = zip(sizes, out, factors, strict=True)
    return [_antialiased(n, o, f, cubic) for n, o, f in given]


def _resample_backward(grad: Any, matrices: Sequence[Matrix]) -> Any:
    """The gradient of a product with a matrix along each of the last dimensions."""
    made = cast(grad, opmath(grad.dtype))
    for dim, matrix in enumerate(matrices, grad.ndim - len(matrices)):
        turned = jnp.matmul(jnp.moveaxis(made, dim, -1), cast(matrix.T, made.dtype))
        made = jnp.moveaxis(turned, -1, dim)
    return made


@lowers("upsample_nearest1d_backward.default", "upsample_nearest2d_backward.default",
        "upsample_nearest3d_backward.default", "_upsample_nearest_exact1d_backward.default",
        "_upsample_nearest_exact2d_backward.default",
        "_upsample_nearest_exact3d_backward.default")  # fmt: skip
def _nearest_backward(node: Node, grad: Any, out: Any, sizes: Any, *factors: Any) -> Any:
    exact = "exact" in node.op.name
    given = zip(sizes[2:], out, factors, strict=True)
    return _resample_backward(grad, [_nearest(n, o, f, exact) for n, o, f in given])


@lowers("upsample_linear1d_backward.default", "upsample_bilinear2d_backward.default",
        "upsample_trilinear3d_backward.default", "upsample_bicubic2d_backward.default")  # fmt: skip
def _linear_backward(
    node: Node, grad: Any, out: Any, sizes: Any, align: bool, *factors: Any
) -> Any:
    matrix = _cubic if "bicubic" in node.op.name else _linear
    given = zip(sizes[2:], out, factors, strict=True)
    return _resample_backward(grad, [matrix(n, o, align, f) for n, o, f in given])


# -- padding ---------------------------------------------------------------------------------------


def _pad_edges(x: Any, pad: Any) -> Any:
    if min(pad) < 0:
        raise NotLowered("padding that takes away")
    pairs = [(pad[i], pad[i + 1]) for i in range(0, len(pad), 2)][::-1]
    return jnp.pad(x, [(0, 0)] * (x.ndim - len(pairs)) + pairs, mode="edge")


@lowers("replication_pad1d_backward.default", "replication_pad2d_backward.default",
        "replication_pad3d_backward.default")  # fmt: skip
def _replication_backward(node: Node, grad: Any, x: Any, pad: Any) -> Any:
    return backward_of(lambda y: _pad_edges(y, pad), x)(grad)[0]


# -- adaptive max pools ----------------------------------------------------------------------------


def _window_places(size: int, out: int) -> Iterator[tuple[Matrix, Matrix]]:
    """For each offset in the largest window: its place for each output, and if it is in there."""
    first = np.arange(out) * size // out
    last = -(-(np.arange(1, out + 1) * size) // out)
    for offset in range(int((last - first).max(initial=0))):
        yield np.minimum(first + offset, last - 1), first + offset < last


@lowers("adaptive_max_pool2d.default", "adaptive_max_pool3d.default")
def _adaptive_max_pool(node: Node, x: Any, out: Any) -> Any:
    shape, rank = shape_of(node), len(out)
    sizes = x.shape[-rank:]
    flat = x.reshape(*x.shape[:-rank], -1)
    best, index = jnp.full(shape, -jnp.inf, x.dtype), jnp.full(shape, -1, jnp.int64)
    per_dim = [list(_window_places(n, o)) for n, o in zip(sizes, out, strict=True)]
    for offsets in itertools.product(*per_dim):
        grids = np.meshgrid(*(places for places, _ in offsets), indexing="ij")
        number = np.ravel_multi_index(grids, sizes)
        inside = np.logical_and.reduce(np.meshgrid(*(ok for _, ok in offsets), indexing="ij"))
        value = flat[..., number]
        takes = ((value > best) | (value != value) | (index < 0)) & inside
        best, index = jnp.where(takes, value, best), jnp.where(takes, number, index)
    return best, index


@lowers("adaptive_max_pool2d_backward.default", "adaptive_max_pool3d_backward.default")
def _adaptive_max_pool_backward(node: Node, grad: Any, x: Any, index: Any) -> Any:
    rank = 2 if "2d" in node.op.name else 3
    batch = int(np.prod(x.shape[:-rank]))
    places = index.reshape(batch, -1)
    zeros = jnp.zeros((batch, int(np.prod(x.shape[-rank:]))), grad.dtype)
    rows = np.arange(batch)[:, None]
    return zeros.at[rows, places].add(grad.reshape(batch, -1)).reshape(x.shape)
