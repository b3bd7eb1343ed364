"""Output types of an op, inferred once per op, operand types and attributes.

Fake tensors on the physical device give strides, dtypes and eager's errors. A call takes a tenth of
a millisecond, so every result is memoized by types: twelve equal layers pay once.
"""

from __future__ import annotations

import abc
import re
import warnings
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch

from torpor import _torch, config
from torpor.errors import TorporError
from torpor.inference import type_rules
from torpor.inference.elementwise import elementwise_types
from torpor.inference.indexing import is_doubtful
from torpor.inference.strides import has_free_strides, restrided
from torpor.ir.node import Value
from torpor.ir.types import ScalarType, TensorType, Types, contiguous_strides
from torpor.ops.spec import ArgKind, OpSpec, ReturnKind

Physical = Callable[[torch.device], torch.device]


def _itself(device: torch.device) -> torch.device:
    return device


_physical: list[Physical] = [_itself]


def work_on(to: Physical) -> None:
    """Set the function that maps a device to its physical device, for nodes made by hand."""
    _physical[0] = to


def physical_device(device: torch.device) -> torch.device:
    """The physical device that backs `device`."""
    return _physical[0](device)


class NotRecordable(Exception):
    """The op cannot be recorded and must run eagerly: as a `fallback`, or else as a sync."""

    def __init__(self, reason: str, fallback: bool) -> None:
        super().__init__(reason)
        self.reason = reason
        self.fallback = fallback


class DeviceMismatch(Exception):
    """Operands are on different devices that cannot be mixed."""


_memo: dict[Any, Types | NotRecordable] = {}

MIXES_DEVICES: Final = frozenset(
    {"copy_", "copy", "_to_copy", "index", "index_put_", "index_put", "_index_put_impl_",
     "_index_put_impl", "_unsafe_index", "_unsafe_index_put", "_copy_from"}
)  # fmt: skip


def infer(
    spec: OpSpec, key: tuple[Any, ...], bound: list[Any], sample: dict[Value, Any], to: Physical
) -> Types:
    """The types of a node's outputs: returned tensors, then the new contents of written ones.

    `key` is the op's intern key; `bound` its arguments, with values for tensors; `sample` has a
    number for each run-time scalar; `to` maps a device to the physical one that backs it.
    """
    if spec.target._opname.startswith("_foreach_"):
        return _infer_items(spec, key, bound, sample, to)
    return _remembered(spec, key, bound, sample, to)


def _remembered(
    spec: OpSpec, key: tuple[Any, ...], bound: list[Any], sample: dict[Value, Any], to: Physical
) -> Types:
    memo_key = (spec.kind, types_in(key))
    known = _memo.get(memo_key)
    if known is None:
        try:
            known = _infer(spec, bound, sample, to)
        except NotRecordable as refusal:
            known = refusal
        if len(_memo) >= config.max_memoised_types:
            _memo.clear()
        _memo[memo_key] = known
    if type(known) is NotRecordable:
        raise known
    return known  # type: ignore[return-value]  # the refusal was raised above


_LISTS = (ArgKind.TENSORS, ArgKind.SCALARS)


def _infer_items(
    spec: OpSpec, key: tuple[Any, ...], bound: list[Any], sample: dict[Value, Any], to: Physical
) -> Types:
    """Types of an op on the items of lists: one item of each kind is inferred."""
    lists = [i for i, a in enumerate(spec.arguments) if a.kind in _LISTS and bound[i] is not None]
    length = len(bound[lists[0]])
    if any(len(bound[i]) != length for i in lists):
        return _remembered(spec, key, bound, sample, to)
    kinds: dict[Any, int] = {}  # kinds of items, numbered in order of occurrence
    kind_of = [
        kinds.setdefault(kind, len(kinds))
        for kind in zip(*(types_in(key[i]) for i in lists), strict=True)
    ]
    first = [kind_of.index(kind) for kind in range(len(kinds))]
    one_key, one_bound = list(key), list(bound)
    for i in lists:
        one_key[i] = tuple([key[i][item] for item in first])
        one_bound[i] = tuple([bound[i][item] for item in first])
    types = _remembered(spec, tuple(one_key), one_bound, sample, to)
    runs = range(0, len(types), max(len(kinds), 1))  # for each list of outputs, a type per kind
    return tuple([types[run + kind] for run in runs for kind in kind_of])


