"""Elementwise ops: arithmetic, comparisons, activations, special functions, complex numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.scipy import special

from torpor.backends.xla.lowerings.table import (
    DTYPES,
    cast,
    dtype_of,
    in_opmath,
    is_array,
    lowers,
    lowers_all,
    opmath,
    promoted,
    shape_of,
    type_of,
)
from torpor.ir.node import Node


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.inexact))


def _scaled(x: Any, y: Any, alpha: Any) -> Any:
    """`alpha * y`, for what is added to `x`."""
    return y if not is_array(alpha) and alpha == 1 else y * jnp.asarray(alpha, y.dtype)


def _add(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x | (y & alpha) if x.dtype == jnp.bool_ else x + _scaled(x, y, alpha)


def _sub(x: Any, y: Any, alpha: Any = 1) -> Any:
    return x - _scaled(x, y, alpha)


def _power(x: Any, y: Any) -> Any:
    return jnp.power(x, y) if x.dtype != jnp.bool_ else x | ~y


def _sign(x: Any) -> Any:
    if x.dtype == jnp.bool_ or jnp.iscomplexobj(x):
        return x if x.dtype == jnp.bool_ else jnp.sign(x)
    return cast(x > 0, x.dtype) - cast(x < 0, x.dtype)


def _floor_divide(x: Any, y: Any) -> Any:
    """Rounded down as torch does it: exact where the quotient is not."""
    if not _is_float(x):
        return jnp.floor_divide(x, y)
    rest = lax.rem(*jnp.broadcast_arrays(x, y))
    quotient = (x - rest) / y
    quotient = jnp.where((rest != 0) & ((y < 0) != (rest < 0)), quotient - 1, quotient)
    rounded = jnp.floor(quotient)
    rounded = jnp.where(quotient - rounded > 0.5, rounded + 1, rounded)
    rounded = jnp.where(quotient == 0, jnp.copysign(0.0, x / y), rounded)
    return jnp.where(y == 0, x / y, rounded)


def _trunc_divide(x: Any, y: Any) -> Any:
    if _is_float(x):
        return jnp.trunc(x / y)
    return lax.div(*jnp.broadcast_arrays(x, y))


def _divide(x: Any, y: Any, mode: str | None = None) -> Any:
    return {None: jnp.divide, "floor": _floor_divide, "trunc": _trunc_divide}[mode](x, y)


def _clamp(x: Any, low: Any = None, high: Any = None) -> Any:
    x = x if low is None else jnp.maximum(x, low)
    return x if high is None else jnp.minimum(x, high)


def _lerp(x: Any, y: Any, weight: Any) -> Any:
    return jnp.where(jnp.abs(weight) < 0.5, x + weight * (y - x), y - (y - x) * (1 - weight))


def _xlogy(x: Any, y: Any) -> Any:
    return jnp.where(jnp.isnan(y), y, jnp.where(x == 0, jnp.zeros_like(x), x * jnp.log(y)))


def _xlog1py(x: Any, y: Any) -> Any:
    return jnp.where(jnp.isnan(y), y, jnp.where(x == 0, jnp.zeros_like(x), x * jnp.log1p(y)))


def _logit(x: Any, eps: Any = None) -> Any:
    x = x if eps is None else jnp.clip(x, eps, 1 - eps)
    return jnp.log(x / (1 - x))


def _nan_to_num(x: Any, nan: Any = None, high: Any = None, low: Any = None) -> Any:
    if not _is_float(x):
        return x
    return jnp.nan_to_num(x, nan=0.0 if nan is None else nan, posinf=high, neginf=low)


def softplus(x: Any, beta: Any = 1, threshold: Any = 20) -> Any:
    return jnp.where(x * beta > threshold, x, jnp.log1p(jnp.exp(x * beta)) / beta)


def _elu(x: Any, alpha: Any = 1, scale: Any = 1, input_scale: Any = 1) -> Any:
    return jnp.where(x > 0, x * scale, alpha * scale * jnp.expm1(x * input_scale))


def _round(x: Any, decimals: Any = 0) -> Any:
    return jnp.round(x, decimals) if _is_float(x) else x


lowers_all(
    {
        "abs": jnp.abs,
        "neg": jnp.negative,
        "positive": lambda x: x,
        "exp": jnp.exp,
        "exp2": jnp.exp2,
        "expm1": jnp.expm1,
        "log": jnp.log,
        "log2": jnp.log2,
        "log10": jnp.log10,
        "log1p": jnp.log1p,
        "sqrt": jnp.sqrt,
        "rsqrt": lambda x: 1 / jnp.sqrt(x) if jnp.iscomplexobj(x) else lax.rsqrt(x),
        "square": jnp.square,
        "reciprocal": lambda x: 1 / x,
        "sin": jnp.sin,
        "cos": jnp.cos,
        "tan": jnp.tan,
        "asin": jnp.arcsin,
        "acos": jnp.arccos,
        "atan": jnp.arctan,
        "sinh": jnp.sinh,
        "cosh": jnp.cosh,
        "tanh": jnp.tanh,
        "asinh": jnp.arcsinh,
        "acosh": jnp.arccosh,
        "atanh": jnp.arctanh,
        "atan2": jnp.arctan2,
        "hypot": jnp.hypot,
        "sinc": jnp.sinc,
        "ceil": lambda x: jnp.ceil(x) if _is_float(x) else x,
        "floor": lambda x: jnp.floor(x) if _is_float(x) else x,
        "trunc": lambda x: jnp.trunc(x) if _is_float(x) else x,
        "frac": lambda x: x - jnp.trunc(x),
        "sign": _sign,
        "sgn": _sign,
        "deg2rad": jnp.deg2rad,
        "rad2deg": jnp.rad2deg,
        "sigmoid": jax.nn.sigmoid,
        "erf": special.erf,
        "erfc": special.erfc,
        "erfinv": special.erfinv,
        "lgamma": special.gammaln,
        "digamma": lambda x: jnp.where(
            x == 0, jnp.copysign(jnp.inf, -x), jnp.where(x == -jnp.inf, jnp.nan, special.digamma(x))
        ),
        "special_i0e": special.i0e,
        "special_i1": special.i1,
        "special_i1e": special.i1e,
        "i0 special_modified_bessel_i0": special.i0,
        "special_modified_bessel_i1": special.i1,
        "special_ndtri": special.ndtri,
        "special_log_ndtr": special.log_ndtr,
        "special_entr": special.entr,
        "special_zeta": special.zeta,
        "add.Tensor add.Scalar": _add,
        "sub.Tensor sub.Scalar": _sub,
        "rsub.Tensor rsub.Scalar": lambda x, y, alpha=1: _sub(y, x, alpha),
        "mul.Tensor mul.Scalar": lambda x, y: x & y if x.dtype == jnp.bool_ else x * y,
        "div.Tensor div.Scalar": jnp.divide,
        "div.Tensor_mode div.Scalar_mode": _divide,
        "floor_divide floor_divide.Scalar": _floor_divide,
        "remainder.Tensor remainder.Scalar remainder.Scalar_Tensor": jnp.remainder,
        "fmod.Tensor fmod.Scalar": jnp.fmod,
        "pow.Tensor_Tensor pow.Scalar": _power,
        "maximum": jnp.maximum,
        "minimum": jnp.minimum,
        "fmax": jnp.fmax,
        "fmin": jnp.fmin,
        "copysign.Tensor copysign.Scalar": jnp.copysign,
        "nextafter": jnp.nextafter,
        "heaviside": jnp.heaviside,
        "logaddexp": jnp.logaddexp,
        "logaddexp2": jnp.logaddexp2,
        "xlogy.Tensor xlogy.Scalar_Self xlogy.Scalar_Other": _xlogy,
        "special_xlog1py special_xlog1py.self_scalar special_xlog1py.other_scalar": _xlog1py,
        "logit": _logit,
        "gcd": jnp.gcd,
        "lcm": jnp.lcm,
        "igamma": special.gammainc,
        "igammac": special.gammaincc,
        "ldexp.Tensor": lambda x, y: x * jnp.exp2(y),
        "bitwise_and.Tensor bitwise_and.Scalar bitwise_and.Scalar_Tensor __and__.Tensor "
        "__and__.Scalar": jnp.bitwise_and,
        "bitwise_or.Tensor bitwise_or.Scalar bitwise_or.Scalar_Tensor __or__.Tensor "
        "__or__.Scalar": jnp.bitwise_or,
        "bitwise_xor.Tensor bitwise_xor.Scalar bitwise_xor.Scalar_Tensor __xor__.Tensor "
        "__xor__.Scalar": jnp.bitwise_xor,
        "bitwise_not": jnp.bitwise_not,
        "clamp clamp.Tensor": _clamp,
        "clamp_min clamp_min.Tensor": jnp.maximum,
        "clamp_max clamp_max.Tensor": jnp.minimum,
        "addcmul": lambda x, a, b, value: x + value * a * b,
        "addcdiv": lambda x, a, b, value: x + value * a / b,
        "lerp.Scalar lerp.Tensor": _lerp,
        "nan_to_num": _nan_to_num,
        "relu": lambda x: jnp.where(x < 0, jnp.zeros_like(x), x),
        "relu6": lambda x: jnp.clip(x, 0, 6),
        "hardtanh": jnp.clip,
        "hardsigmoid": lambda x: jnp.clip(x + 3, 0, 6) / 6,
        "hardswish": lambda x: x * jnp.clip(x + 3, 0, 6) / 6,
        "silu": jax.nn.silu,
        "mish": lambda x: x * jnp.tanh(softplus(x)),
        "softplus": softplus,
        "elu": _elu,
        "celu": lambda x, alpha=1.0: jnp.where(x > 0, x, alpha * jnp.expm1(x / alpha)),
        "leaky_relu": lambda x, slope: jnp.where(x > 0, x, x * slope),
        "_prelu_kernel": lambda x, weight: jnp.where(x > 0, x, x * weight),
        "threshold": lambda x, limit, value: jnp.where(x <= limit, value, x),
        "hardshrink": lambda x, limit: jnp.where((x >= -limit) & (x <= limit), 0, x),
        "softshrink": lambda x, limit: jnp.where(
            x > limit, x - limit, jnp.where(x < -limit, x + limit, x * 0)
        ),
    },
    in_opmath,
)


@lowers("pow.Tensor_Scalar")
def _power_of_number(node: Node, x: Any, exponent: Any) -> Any:
    x = cast(x, opmath(dtype_of(node)))
    if isinstance(exponent, float) and exponent.is_integer() and abs(exponent) < 64:
        exponent = int(exponent)
    if isinstance(exponent, int) and not isinstance(exponent, bool) and x.dtype != jnp.bool_:
        return lax.integer_pow(x, exponent)
    if exponent == 0.5 if not is_array(exponent) else False:
        return jnp.sqrt(x)
    return _power(x, cast(exponent, x.dtype))


@lowers("round.default", "round.decimals")
def _rounded(node: Node, x: Any, decimals: int = 0) -> Any:
    if not decimals or not _is_float(x):
        return _round(x)
    ten = jnp.asarray(10.0 ** abs(decimals), x.dtype)
    return jnp.round(x * ten) / ten if decimals > 0 else jnp.round(x / ten) * ten


# -- comparisons and choices -----------------------------------------------------------------------


def _compare(function: Any) -> Any:
    def lowered(node: Node, *args: Any) -> Any:
        return function(*promoted(node, args, *range(len(args))))

    return lowered


lowers_all(
    {
        "eq.Tensor eq.Scalar": jnp.equal,
        "ne.Tensor ne.Scalar": jnp.not_equal,
        "lt.Tensor lt.Scalar": jnp.less,
        "le.Tensor le.Scalar": jnp.less_equal,
        "gt.Tensor gt.Scalar": jnp.greater,
        "ge.Tensor ge.Scalar": jnp.greater_equal,
        "isnan": jnp.isnan,
        "isinf": jnp.isinf,
        "isfinite": jnp.isfinite,
        "isposinf": jnp.isposinf,
        "isneginf": jnp.isneginf,
        "signbit": lambda x: jnp.signbit(x) if _is_float(x) else x < 0,
        "logical_not": jnp.logical_not,
    },
    _compare,
)
lowers_all(
    {
        "logical_and": jnp.logical_and,
        "logical_or": jnp.logical_or,
        "logical_xor": jnp.logical_xor,
    },
    lambda function: lambda node, x, y: function(x, y),
)


@lowers("where.self", "where.ScalarSelf", "where.ScalarOther", "where.Scalar")
def _where(node: Node, condition: Any, x: Any, y: Any) -> Any:
    dtype = dtype_of(node)
    return jnp.where(condition != 0, cast(x, dtype), cast(y, dtype))


@lowers("masked_fill.Scalar", "masked_fill.Tensor")
def _masked_fill(node: Node, x: Any, mask: Any, value: Any) -> Any:
    return jnp.where(mask, cast(value, x.dtype), x)


@lowers("bitwise_left_shift.Tensor", "bitwise_left_shift.Tensor_Scalar", "__lshift__.Tensor",
        "__lshift__.Scalar")  # fmt: skip
def _shift_left(node: Node, x: Any, y: Any) -> Any:
    x, y = promoted(node, (x, y), 0, 1)
    bits = x.dtype.itemsize * 8
    return jnp.where((y < 0) | (y >= bits), 0, lax.shift_left(*jnp.broadcast_arrays(x, y)))


@lowers("bitwise_right_shift.Tensor", "bitwise_right_shift.Tensor_Scalar", "__rshift__.Tensor",
        "__rshift__.Scalar")  # fmt: skip
def _shift_right(node: Node, x: Any, y: Any) -> Any:
    x, y = promoted(node, (x, y), 0, 1)
    bits = x.dtype.itemsize * 8
    y = jnp.where((y < 0) | (y >= bits), bits - 1, y)
    return jnp.right_shift(*jnp.broadcast_arrays(x, y))


@lowers("frexp.Tensor")
def _frexp(node: Node, x: Any) -> Any:
    return jnp.frexp(x)


# -- complex numbers -------------------------------------------------------------------------------

lowers_all(
    {
        "_conj _conj_physical conj_physical": jnp.conj,
        "_neg_view": jnp.negative,
        "resolve_conj resolve_neg": lambda x: x,
        "angle": jnp.angle,
        "real": jnp.real,
        "imag": jnp.imag,
        "view_as_real": lambda x: jnp.stack([x.real, x.imag], axis=-1),
        "view_as_complex": lambda x: lax.complex(x[..., 0], x[..., 1]),
        "complex": lambda x, y: lax.complex(*jnp.broadcast_arrays(x, y)),
        "polar": lambda r, phi: lax.complex(r * jnp.cos(phi), r * jnp.sin(phi)),
    },
    lambda function: lambda node, *args: function(*args),
)


@lowers("_to_copy.default", "to.dtype", "clone.default", "lift_fresh_copy.default", "lift.default",
        "contiguous.default", "alias.default", "alias_copy.default", "detach.default",
        "detach_copy.default", "lift_fresh.default")  # fmt: skip
def _copy(node: Node, x: Any, *rest: Any) -> Any:
    return cast(x, dtype_of(node))


@lowers("copy.default", "fill.Scalar", "fill.Tensor")
def _overwritten(node: Node, x: Any, source: Any, *rest: Any) -> Any:
    return jnp.broadcast_to(cast(source, DTYPES[type_of(node).dtype]), shape_of(node))
