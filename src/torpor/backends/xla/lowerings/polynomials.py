"""Orthogonal polynomials by their recurrences, and functions that are sums of series."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from torpor.backends.xla.lowerings.table import cast, dtype_of, in_opmath, lowers, opmath
from torpor.ir.node import Node

Function = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class _Family:
    """Polynomials of degrees from 0 on: the first is 1, each after two comes from these."""

    second: Callable[[Any], Any]
    next: Callable[[Any, Any, Any, Any], Any]  # of x, the number of the last, it, the one before
    at_ends: Function | None = None  # where |x| is 1: the value, of x and the degree
    by_angle: Function | None = None  # of high degree, where |x| < 1: of x and the degree
    high: int = 0  # above it a degree is high
    shifted: bool = False  # of 2x - 1


def _value(family: _Family, x: Any, degree: Any) -> Any:
    x = 2 * x - 1 if family.shifted else x
    n = jnp.trunc(degree)
    x, n = jnp.broadcast_arrays(x, n)
    known, value = n < 0, jnp.zeros_like(x)
    if family.at_ends is not None:
        ends = ~known & (jnp.abs(x) == 1)
        known, value = known | ends, jnp.where(ends, family.at_ends(x, n), value)
    if family.by_angle is not None:
        inside = ~known & (n > family.high) & (jnp.abs(x) < 1)
        known, value = known | inside, jnp.where(inside, family.by_angle(x, n), value)
    return jnp.where(known, value, _by_recurrence(family, x, jnp.where(known, 0, n)))


def _by_recurrence(family: _Family, x: Any, n: Any) -> Any:
    first, second = jnp.ones_like(x), family.second(x)
    last = jnp.max(n, initial=0)

    def goes_on(state: Any) -> Any:
        return state[0] < last

    def step(state: Any) -> Any:
        k, before, now = state
        later = family.next(x, k, now, before)
        more = k < n
        return k + 1, jnp.where(more, now, before), jnp.where(more, later, now)

    start = (jnp.ones((), x.dtype), first, second)
    _, _, made = lax.while_loop(goes_on, step, start)
    return jnp.where(n == 0, first, made)


def _is_even(n: Any) -> Any:
    return jnp.fmod(n, 2) == 0


def _sign(x: Any, n: Any) -> Any:
    """1, or -1 for odd degrees on the left."""
    return jnp.where((x > 0) | _is_even(n), 1.0, -1.0)


def _twice(x: Any, k: Any, now: Any, before: Any) -> Any:
    return (x + x) * now - before


def _second_kind(x: Any, n: Any) -> Any:
    angle = jnp.arccos(x)
    sine = jnp.sin(angle)
    at_zero = (n + 1) * jnp.cos((n + 1) * angle) / x
    return jnp.where(sine != 0, jnp.sin((n + 1) * angle) / sine, at_zero)


def _third_kind(x: Any, n: Any) -> Any:
    angle = jnp.arccos(x)
    return jnp.cos((n + 0.5) * angle) / jnp.cos(angle / 2)


def _fourth_kind(x: Any, n: Any) -> Any:
    angle = jnp.arccos(x)
    return jnp.sin((n + 0.5) * angle) / jnp.sin(angle / 2)


_CHEBYSHEV: Final[dict[str, dict[str, Any]]] = {
    "t": {
        "second": lambda x: x,
        "at_ends": _sign,
        "by_angle": lambda x, n: jnp.cos(n * jnp.arccos(x)),
        "high": 6,
    },
    "u": {
        "second": lambda x: x + x,
        "at_ends": lambda x, n: _sign(x, n) * (n + 1),
        "by_angle": _second_kind,
        "high": 8,
    },
    "v": {
        "second": lambda x: x + x - 1,
        "at_ends": lambda x, n: jnp.where(x > 0, 1.0, _sign(x, n) * (n + n + 1)),
        "by_angle": _third_kind,
        "high": 8,
    },
    "w": {
        "second": lambda x: x + x + 1,
        "at_ends": lambda x, n: jnp.where(x > 0, n + n + 1, _sign(x, n)),
        "by_angle": _fourth_kind,
        "high": 8,
    },
}

_FAMILIES: Final[dict[str, _Family]] = {
    **{f"chebyshev_polynomial_{k}": _Family(next=_twice, **f) for k, f in _CHEBYSHEV.items()},
    **{
        f"shifted_chebyshev_polynomial_{k}": _Family(next=_twice, **{**f, "high": 6}, shifted=True)
        for k, f in _CHEBYSHEV.items()
    },
    "hermite_polynomial_h": _Family(
        lambda x: x + x, lambda x, k, now, before: (x + x) * now - 2 * k * before
    ),
    "hermite_polynomial_he": _Family(lambda x: x, lambda x, k, now, before: x * now - k * before),
    "laguerre_polynomial_l": _Family(
        lambda x: 1 - x,
        lambda x, k, now, before: ((k + k + (1 - x)) * now - k * before) / (k + 1),
    ),
    "legendre_polynomial_p": _Family(
        lambda x: x,
        lambda x, k, now, before: ((k + k + 1) * x * now - k * before) / (k + 1),
        at_ends=_sign,
    ),
}


def _lowering(family: _Family) -> Any:
    return in_opmath(lambda x, n: _value(family, x, n))


for _name, _family in _FAMILIES.items():
    _overloads = [f"special_{_name}.{end}" for end in ("default", "x_scalar", "n_scalar")]
    lowers(*_overloads)(_lowering(_family))


# -- series ----------------------------------------------------------------------------------------


@lowers("special_spherical_bessel_j0.default")
def _spherical_bessel(node: Node, x: Any) -> Any:
    x = cast(x, dtype_of(node))
    square = x * x
    series, term = jnp.ones_like(x), jnp.ones_like(x)
    for k in range(1, 7):
        term = -term * square / (2 * k * (2 * k + 1))
        series = series + term
    away = jnp.where(jnp.isinf(x), 0, jnp.sin(x) / x)
    return jnp.where(jnp.abs(x) < 0.5, series, away)


@lowers("polygamma.default")
def _polygamma(node: Node, order: int, x: Any) -> Any:
    x = cast(x, opmath(dtype_of(node)))
    if order == 0:
        return special.digamma(x)
    if order == 1:
        return _trigamma(x)
    sign = 1 if order % 2 else -1
    factorial = jnp.exp(special.gammaln(jnp.asarray(order + 1, x.dtype)))
    return sign * factorial * _zeta(order + 1, x)


def _trigamma(x: Any) -> Any:
    """By reflection below 1/2, then by recurrence up to where the series holds: as eager does."""
    below = x < 0.5
    reflected = jnp.square(jnp.pi / jnp.sin(jnp.pi * x))
    x = jnp.where(below, 1 - x, x)
    total = jnp.zeros_like(x)
    for _ in range(6):
        total += 1 / (x * x)
        x += 1
    square = 1 / (x * x)
    tail = 1 + 1 / (2 * x) + square * (1 / 6 - square * (1 / 30 - square / 42))
    total += tail / x
    return jnp.where(below, reflected - total, total)


_BERNOULLI: Final = (
    1 / 6, -1 / 30, 1 / 42, -1 / 30, 5 / 66, -691 / 2730, 7 / 6, -3617 / 510, 43867 / 798,
    -174611 / 330,
)  # fmt: skip
_FAR: Final = 9
"""From here on the series of Euler and Maclaurin holds: as in the library that eager uses."""


def _zeta(power: int, x: Any) -> Any:
    """The sum of (x + i) ** -power over all i from 0 on, for negative x as well."""
    pole = (x <= 0) & (x == jnp.floor(x))
    start = jnp.where(pole | ~jnp.isfinite(x), 1, x)

    def goes_on(state: Any) -> Any:
        return jnp.any(state[0] <= _FAR)

    def step(state: Any) -> Any:
        place, total = state
        more = place <= _FAR
        term = jnp.asarray(1, x.dtype) / lax.integer_pow(place, power)
        return jnp.where(more, place + 1, place), jnp.where(more, total + term, total)

    place, total = lax.while_loop(goes_on, step, (start, jnp.zeros_like(start)))
    term = 1 / lax.integer_pow(place, power)
    total += place * term / (power - 1) + term / 2
    factor = power * term / place / 2
    for k, number in enumerate(_BERNOULLI, 1):
        total += number * factor
        factor *= (
            (power + 2 * k - 1) * (power + 2 * k) / ((2 * k + 1) * (2 * k + 2) * place * place)
        )
    return jnp.where(pole, jnp.inf, jnp.where(jnp.isfinite(x), total, jnp.nan))