def forget() -> None:
    """Drop all memoized inferences."""
    _memo.clear()


def types_in(key: tuple[Any, ...]) -> tuple[Any, ...]:
    """`key` with values replaced by their types."""
    return tuple(
        [
            k.type if type(k) is Value else types_in(k) if type(k) is tuple else k
            for k in key
        ]
    )  # fmt: skip


def _infer(spec: OpSpec, bound: list[Any], sample: dict[Value, Any], to: Physical) -> Types:
    device = common_device(spec, bound)
    custom = type_rules.CUSTOM.get(spec.name)
    if custom is not None:
        return custom(spec, bound, sample, to)
    rule = type_rules.RULES.get(spec.name)
    if rule is not None:
        types = rule(bound)
        if types is not None:
            return types
    types = elementwise_types(spec, bound)
    if types is not None:
        return types
    return _ask_torch(spec, bound, sample, to, device)


def _ask_torch(
    spec: OpSpec,
    bound: list[Any],
    sample: dict[Value, Any],
    to: Physical,
    device: torch.device | None,
) -> Types:
    """Types by fake tensors or by trial, with checks that fake tensors lack."""
    if (
        spec.name in type_rules.TRIED
        or _is_mixed(spec, bound)
        or _is_strided(spec, bound)
        or _is_the_gpus(spec, device, to)
    ):
        return _try(spec, bound, sample, to, device)
    fakes = _Fakes(to, sample)
    with _torch.without_torch_function(), torch.no_grad(), _torch.quiet_fakes(), fakes.mode:
        fake_args = [
            fakes.of(v, fresh=a.mutated) for a, v in zip(spec.arguments, bound, strict=True)
        ]
        result = _run_fake(spec, fake_args)
        types = _collect(spec, result, bound, fake_args, device)
    if spec.draws(bound):  # a trial would draw random numbers
        return types
    if _is_grown(spec, bound, types):
        types = _try(spec, bound, sample, to, device)
        if _is_grown(spec, bound, types):
            raise NotRecordable(f"{spec.name} resizes what it writes to", fallback=True)
    if _is_resized(spec, bound, types):
        return _tried_or(types, spec, bound, sample, to, device)
    try:
        _check(spec, bound, sample, to)
    except Suspicious:
        _confirm(spec, bound, sample, to)
    types = restrided(spec, bound, types)
    if _is_empty(spec, bound, types) or _is_free(spec, bound):
        return _tried_or(types, spec, bound, sample, to, device)
    return types


def _is_the_gpus(spec: OpSpec, device: torch.device | None, to: Physical) -> bool:
    """Whether this is an op whose GPU kernel chooses the memory format of its results."""
    known = spec.target._opname not in type_rules.TRIED_ON_GPUS or device is None
    return not known and to(device).type == "cuda"  # type: ignore[arg-type]  # not None


def _is_mixed(spec: OpSpec, bound: list[Any]) -> bool:
    """Whether this is a norm in mixed precision: half inputs, but other weights or statistics."""
    if spec.name not in type_rules.TRIED_WHEN_MIXED:
        return False
    return len({type_.dtype for type_ in _operand_types(spec, bound)}) > 1


def _is_strided(spec: OpSpec, bound: list[Any]) -> bool:
    """A norm of a tensor that was transposed."""
    if spec.name not in type_rules.TRIED_WHEN_STRIDED:
        return False
    return any(t.stride != contiguous_strides(t.shape) for t in _operand_types(spec, bound))


