"""Generates modules of typed node classes: a table, and a stub with their signatures."""

from __future__ import annotations

from collections.abc import Iterable

from torpor.codegen.model import LazyArgument, LazyIrSchema
from torpor.ops.rules import PROMOTABLE_FLOATS
from torpor.ops.typed_node import attribute_name

_IMPORTS = """\
import typing
from collections.abc import Sequence
from typing import Self

import torch

from torpor.ir.node import Node, Value
from torpor.ops.typed_node import Operand, Scalar, TypedNode, Types
"""


def emit(schemas: Iterable[LazyIrSchema], header: str) -> dict[str, str]:
    """The table and the stub, by path."""
    ordered = _ordered(schemas)
    return {"nodes.py": _table(ordered, header), "nodes.pyi": stub(ordered, header)}


def _ordered(schemas: Iterable[LazyIrSchema]) -> list[LazyIrSchema]:
    return sorted(schemas, key=lambda s: (s.class_name.lower(), s.class_name))


def _table(schemas: list[LazyIrSchema], header: str) -> str:
    rows = "".join(f'    "{s.class_name}": "{s.name}",\n' for s in schemas)
    return (
        f'{header}"""Node classes with typed arguments, made on first use: `ops.typed_node`."""\n\n'
        "from torpor.ops.typed_node import class_finder\n\n"
        f"OPS = {{\n{rows}}}\n\n__getattr__ = class_finder(__name__, OPS)\n"
    )


def stub(schemas: Iterable[LazyIrSchema], header: str) -> str:
    """The stub, for type checkers, of a module of node classes."""
    classes = "".join(f"\n{node_class(schema)}" for schema in _ordered(schemas))
    return f"{header}{_IMPORTS}\nOPS: dict[str, str]\n{classes}"


def node_class(schema: LazyIrSchema) -> str:
    """The stub of one class."""
    parameters = ", ".join(["", *signature(schema)])
    attributes = "".join(
        f"    {attribute_name(a.name)}: {_annotation(a, as_attribute=True)}\n"
        for a in schema.arguments
    )
    return (
        f"class {schema.class_name}(TypedNode):  # {schema.signature}\n"
        f"{attributes}"
        "    @classmethod\n"
        f"    def create(cls{parameters}) -> Self: ...\n"
        "    @classmethod\n"
        f"    def can_be_reused(cls, node: Node{parameters}) -> bool: ...\n"
        "    @classmethod\n"
        f"    def infer(cls{parameters}) -> Types: ...\n"
    )


def signature(schema: LazyIrSchema) -> list[str]:
    """The parameters, with types, of a function that takes the op's arguments."""
    parts = []
    starred = False
    for argument in schema.arguments:
        if argument.keyword_only and not starred:
            starred = True
            parts.append("*")
        default = " = ..." if argument.has_default else ""
        parts.append(f"{argument.name}: {_annotation(argument, as_attribute=False)}{default}")
    return parts


def _annotation(argument: LazyArgument, as_attribute: bool) -> str:
    """The type of an argument; nodes store lists as tuples."""
    text = argument.type.annotation
    if not argument.mutated:
        text = text.replace("Value", "Operand")
    text = text.replace("Number", "Scalar").replace("Any", "typing.Any")  # `aten.any` is a class
    if argument.name in PROMOTABLE_FLOATS:
        text = text.replace("float", "float | Value")
    return _as_tuple(text) if as_attribute else text


def _as_tuple(text: str) -> str:
    head, opening, rest = text.partition("Sequence[")
    if not opening:
        return text
    item, _, end = rest.rpartition("]")
    return f"{head}tuple[{item}, ...]{end}"
