"""Run-time numbers in functional graphs.

A compiled graph takes its run-time numbers as elements of one float64 and one int64 tensor, so that
a changed learning rate needs no new graph. Type promotion must treat them as Python numbers: they
never raise the precision of a tensor, and are not themselves rounded to half precision. So each is
converted to the dtype in which eager computes with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from torpor._torch import OpOverload
from torpor.backends.fx import functional
from torpor.backends.fx.functional import NotTraceable
from torpor.ir.types import TensorType
from torpor.ops.spec import OpSpec
from torpor.passes.functionalize import functional_name
from torpor.passes.overwrite import BATCH_NORMS

aten = torch.ops.aten


class Number:
    """A Python number whose value is only known at run time."""

    __slots__ = ("kind", "tensor")

    def __init__(self, tensor: torch.Tensor, kind: type) -> None:
        self.tensor = tensor  # 0-dim, float64 or int64
        self.kind = kind

    def sample(self) -> Any:
        """An arbitrary number of the same kind: type promotion depends on nothing else."""
        return self.kind(1)

    def to(self, dtype: torch.dtype) -> torch.Tensor:
        return self.tensor.to(dtype)


def has_numbers(args: list[Any]) -> bool:
    """Whether `args` contain run-time numbers."""
    return any(
        type(arg) is Number or (type(arg) is list and any(type(item) is Number for item in arg))
        for arg in args
    )


def call(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    """Call an op that takes run-time numbers; outputs in the node's order."""
    if spec.name in BATCH_NORMS:
        return functional.FORMS[spec.name](spec, args, types)
    name = functional_name(spec.target._opname)
    named = {a.name: value for a, value in zip(spec.arguments, args, strict=True)}
    written = [named.pop(spec.arguments[i].name) for i in spec.mutated if _is_out(spec, i)]
    if name.startswith("_foreach_"):
        return _call_foreach(name, spec, named, types)
    if len(written) > 1 or len(types) != 1:
        raise NotTraceable(f"{spec.name} of a number that changes")
    return [_call_pointwise(name, spec.name, list(named.values()), types[0])]


def _is_out(spec: OpSpec, position: int) -> bool:
    return spec.arguments[position].keyword_only


def _call_foreach(name: str, spec: OpSpec, named: dict[str, Any], types: list[Any]) -> list[Any]:
    """One call per tensor of the list, like eager's slow path."""
    single = name.removeprefix("_foreach_")
    length = len(types)
    columns = [v if isinstance(v, list) else [v] * length for v in named.values()]
    if any(len(column) != length for column in columns):
        raise NotTraceable(f"{spec.name} of lists of different lengths")
    rows = zip(types, *columns, strict=True)
    return [_call_pointwise(single, spec.name, args, type_) for type_, *args in rows]


def _call_pointwise(name: str, full_name: str, args: list[Any], type_: TensorType) -> torch.Tensor:
    form = POINTWISE.get(name)
    if form is None:
        raise NotTraceable(f"{full_name} of a number that changes")
    return functional.cast(form(args, type_), type_)  # type: ignore[no-any-return]  # a tensor


# -- dtypes ----------------------------------------------------------------------------------------

_WIDE: Final = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def common_dtype(operands: list[Any]) -> torch.dtype:
    """The dtype in which eager computes, promoting numbers as Python numbers."""
    tensors = [o for o in operands if isinstance(o, torch.Tensor)]
    numbers = [o.sample() if type(o) is Number else o for o in operands if not _is_tensor(o)]
    dtype = tensors[0].dtype
    stand_in = tensors[0]
    for other in tensors[1:]:
        dtype = torch.result_type(stand_in, other)
        stand_in = _like(stand_in, other, dtype)
    for number in numbers:
        dtype = torch.result_type(stand_in, number)
        stand_in = _like(stand_in, stand_in, dtype)
    return dtype


def _is_tensor(operand: Any) -> bool:
    return isinstance(operand, torch.Tensor)