def _is_grown(spec: OpSpec, bound: list[Any], types: Types) -> bool:
    """Whether an in-place op would change the size of its tensor, which eager mostly rejects."""
    if len(spec.mutated) != 1 or spec.arguments[spec.mutated[0]].keyword_only:
        return False
    old = bound[spec.mutated[0]]
    olds = old if type(old) is tuple else (old,)
    pairs = zip(olds, types[len(types) - len(olds) :], strict=True)
    return any(type(o) is Value and n is not None and n.shape != o.type.shape for o, n in pairs)


_SMALL_TRIAL: Final = 4096
"""Maximum number of operand elements for a trial run of the real kernel."""


def _is_empty(spec: OpSpec, bound: list[Any], types: Types) -> bool:
    """Whether a result is empty, or all operands are, which fake kernels often get wrong."""
    if spec.mutated or any(r.kind is not ReturnKind.FRESH for r in spec.returns):
        return False
    operands = list(_operand_types(spec, bound))
    empty = any(type_ is not None and type_.numel == 0 for type_ in types)
    empty = empty or (bool(operands) and not any(t.numel for t in operands))
    return empty and _is_small(spec, bound)


def _is_free(spec: OpSpec, bound: list[Any]) -> bool:
    """Whether operands have ambiguous strides, for which fake and real kernels differ."""
    if spec.mutated or any(r.kind is not ReturnKind.FRESH for r in spec.returns):
        return False
    free = any(map(has_free_strides, _operand_types(spec, bound)))
    return free and spec.target.namespace == "aten" and _is_small(spec, bound)


def _is_small(spec: OpSpec, bound: list[Any]) -> bool:
    return sum(t.span for t in _operand_types(spec, bound)) <= _SMALL_TRIAL


def _is_resized(spec: OpSpec, bound: list[Any], types: Types) -> bool:
    """Whether an `out=` tensor is resized: only the real kernel knows its new strides."""
    outs = [bound[i] for i in spec.mutated if spec.arguments[i].keyword_only]
    values = [v for out in outs for v in (out if type(out) is tuple else (out,)) if v is not None]
    if not values:
        return False
    news = types[len(types) - len(values) :]
    return any(v.type.numel == 0 or v.type is not n for v, n in zip(values, news, strict=True))


def _tried_or(
    types: Types,
    spec: OpSpec,
    bound: list[Any],
    sample: dict[Value, Any],
    to: Physical,
    device: Any,
) -> Types:
    """Types by trial; `types` if the kernel rejects the contents that it is tried on."""
    try:
        return _try(spec, bound, sample, to, device)
    except NotRecordable:
        raise
    except Exception as error:
        # no operand has an element: the error is not about contents
        if _TYPE_ERROR.search(str(error)) or not any(t.numel for t in _operand_types(spec, bound)):
            raise Suspicious(str(error)) from None
        return types


class Suspicious(Exception):
    """Fake tensors accept the op, but eager probably does not: ask eager before recording it."""


def _check(spec: OpSpec, bound: list[Any], sample: dict[Value, Any], to: Physical) -> None:
    """Check for errors that fake kernels do not detect."""
    _check_writes(spec, bound)
    known = spec.name in type_rules.WHOLLY_KNOWN  # but its rule does not accept this call
    if known or spec.target._opname in type_rules.UNCHECKED_SIZES:
        raise Suspicious(f"{spec.name} is checked by its kernel alone")
    if is_doubtful(spec, bound):
        raise Suspicious(f"{spec.name} takes indices that may not fit")
    if _casts(spec, bound):
        _check_cast(spec, bound, sample, to)
    pointwise = torch.Tag.pointwise in spec.target.tags
    if pointwise:
        _check_broadcast(spec, bound)
    if spec.target.namespace != "aten":  # a custom op's kernel must not run for a check
        return
    if pointwise or spec.mutated or spec.target._opname in type_rules.UNCHECKED:
        _check_dtypes(_Units(to, sample), spec, bound)
    if _is_unusual(spec, bound, to):
        _check_kernel(spec, bound, sample, to)


