"""Node classes with typed arguments: one for each ATen overload that can be a node.

    >>> from torpor.ops.nodes import AddTensor
    >>> total = AddTensor.create(x, y, alpha=2)

The ops are those of the installed torch. A class is made on first use (`ops.typed_node`).
`torpor codegen --stubs` writes argument names and types for type checkers and editors; without the
stubs, those accept any name and any argument.
"""

from __future__ import annotations

import functools
import typing
from collections import abc

# Import only modules: a capitalized name here would hide a class. The class of `aten.any` is `Any`.
from torpor import _torch, errors
from torpor.ops import spec, typed_node
from torpor.text import torch_parser

OPS: abc.Mapping[str, str]
"""The op of every class (`AddTensor`: `aten.add.Tensor`), made on first use."""


def __getattr__(name: str) -> typing.Any:
    made = _nodes() if name == "OPS" else _find(name)
    return globals().setdefault(name, made)  # so that the next lookup does not reach this function


def __dir__() -> list[str]:
    return sorted({"OPS", *globals(), *_nodes()})


def _find(name: str) -> type[typed_node.TypedNode]:
    op = _overloads().get(name)
    if op is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if not _is_node(op):
        raise AttributeError(f"module {__name__!r} has no {name!r}: {op} is never a node")
    return typed_node.node_class(__name__, name, op)


@functools.cache
def _overloads() -> abc.Mapping[str, str]:
    """All of ATen by class name, including ops that are never nodes: filtering takes longer."""
    found = (name.removeprefix("aten::").partition(".") for name in _torch.ops_in("aten"))
    return {
        typed_node.class_name(base, overload): f"aten.{base}.{overload or 'default'}"
        for base, _, overload in found
    }


@functools.cache
def _nodes() -> abc.Mapping[str, str]:
    return {name: op for name, op in _overloads().items() if _is_node(op)}


def _is_node(op: str) -> bool:
    try:
        return typed_node.can_be_node(spec.spec_of(torch_parser.find_op(op)))
    except errors.GraphError:  # a kernel without a schema
        return False