def _like(one: torch.Tensor, other: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A meta tensor of that dtype that promotes like both: 0-dim only if both are."""
    shape = (1,) if one.dim() or other.dim() else ()
    return torch.empty(shape, dtype=dtype, device="meta")


def _operands(args: list[Any], *, wide: bool) -> list[Any]:
    """Tensors and numbers, converted to the dtype in which the op is computed."""
    operands = [a for a in args if a is not None]
    dtype = common_dtype(operands)
    if wide:
        dtype = _WIDE.get(dtype, dtype)
    return [_as_tensor(a, dtype) for a in args]


def _as_tensor(arg: Any, dtype: torch.dtype) -> Any:
    if arg is None:
        return None
    if isinstance(arg, (torch.Tensor, Number)):
        return arg.to(dtype)
    return torch.full((), arg, dtype=dtype)


# -- forms of single ops ---------------------------------------------------------------------------

Pointwise = Callable[[list[Any], TensorType], torch.Tensor]


def _binary(op: OpOverload, *, wide: bool = False) -> Pointwise:
    def form(args: list[Any], type_: TensorType) -> torch.Tensor:
        left, right = _operands(args[:2], wide=wide)
        return op(left, right, *args[2:])  # type: ignore[no-any-return]  # torch.ops

    return form


def _add(args: list[Any], type_: TensorType) -> torch.Tensor:
    return _sum(args, torch.add)


def _sub(args: list[Any], type_: TensorType) -> torch.Tensor:
    return _sum(args, torch.sub)


def _rsub(args: list[Any], type_: TensorType) -> torch.Tensor:
    return _sum(args, torch.rsub)


def _sum(args: list[Any], op: Callable[..., torch.Tensor]) -> torch.Tensor:
    """`add`, `sub` and `rsub`, whose third argument scales one of the others."""
    alpha = args[2] if len(args) > 2 else 1
    left, right = _operands(args[:2], wide=True)
    if type(alpha) is int and alpha == 1:
        return op(left, right)
    scale = _as_tensor(alpha, left.dtype)
    return scale_second(op, left, right, scale)


def scale_second(op: Any, left: Any, right: Any, scale: torch.Tensor) -> torch.Tensor:
    """`op(left, right, alpha=scale)` for an alpha that is a tensor."""
    if op is torch.rsub:
        return right - left * scale  # type: ignore[no-any-return]  # tensors
    return op(left, right * scale)  # type: ignore[no-any-return]  # tensors


def _div(args: list[Any], type_: TensorType) -> torch.Tensor:
    rounding = args[2] if len(args) > 2 else None
    left, right = _operands(args[:2], wide=True)
    return torch.div(left, right, rounding_mode=rounding)


def _lerp(args: list[Any], type_: TensorType) -> torch.Tensor:
    start, end, weight = _operands(args, wide=True)
    small = weight.abs() < 0.5
    rest = end - start
    return torch.where(small, start + weight * rest, end - rest * (1 - weight))


def _addcmul(args: list[Any], type_: TensorType) -> torch.Tensor:
    source, left, right, value = _with_value(args)
    return source + value * left * right  # type: ignore[no-any-return]  # tensors


def _addcdiv(args: list[Any], type_: TensorType) -> torch.Tensor:
    source, left, right, value = _with_value(args)
    return source + value * left / right  # type: ignore[no-any-return]  # tensors


def _with_value(args: list[Any]) -> list[Any]:
    value = args[3] if len(args) > 3 else 1
    dtype = common_dtype(args[:3])
    dtype = _WIDE.get(dtype, dtype)
    return [_as_tensor(a, dtype) for a in (*args[:3], value)]


def _clamp(args: list[Any], type_: TensorType) -> torch.Tensor:
    tensor, low, high = _operands([*args, None][:3], wide=False)
    return torch.clamp(tensor, low, high)


def _masked_fill(args: list[Any], type_: TensorType) -> torch.Tensor:
    tensor, mask, number = args
    return torch.where(mask, _as_tensor(number, type_.dtype), tensor)


def _fill(args: list[Any], type_: TensorType) -> torch.Tensor:
    return _as_tensor(args[1], type_.dtype).expand(type_.shape).clone()  # type: ignore[no-any-return]  # a tensor


POINTWISE: Final[dict[str, Pointwise]] = {
    "add": _add,
    "sub": _sub,
    "rsub": _rsub,
    "mul": _binary(aten.mul.Tensor, wide=True),
    "div": _div,
    "lerp": _lerp,
    "addcmul": _addcmul,
    "addcdiv": _addcdiv,
    "clamp": _clamp,
    "clamp_min": _binary(aten.maximum.default),
    "clamp_max": _binary(aten.minimum.default),
    "maximum": _binary(aten.maximum.default),
    "minimum": _binary(aten.minimum.default),
    "masked_fill": _masked_fill,
    "fill": _fill,
    **{
        name: _binary(getattr(aten, name).Tensor)
        for name in ("eq", "ne", "lt", "le", "gt", "ge", "remainder", "fmod")
    },
    "atan2": _binary(aten.atan2.default),
    "floor_divide": _binary(aten.floor_divide.default),
}