def _is_unusual(spec: OpSpec, bound: list[Any], to: Physical) -> bool:
    """Whether the dtype is one that not every kernel supports: not a 32 or 64 bit float."""
    first = next(_operand_types(spec, bound), None)
    if first is None or any(r.kind is ReturnKind.VIEW for r in spec.returns):
        return False
    if first.dtype in (torch.float16, torch.bfloat16):
        return to(first.device).type == "cpu"
    return first.dtype not in (torch.float32, torch.float64)


def _check_kernel(spec: OpSpec, bound: list[Any], sample: dict[Value, Any], to: Physical) -> None:
    """Try the real kernel on zeros: with the real sizes if they are small, else with sizes of 1."""
    if _is_small(spec, bound):
        _check_cast(spec, bound, sample, to)
    else:
        _check_dtypes(_Units(to, sample, 0), spec, bound)


def _casts(spec: OpSpec, bound: list[Any]) -> bool:
    """Whether an `out=` tensor has another dtype than the operands: many kernels do not cast."""
    outs = [bound[i] for i in spec.mutated if spec.arguments[i].keyword_only]
    first = next(_operand_types(spec, bound), None)
    return any(
        type(value) is Value and first is not None and value.type.dtype != first.dtype
        for out in outs
        for value in (out if type(out) is tuple else (out,))
    )


def _check_cast(spec: OpSpec, bound: list[Any], sample: dict[Value, Any], to: Physical) -> None:
    """Try the real kernel on zeros; errors about contents (a singular matrix) are ignored."""
    try:
        _try_with(_Filled(to, sample, 0), spec, bound, None)
    except Exception as error:
        if _DTYPE_ERROR.search(str(error)):
            raise Suspicious(str(error)) from None


def _confirm(spec: OpSpec, bound: list[Any], sample: dict[Value, Any], to: Physical) -> None:
    """Try a suspicious op in eager, on zeros with the real sizes and strides."""
    try:
        _try_with(_Filled(to, sample, 0), spec, bound, None)
    except Exception as error:
        raise Suspicious(str(error)) from None


def _check_writes(spec: OpSpec, bound: list[Any]) -> None:
    """Written tensors must not overlap themselves, nor, for most ops, be empty."""
    for position in spec.mutated:
        value = bound[position]
        for item in value if type(value) is tuple else (value,):
            if type(item) is not Value:
                continue
            if item.type.numel and not item.type.is_injective:
                raise Suspicious(f"{spec.name} writes to overlapping memory")
            if not item.type.numel and _is_small(spec, bound):
                raise Suspicious(f"{spec.name} writes to no memory")


def _check_broadcast(spec: OpSpec, bound: list[Any]) -> None:
    """A tensor that is written to in place must have the broadcast size."""
    if not spec.mutated or spec.arguments[spec.mutated[0]].keyword_only:
        return
    written = bound[spec.mutated[0]]
    if type(written) is Value:
        shapes = [type_.shape for type_ in _operand_types(spec, bound)]
        if tuple(torch.broadcast_shapes(*shapes)) != written.type.shape:
            raise Suspicious(f"{spec.name} would have to resize what it writes to")


