"""Replace in-place ops, and ops on lists, by functional ops on single tensors.

    %2 = aten.mul_.Tensor(%0, %1)                  %2 = aten.mul.Tensor(%0, %1)
    %4, %5 = aten._foreach_exp_.default([%0, %1])  %4 = aten.exp.default(%0)
                                                   %5 = aten.exp.default(%1)

The graph is functional already (a write makes a new value); this makes its ops functional too. Runs
as part of the pass `expand`, for backends that request it (`Backend.functional`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch

from torpor._torch import OpOverload
from torpor.ir.node import Node, Value
from torpor.ops.spec import ArgKind, OpSpec, spec_of

aten = torch.ops.aten

Call = Callable[[OpOverload, list[Any], Any, Sequence[Any]], Sequence[Value]]
"""Adds a node (op, arguments in schema order, site, output types) and returns its outputs."""

Infer = Callable[[OpOverload, list[Any]], Sequence[Any]]
"""Infers the output types of an op from its arguments in schema order."""

IN_DTYPE_OF_RESULT: Final = ("cumprod", "cumsum", "mean", "nansum", "prod", "sum")
"""In-place ops that convert their input to the dtype of their output before they compute."""


@functools.cache
def twin_of(target: OpOverload) -> OpOverload | None:
    """The functional variant of an op that writes, if torch has one."""
    wanted = [(a.name, str(a.type)) for a in target._schema.arguments if not _is_out(a)]
    for candidate in _functional_ops(target.namespace, functional_name(target._opname)):
        if candidate is not target and wanted == [
            (a.name, str(a.type)) for a in candidate._schema.arguments
        ]:
            return candidate
    return None


def _functional_ops(namespace: str, name: str) -> list[OpOverload]:
    packet = getattr(getattr(torch.ops, namespace, None), name, None)
    found = [] if packet is None else [getattr(packet, each) for each in packet.overloads()]
    return [op for op in found if not any(map(_is_written, op._schema.arguments))]


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _is_out(argument: Any) -> bool:
    return bool(argument.kwarg_only) and _is_written(argument)


def functional_name(name: str) -> str:
    """The name of an op's functional variant."""
    if name.startswith("__i") and name.endswith("__"):  # __iand__
        return f"__{name[3:]}"
    return name[:-1] if name.endswith("_") and not name.endswith("__") else name


# -- lists -----------------------------------------------------------------------------------------

_OTHER_NAMES: Final = {"maximum": "clamp_min", "minimum": "clamp_max", "norm": "linalg_vector_norm"}
_ITEMS: Final = {"List[Tensor]": "Tensor", "List[number]": "number"}
_LISTS: Final = (ArgKind.TENSORS, ArgKind.SCALARS)


@functools.cache
def single_of(target: OpOverload) -> tuple[OpOverload, tuple[int | None, ...]] | None:
    """The op that a `_foreach` op applies to each item, and a mapping of its arguments.

    Tensors and numbers are matched by position, everything else by name.
    """
    name = functional_name(target._opname).removeprefix("_foreach_")
    names = [name, _OTHER_NAMES[name]] if name in _OTHER_NAMES else [name]
    given = [(a.name, _ITEMS.get(str(a.type), str(a.type))) for a in target._schema.arguments]
    for candidate in [op for each in names for op in _functional_ops("aten", each)]:
        places = _places(given, candidate._schema.arguments)
        if places is not None:
            return candidate, places
    return None


def _places(given: Sequence[tuple[str, str]], arguments: Any) -> tuple[int | None, ...] | None:
    """For each argument of the op, the index of the one given for it; None if they do not match."""
    ordered = [i for i, (_, kind) in enumerate(given) if kind in ("Tensor", "number")]
    named = {name: i for i, (name, _) in enumerate(given) if i not in ordered}
    places: list[int | None] = []
    for argument in arguments:
        kind, place = str(argument.type), named.pop(argument.name, None)
        if place is None and kind in ("Tensor", "number") and ordered:
            place = ordered.pop(0)
            if given[place][1] != kind:
                return None
        if place is None and not argument.has_default_value():
            return None
        places.append(place)
    return None if ordered or named else tuple(places)


# -- nodes -----------------------------------------------------------------------------------------


def is_rewritten(node: Node) -> bool:
    """Whether its op writes, or works on lists."""
    spec = spec_of(node.op.target)
    return bool(spec.mutated) or spec.target._opname.startswith("_foreach_")


def functional(node: Node, args: tuple[Any, ...], call: Call, infer: Infer) -> list[Value] | None:
    """Functional replacements of the outputs of `node` on `args`; None if it stays as it is."""
    spec = spec_of(node.op.target)
    types = [value.type for value in node.outputs]
    make = functools.partial(_made, call, infer, node.site)
    if spec.target._opname.startswith("_foreach_"):
        single = single_of(spec.target)
        if single is None or None in types:
            return None
        return _by_item(spec, args, single, types, make)
    twin = twin_of(spec.target) if spec.mutated else None
    if twin is aten.copy.default and _is_like(args[1], types[0]):  # the old contents are irrelevant
        return make(aten.clone.default, [args[1], None], types)
    return None if twin is None else make(twin, _twin_arguments(spec, args, types), types)


def _is_like(value: Any, type_: Any) -> bool:
    mine = value.type
    return (mine.shape, mine.dtype, mine.device) == (type_.shape, type_.dtype, type_.device)


def _by_item(
    spec: OpSpec,
    args: tuple[Any, ...],
    single: tuple[OpOverload, tuple[int | None, ...]],
    types: Sequence[Any],
    make: Callable[..., list[Value] | None],
) -> list[Value] | None:
    op, places = single
    defaults = [argument.default_value for argument in op._schema.arguments]
    lists = {i for i, a in enumerate(spec.arguments) if a.kind in _LISTS}
    made: list[Value] = []
    for item, type_ in enumerate(types):
        given = [arg[item] if i in lists else arg for i, arg in enumerate(args)]
        bound = [
            default if place is None else given[place]
            for default, place in zip(defaults, places, strict=True)
        ]
        outputs = make(op, bound, [type_])
        if outputs is None:
            return None
        made += outputs
    return made


def _twin_arguments(spec: OpSpec, args: tuple[Any, ...], types: Sequence[Any]) -> list[Any]:
    all_pairs = zip(spec.arguments, args, strict=True)
    pairs = [(a, v) for a, v in all_pairs if not (a.mutated and a.keyword_only)]  # out=
    if functional_name(spec.target._opname) in IN_DTYPE_OF_RESULT:
        dtype = types[-1].dtype
        return [dtype if a.name == "dtype" and v is None else v for a, v in pairs]
    return [v for _, v in pairs]


def _made(
    call: Call, infer: Infer, site: Any, op: OpOverload, bound: list[Any], types: Sequence[Any]
) -> list[Value] | None:
    """The outputs of an op, converted to the dtypes and strides of `types`."""
    inferred = infer(op, bound)
    shapes = [None if t is None else t.shape for t in inferred]
    if shapes != [None if t is None else t.shape for t in types]:
        return None
    if all(mine is None or mine.dtype is t.dtype for mine, t in zip(inferred, types, strict=True)):
        return list(call(op, bound, site, types))
    outputs = call(op, bound, site, inferred)
    return [_cast(call, site, v, t) for v, t in zip(outputs, types, strict=True)]


def _cast(call: Call, site: Any, value: Value, type_: Any) -> Value:
    if type_ is None or value.type.dtype is type_.dtype:
        return value
    bound = [value, type_.dtype, None, None, None, False, None]
    return call(aten._to_copy.default, bound, site, [type_])[0]
