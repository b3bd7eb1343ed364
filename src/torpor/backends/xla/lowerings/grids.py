"""Samples at places that a tensor names (`grid_sample`), and their gradients."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any, Final

import jax.numpy as jnp

from torpor.backends.xla.lowerings.table import backward_of, cast, lowers, opmath
from torpor.ir.node import Node

_BILINEAR, _NEAREST, _CUBIC = 0, 1, 2
_ZEROS, _BORDER, _REFLECTION = 0, 1, 2

Tap = tuple[Any, Any]
"""A place along one dimension for each sample, and the weight of what is there."""


@lowers("grid_sampler_2d.default", "grid_sampler_3d.default")
def _grid_sampler(node: Node, x: Any, grid: Any, how: int, padding: int, align: bool) -> Any:
    wide = opmath(x.dtype)
    return _sampled(cast(x, wide), cast(grid, wide), how, padding, align)


@lowers("grid_sampler_2d_backward.default", "grid_sampler_3d_backward.default")
def _grid_sampler_backward(
    node: Node, grad: Any, x: Any, grid: Any, how: int, padding: int, align: bool, wanted: Any
) -> Any:
    wide = opmath(x.dtype)
    back = backward_of(
        lambda x, grid: _sampled(x, grid, how, padding, align), cast(x, wide), cast(grid, wide)
    )
    made = back(cast(grad, wide))
    return [
        None if value.type is None else gradient
        for value, gradient in zip(node.outputs, made, strict=True)
    ]


def _sampled(x: Any, grid: Any, how: int, padding: int, align: bool) -> Any:
    """`grid` holds places from -1 to 1 along each dimension of a picture, the last one first."""
    sizes = x.shape[2:]
    if not x.size:
        return jnp.zeros((*x.shape[:2], *grid.shape[1:-1]), x.dtype)
    taps = [
        list(_taps(_place(grid[..., -1 - dim], size, align), size, how, padding, align))
        for dim, size in enumerate(sizes)
    ]
    total = jnp.zeros((), x.dtype)
    for chosen in itertools.product(*taps):
        total = total + _looked_up(x, chosen)
    return total


def _place(place: Any, size: int, align: bool) -> Any:
    """From -1 ... 1 to numbers of pixels: of their centres, or of the edges of the picture."""
    return (place + 1) / 2 * (size - 1) if align else ((place + 1) * size - 1) / 2


def _taps(place: Any, size: int, how: int, padding: int, align: bool) -> Iterator[Tap]:
    inside = _INSIDE[padding]
    if how == _CUBIC:
        first = jnp.floor(place)
        for offset, weight in enumerate(_cubic_weights(place - first)):
            yield inside(first + (offset - 1), size, align), weight
        return
    place = inside(place, size, align)
    if how == _NEAREST:
        yield jnp.round(place), jnp.ones_like(place)
        return
    first = jnp.floor(place)
    rest = place - first
    yield first, 1 - rest
    yield first + 1, rest


def _cubic_weights(t: Any) -> list[Any]:
    a = -0.75

    def near(x: Any) -> Any:
        return ((a + 2) * x - (a + 3)) * x * x + 1

    def far(x: Any) -> Any:
        return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a

    return [far(t + 1), near(t), near(1 - t), far(2 - t)]


def _clipped(place: Any, size: int, align: bool) -> Any:
    """On the border there is no slope, as eager has it."""
    free = (place > 0) & (place < size - 1)
    return jnp.where(free, place, jnp.where(place > 0, jnp.asarray(size - 1, place.dtype), 0))


def _reflected(place: Any, size: int, align: bool) -> Any:
    """Mirrored at the centres of the outermost pixels, or at the edges of the picture."""
    low, span = (0.0, size - 1.0) if align else (-0.5, float(size))
    if not span:
        return jnp.zeros_like(place)
    away = jnp.where(place < low, low - place, place - low)
    rest = jnp.fmod(away, span)
    is_even = jnp.fmod(jnp.floor(away / span), 2) == 0
    return _clipped(jnp.where(is_even, rest + low, span - rest + low), size, align)


_INSIDE: Final[dict[int, Callable[[Any, int, bool], Any]]] = {
    _ZEROS: lambda place, size, align: place,
    _BORDER: _clipped,
    _REFLECTION: _reflected,
}


def _looked_up(x: Any, taps: tuple[Tap, ...]) -> Any:
    """What is at the taps' places, weighted; nothing outside."""
    sizes = x.shape[2:]
    number, weight, there = jnp.zeros((), jnp.int64), jnp.ones((), x.dtype), jnp.ones((), bool)
    for size, (place, share) in zip(sizes, taps, strict=True):
        there = there & (place >= 0) & (place <= size - 1)
        number = number * size + cast(jnp.clip(place, 0, size - 1), jnp.int64)
        weight = weight * share
    flat = x.reshape(*x.shape[:2], math.prod(sizes))
    rows = jnp.where(there, number, 0).reshape(x.shape[0], 1, -1)
    found = jnp.take_along_axis(flat, rows, axis=2).reshape(*x.shape[:2], *there.shape[1:])
    return jnp.where(there[:, None], found * weight[:, None], 0)