def _check_dtypes(units: _Units, spec: OpSpec, bound: list[Any]) -> None:
    """Try the real kernel on tensors of one element: fake kernels accept wrong dtypes.

    Sizes of 1 fit nearly every op; if they do not, the error is about sizes and ignored.
    """
    with _torch.kernels(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        args = [
            units.out(v) if a.mutated and a.keyword_only else units.of(v, fresh=a.mutated)
            for a, v in zip(spec.arguments, bound, strict=True)
        ]
        positional, keywords = spec.call_arguments(args)
        try:
            spec.target(*positional, **keywords)
        except Exception as error:
            if _DTYPE_ERROR.search(str(error)):
                raise Suspicious(str(error)) from None


_DTYPE_ERROR = re.compile(
    r"dtype|out of range|can't be cast|not implemented for|scalar type|not support"
    r"|n't support|only supports|[Ii]nteger|[Cc]omplex|boolean|to be Half"
)

_TYPE_ERROR = re.compile(f"{_DTYPE_ERROR.pattern}|memory location|out of bounds for storage")


def _try(
    spec: OpSpec, bound: list[Any], sample: dict[Value, Any], to: Physical, device: Any
) -> Types:
    """Types from a trial run of the real kernel, for ops whose fake kernels are wrong.

    Most kernels accept tensors of ones (pivots, diagonals); if ones are out of range, zeros.
    """
    try:
        return _try_with(_Filled(to, sample, 1), spec, bound, device)
    except NotRecordable:
        raise
    except Exception:
        return _try_with(_Filled(to, sample, 0), spec, bound, device)


def _try_with(stand_ins: _Filled, spec: OpSpec, bound: list[Any], device: Any) -> Types:
    with _torch.kernels(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pairs = zip(spec.arguments, bound, strict=True)
        args = [stand_ins.of(v, fresh=a.mutated) for a, v in pairs]
        positional, keywords = spec.call_arguments(args)
        return _collect(spec, spec.target(*positional, **keywords), bound, args, device)


def fake_arguments(bound: list[Any], to: Physical) -> tuple[Any, list[Any]]:
    """A fake mode, and arguments with values replaced by its fake tensors."""
    fakes = _Fakes(to, {})
    with fakes.mode:
        return fakes.mode, [fakes.of(value, fresh=True) for value in bound]


def _run_fake(spec: OpSpec, fake_args: list[Any]) -> Any:
    positional, keywords = spec.call_arguments(fake_args)
    try:
        return spec.target(*positional, **keywords)
    except _torch.data_dependent_errors() as error:
        raise NotRecordable(f"result depends on numbers: {error}", fallback=False) from None
    except _torch.unsupported_errors() as error:
        raise NotRecordable(f"no fake kernel: {error}", fallback=True) from None
    except TorporError:  # from a lowering that infers the types
        raise
    except RuntimeError as error:
        if "no fake impl registered" in str(error):
            raise NotRecordable(f"no fake kernel: {error}", fallback=True) from None
        raise


class _StandIns(abc.ABC):
    """Makes tensors with the types of values, on the physical device."""

    def __init__(self, to: Physical, sample: dict[Value, Any]) -> None:
        self.to = to
        self.sample = sample
        self.made: dict[Value, Any] = {}

    def of(self, arg: Any, fresh: bool) -> Any:
        if type(arg) is Value:
            if type(arg.type) is ScalarType:
                return self.sample[arg]
            if fresh:
                return self.tensor(arg.type)
            made = self.made.get(arg)
            if made is None:
                made = self.made[arg] = self.tensor(arg.type)
            return made
        if type(arg) is tuple:
            return [self.of(item, fresh) for item in arg]
        if type(arg) is torch.device:
            return self.to(arg)
        return arg

    @abc.abstractmethod
    def tensor(self, type_: TensorType) -> torch.Tensor:
        """A tensor of this type."""


class _Filled(_StandIns):
    """Real tensors filled with one number."""

    def __init__(self, to: Physical, sample: dict[Value, Any], number: int) -> None:
        super().__init__(to, sample)
        self.number = number

    def tensor(self, type_: TensorType) -> torch.Tensor:
        device = self.to(type_.device)
        number = _harmless(self.number, type_.dtype, device)
        flat = torch.full((type_.span,), number, dtype=type_.dtype, device=device)
        tensor = flat.as_strided(type_.shape, type_.stride)
        if type_.conj:
            tensor = tensor.conj()
        return tensor._neg_view() if type_.neg else tensor


class _Units(_StandIns):
    """Real tensors with all sizes 1; `out=` tensors are empty, so resizing does not warn."""

    def __init__(self, to: Physical, sample: dict[Value, Any], number: int = 1) -> None:
        super().__init__(to, sample)
        self.number = number

    def out(self, arg: Any) -> Any:
        if type(arg) is tuple:
            return [self.out(item) for item in arg]
        if type(arg) is not Value:
            return arg
        return torch.empty((0,), dtype=arg.type.dtype, device=self.to(arg.type.device))

    def tensor(self, type_: TensorType) -> torch.Tensor:
        device = self.to(type_.device)
        number = _harmless(self.number, type_.dtype, device)
        return torch.full((1,) * len(type_.shape), number, dtype=type_.dtype, device=device)


def _harmless(number: int, dtype: torch.dtype, device: torch.device) -> int:
    """`number`, or 0 if it might be an index out of range on a GPU, which would be fatal."""
    return number if device.type == "cpu" or dtype.is_floating_point or dtype.is_complex else 0


class _Fakes(_StandIns):
    """Fake tensors."""

    def __init__(self, to: Physical, sample: dict[Value, Any]) -> None:
        super().__init__(to, sample)
        self.mode = _torch.fake_mode()

    def tensor(self, type_: TensorType) -> torch.Tensor:
        device = self.to(type_.device)
        if type_.offset == 0 and not type_.conj and not type_.neg:
            return torch.empty_strided(type_.shape, type_.stride, dtype=type_.dtype, device=device)
        base = torch.empty((type_.offset + type_.span,), dtype=type_.dtype, device=device)
        tensor = base.as_strided(type_.shape, type_.stride, type_.offset)
        if type_.conj:
            tensor = tensor.conj()
        return tensor._neg_view() if type_.neg else tensor


def common_device(spec: OpSpec, bound: list[Any]) -> torch.device | None:
    """The device of all operands; 0-dim CPU tensors may be mixed with any, as in eager."""
    mixes = spec.target._opname in MIXES_DEVICES
    found: torch.device | None = None
    guest: torch.device | None = None
    for type_ in _operand_types(spec, bound):
        device: torch.device = type_.device
        if device.type == "cpu" and (mixes or not type_.shape):
            guest = device
        elif found is None or found == device:
            found = device
        elif not mixes:
            raise DeviceMismatch(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{found} and {device}!"
            )
    return found or guest


def _operand_types(spec: OpSpec, bound: list[Any]) -> Iterator[TensorType]:
    for argument, value in zip(spec.arguments, bound, strict=True):
        if argument.kind is ArgKind.TENSOR or argument.kind is ArgKind.TENSORS:
            for item in value if type(value) is tuple else (value,):
                if type(item) is Value and type(item.type) is TensorType:
                    yield item.type


def _collect(
    spec: OpSpec, result: Any, bound: list[Any], fake_args: list[Any], device: torch.device | None
) -> Types:
    results = result if len(spec.returns) > 1 else (result,) if spec.returns else ()
    types: list[TensorType | None] = []
    explicit = _explicit_device(spec, bound)
    for returned, tensor in zip(spec.returns, results, strict=True):
        if returned.kind in (ReturnKind.FRESH, ReturnKind.VIEW):
            for item in tensor if returned.is_list else (tensor,):
                types.append(_type(item, explicit or device, returned.kind is ReturnKind.FRESH))
    for position in spec.mutated:
        old, new = bound[position], fake_args[position]
        if type(old) is Value:
            types.append(_written(old.type, new))
        elif type(old) is tuple:
            types += [_written(o.type, n) for o, n in zip(old, new, strict=True)]
    return tuple(types)


def _explicit_device(spec: OpSpec, bound: list[Any]) -> torch.device | None:
    for argument, value in zip(spec.arguments, bound, strict=True):
        if argument.name == "device" and type(value) is torch.device:
            return value
    return None


def _type(tensor: Any, device: torch.device | None, fresh: bool) -> TensorType | None:
    if tensor is None:
        return None
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_nested:
        raise NotRecordable(f"result has layout {tensor.layout}", fallback=True)
    type_ = TensorType.of_tensor(tensor, device)
    if fresh and (type_.offset or type_.conj or type_.neg):  # not of fresh memory
        return TensorType.of(type_.shape, type_.stride, type_.dtype, type_.device)
    return type_


def _written(old: TensorType, new: torch.Tensor) -> TensorType:
    """The type of a written tensor: unchanged unless the op resized it (`out=`)."""
    if tuple(new.shape) == old.shape and old.numel:
        return old
    return TensorType.of_tensor(new, old.device)
