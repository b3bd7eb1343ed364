"""Parses graphs onto torch's ops: the inverse of `torpor.text.printer.print_graph`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Final

import torch

from torpor._torch import OpOverload
from torpor.errors import GraphError
from torpor.ir.graph import Graph
from torpor.ir.node import TABLE, Node
from torpor.ir.types import Types
from torpor.ops.keys import node_of
from torpor.ops.spec import ArgKind, Argument, OpSpec, spec_of
from torpor.text.parser import parse_graph

_LISTS: Final = (ArgKind.TENSORS, ArgKind.PLAINS, ArgKind.FLOATS, ArgKind.SCALARS)


Make = Callable[[OpSpec, list[Any], Types], Node]
"""Finds or makes the node of an op from its arguments, in schema order, and types."""


def parse(text: str, make: Make = node_of) -> Graph:
    """Parse `text` into the same nodes that recording the same ops gives.

    Types are trusted: a node interned here first has the types in the text, for recorders too. So
    parse only text that torpor printed; for any other, pass a `make` that does not intern.
    """
    return parse_graph(text, partial(_node, make))


def find_op(name: str) -> OpOverload:
    """The torch op with that name in the IR: `aten.add.Tensor`."""
    kind = TABLE.kinds.get(name)
    found = kind.target if kind is not None else None
    parts = name.split(".")
    if found is None and len(parts) == 3:
        found = torch.ops
        for part in parts:
            found = getattr(found, part, None)
    if not isinstance(found, OpOverload):
        raise GraphError(f"torch has no op {name}")
    return found


def _node(make: Make, name: str, args: list[Any], keywords: dict[str, Any], types: Types) -> Node:
    spec = spec_of(find_op(name))
    bound = _bind(spec, args, keywords)
    for argument, value in zip(spec.arguments, bound, strict=True):
        _check_argument(spec, argument, value)
    return make(spec, bound, types)


def _bind(spec: OpSpec, args: list[Any], keywords: dict[str, Any]) -> list[Any]:
    if len(args) > len(spec.arguments):
        raise GraphError(f"{spec.name} takes {len(spec.arguments)} arguments, not {len(args)}")
    names = [argument.name for argument in spec.arguments]
    for name in keywords:
        if name not in names:
            raise GraphError(f"{spec.name} has no argument {name!r}; it has {', '.join(names)}")
        if name in names[: len(args)]:
            raise GraphError(f"argument {name!r} of {spec.name} is given twice")
    for argument in spec.arguments[len(args) :]:
        if not argument.has_default and argument.name not in keywords:
            raise GraphError(f"argument {argument.name!r} of {spec.name} is missing")
    return spec.bind(tuple(args), keywords)


def _check_argument(spec: OpSpec, argument: Argument, value: Any) -> None:
    if value is None:
        return
    if argument.kind is ArgKind.OPAQUE:
        raise GraphError(f"argument {argument.name!r} of {spec.name} cannot be part of a graph")
    if (argument.kind in _LISTS) != isinstance(value, tuple):
        wanted = "a list" if argument.kind in _LISTS else "no list"
        raise GraphError(f"argument {argument.name!r} of {spec.name} must be {wanted}")
