"""Calls nodes as functional ops.

A node has value semantics; a compiler needs an op that has them too. An op that writes is replaced
by its functional variant (`add_` -> `add`, `sin.out` -> `sin`, `_foreach_mul_` -> `_foreach_mul`),
and its result is cast to the dtype of the argument it writes to.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import torch

from torpor.backends import kernels
from torpor.ir.types import TensorType
from torpor.ops.spec import OpSpec, ReturnKind
from torpor.passes.functionalize import IN_DTYPE_OF_RESULT, functional_name, twin_of
from torpor.passes.overwrite import BATCH_NORMS

aten = torch.ops.aten


class NotTraceable(Exception):
    """A node has no functional form; it runs on its own, outside compiled code."""


class NoValue:
    """Stands for an output that a functional form does not compute."""

    __slots__ = ()


NO_VALUE: Final = NoValue()

Form = Callable[[OpSpec, list[Any], list[Any]], list[Any]]
"""Takes the spec, the arguments in schema order and the output types; returns the outputs."""


def call(spec: OpSpec, args: list[Any], types: list[Any], operand_types: list[Any]) -> list[Any]:
    """Call the functional form of an op; outputs in the node's order."""
    form = FORMS.get(spec.name)
    if form is not None:
        return form(spec, args, types)
    _refuse_scaled_booleans(spec, args, types)
    if spec.target._opname in STRIDED:
        args = [_with_promised_strides(args[0], operand_types[0]), *args[1:]]
        _check_bounds(spec, args)
    if spec.mutated:
        return _call_twin(spec, args, types)
    return kernels.call(spec, args)


_SCALED: Final = frozenset({"add", "add_", "_foreach_add", "_foreach_add_"})


def _refuse_scaled_booleans(spec: OpSpec, args: list[Any], types: list[Any]) -> None:
    """Inductor (torch 2.13) computes `boolean + alpha * boolean` in int64, and stores int64.

    That writes eight bytes per one-byte element: past the end of the buffer.
    """
    if spec.target._opname not in _SCALED or types[0] is None or types[0].dtype is not torch.bool:
        return
    for argument, value in zip(spec.arguments, args, strict=True):
        if argument.name == "alpha" and value != 1:
            raise NotTraceable(f"{spec.name} of booleans with alpha")


# -- ops that write --------------------------------------------------------------------------------


def _call_twin(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    twin = twin_of(spec.target)
    if twin is None and spec.target.namespace != "aten":
        return _call_on_copies(spec, args)
    if twin is None:
        raise NotTraceable(f"{spec.name} has no functional twin")
    pairs = list(zip(spec.arguments, args, strict=True))
    if functional_name(spec.target._opname) in IN_DTYPE_OF_RESULT:
        dtype = types[-1].dtype
        pairs = [(a, dtype if a.name == "dtype" and v is None else v) for a, v in pairs]
    positional = [value for a, value in pairs if not a.keyword_only]
    keywords = {a.name: v for a, v in pairs if a.keyword_only and not a.mutated}
    made = kernels.flat(twin(*positional, **keywords))
    if len(made) != len(types):
        raise NotTraceable(f"{twin} makes {len(made)} tensors where {spec.name} makes {len(types)}")
    fresh = sum(1 for r in spec.returns if r.kind in (ReturnKind.FRESH, ReturnKind.VIEW))
    return [*made[:fresh], *(cast(m, t) for m, t in zip(made[fresh:], types[fresh:], strict=True))]


def _call_on_copies(spec: OpSpec, args: list[Any]) -> list[Any]:
    """Call a custom op that writes, on copies: compilers functionalize it from its schema."""
    if any(r.kind is ReturnKind.ARGUMENT for r in spec.returns):
        raise NotTraceable(f"{spec.name} returns what it writes to, which torch does not trace")
    args = [_writable(v) if a.mutated else v for a, v in zip(spec.arguments, args, strict=True)]
    return kernels.call(spec, args)


def _writable(arg: Any) -> Any:
    if isinstance(arg, (tuple, list)):
        return [_writable(item) for item in arg]
    return None if arg is None else arg.clone()


def cast(tensor: Any, type_: TensorType) -> Any:
    """`tensor` cast to the inferred dtype."""
    return tensor if tensor.dtype is type_.dtype else tensor.to(type_.dtype)


# -- ops that depend on memory layout --------------------------------------------------------------

STRIDED: Final = frozenset(
    # ops whose result depends on the strides of their argument
    {"as_strided", "as_strided_scatter", "as_strided_copy"}
)


def _with_promised_strides(tensor: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """`tensor` with eager's strides; the functional form may have produced others."""
    if tensor.stride() == type_.stride and tensor.storage_offset() == type_.offset:
        return tensor
    if type_.offset or not type_.is_dense:
        raise NotTraceable(f"depends on the memory behind {type_!r}")
    return with_strides(tensor, type_)


def _check_bounds(spec: OpSpec, args: list[Any]) -> None:
    """Refuse a window that exceeds its tensor's memory: compiled code has no bounds check."""
    named = {a.name: value for a, value in zip(spec.arguments, args, strict=True)}
    tensor, size, stride = named["self"], named["size"], named["stride"]
    offset = named["storage_offset"]
    numbers = (*size, *stride, tensor.storage_offset() if offset is None else offset)
    if any(type(number) is not int for number in numbers) or 0 in size:
        return  # symbolic sizes: checked when recorded
    last = sum((n - 1) * s for n, s in zip(size, stride, strict=True)) + numbers[-1]
    if min(numbers) < 0 or last * tensor.itemsize >= tensor.untyped_storage().nbytes():
        raise NotTraceable(f"{spec.name} leaves the memory of its tensor")


def with_strides(tensor: torch.Tensor, type_: TensorType) -> torch.Tensor:
    """A copy of `tensor` with the strides of `type_`, which is dense; functional ops only."""
    order = sorted(range(tensor.dim()), key=lambda d: (-type_.stride[d], -type_.shape[d]))
    inverse = [order.index(dim) for dim in range(tensor.dim())]
    copy = tensor.permute(order).clone(memory_format=torch.contiguous_format)
    return copy.permute(inverse)


# -- hand-written forms ----------------------------------------------------------------------------


def _reshape(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    """A view as a reshape: with value semantics, strides need not permit a view."""
    return [args[0].reshape(types[0].shape)]


def _view_dtype(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    tensor, dtype = args
    if tensor.dim() and tensor.dtype.itemsize != dtype.itemsize:
        tensor = tensor.contiguous()
    return [tensor.view(dtype)]


def _zero(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    return [torch.zeros_like(args[0])]


def _zero_all(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    return [torch.zeros_like(tensor) for tensor in args[0]]


def _copy(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    return [_copied(args[0], args[1])]


def _copy_all(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    return [_copied(to, source) for to, source in zip(args[0], args[1], strict=True)]


def _copied(to: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    return source.to(device=to.device, dtype=to.dtype).expand(to.shape).clone()


def _fill(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    return [torch.full_like(args[0], args[1])]


def _batch_norm(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    """All batch norm variants; only cuDNN's and MIOpen's backward read the omitted outputs."""
    named = dict(zip((a.name for a in spec.arguments), args, strict=True))
    source: torch.Tensor = named["input"]
    mean, variance = named.get("running_mean"), named.get("running_var")
    training = named.get("training", named.get("train", True))
    eps = named.get("eps", named.get("epsilon"))
    common = (source, named["weight"], named["bias"])
    momentum = named.get("momentum", named.get("exponential_average_factor"))
    if mean is None and variance is None:
        made = aten._native_batch_norm_legit.no_stats(*common, training, 0.0, eps)
        statistics: tuple[Any, ...] = ()
    elif mean is None or variance is None:
        raise NotTraceable("batch norm with one of its running statistics")
    else:
        functional = aten._native_batch_norm_legit_functional
        known = isinstance(momentum, float)
        made = functional(*common, mean, variance, training, momentum if known else 1.0, eps)
        statistics = tuple(made[3:])
        if not known and training:
            pairs = zip((mean, variance), statistics, strict=True)
            statistics = tuple(_moved(old, new, momentum) for old, new in pairs)
    left_out = [_left_out(t, source) for t in types[3 : len(types) - len(statistics)]]
    return [*made[:3], *left_out, *statistics]


def _left_out(type_: TensorType, like: torch.Tensor) -> Any:
    """An output that the functional form does not compute; it can be made if it is empty."""
    return NO_VALUE if type_.numel else like.new_empty(type_.shape, dtype=type_.dtype)


def _moved(old: torch.Tensor, new: torch.Tensor, momentum: Any) -> torch.Tensor:
    """`old` moved towards `new` by a momentum that is a run-time number."""
    weight = momentum.to(old.dtype)
    return old * (1 - weight) + new * weight  # type: ignore[no-any-return]  # tensors


def _cudnn_batch_norm_backward(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    """Computed from the saved statistics alone, without cuDNN's reserve space."""
    source, grad, weight, mean, variance, saved_mean, saved_scale, eps, _ = args
    statistics = (mean, variance, saved_mean, saved_scale)
    masked = (True, eps, [True, True, True])
    return list(aten.native_batch_norm_backward(grad, source, weight, *statistics, *masked))


def _uniform(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    tensor, low, high = args[:3]
    drawn = torch.rand_like(tensor) * (high - low) + low
    return [drawn]


def _normal(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    tensor, mean, deviation = args[:3]
    return [torch.randn_like(tensor) * deviation + mean]


def _bernoulli(spec: OpSpec, args: list[Any], types: list[Any]) -> list[Any]:
    tensor, p = args[:2]
    return [(torch.rand_like(tensor, dtype=torch.float32) < p).to(tensor.dtype)]


UNREAD: Final = {"aten.cudnn_batch_norm_backward.default": 8}
"""The position of an argument that a hand-written form ignores."""

FORMS: Final[dict[str, Form]] = {
    "aten.view.default": _reshape,
    "aten._unsafe_view.default": _reshape,
    "aten._reshape_alias.default": _reshape,
    "aten.view.dtype": _view_dtype,
    "aten.zero_.default": _zero,
    "aten._foreach_zero_.default": _zero_all,
    "aten.copy_.default": _copy,
    "aten._foreach_copy_.default": _copy_all,
    "aten.fill_.Scalar": _fill,
    **dict.fromkeys(BATCH_NORMS, _batch_norm),
    "aten.cudnn_batch_norm_backward.default": _cudnn_batch_norm_backward,
    "aten.uniform_.default": _uniform,
    "aten.normal_.default": _normal,
    "aten.bernoulli_.float": _bernoulli,
    "aten.bernoulli.p": _bernoulli,
}
